"""All overlays on the real modules of a release: which apply, what they leave behind, and the compile cache's key."""

import importlib
import inspect
import sys

import pytest

from dflash_verify import overlays
from dflash_verify.overlays.fingerprint import InstalledSource, SourceReader
from dflash_verify.overlays.manifest import load_manifests
from dflash_verify.overlays.plan import LEAVES_OUT_THE_DRAFTER
from dflash_verify.overlays.survey import survey
from dflash_verify.settings import load

WIDTH, STOCK = load({"DFLASH_VERIFY_TOKENS": "3"}), load({"DFLASH_VERIFY_TOKENS": "0"})


def attribute(target):
    """(owner, name, object) of a target in the running vLLM; None where it does not exist."""
    owner = importlib.import_module(target.module)
    *classes, name = target.function.split(".")
    for part in classes:
        owner = vars(owner).get(part)
    return (owner, name, vars(owner)[name]) if owner is not None and name in vars(owner) else None


def everything():
    """Every attribute of every module and class that any manifest touches, by identity."""
    seen = {}
    for manifest in load_manifests():
        for target in manifest.targets:
            found = attribute(target)
            if found is None:
                continue
            module = importlib.import_module(target.module)
            for owner in {id(module): module, id(found[0]): found[0]}.values():
                for name, value in vars(owner).items():
                    seen[target.file, getattr(owner, "__qualname__", ""), name] = value
    return seen


def assert_same_objects(before, after):
    changed = [key for key in before.keys() | after.keys() if before.get(key) is not after.get(key)]
    # Class bookkeeping of ABCs and typing is rebuilt by Python itself on any attribute change.
    assert [key for key in changed if not key[2].startswith(("_abc_", "__annotations_cache__"))] == []


def test_the_release_is_known_by_its_fingerprints(release):
    status = survey(SourceReader(InstalledSource.find()), load_manifests(), {"width", "block"})
    assert status.ok
    assert status.release == ".".join(map(str, release))
    assert {o.release for o in status.overlays} == {status.release}


def test_which_releases_leave_out_the_drafter_at_width_0(release):
    """Where it does not, a plan that lists width 0 says that it saves little."""
    from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

    leaves_out = "if num_speculative_tokens == 0:" in inspect.getsource(DFlashSpeculator.propose)
    assert leaves_out == (release >= LEAVES_OUT_THE_DRAFTER)


def test_every_needed_overlay_marks_its_targets_and_revert_restores_every_object():
    before = everything()
    status = overlays.apply(WIDTH)
    try:
        for manifest in load_manifests():
            for target in manifest.wrapped():
                found = attribute(target)
                if found is None:
                    continue
                names = overlays.marked(found[2]).split(", ")
                applied = status[manifest.name].state == "applied"
                assert (manifest.name in names) == applied, target
                if applied:
                    marker = getattr(found[2], "__func__", found[2]).__dflash_verify__
                    assert marker.original is before[target.file, getattr(found[0], "__qualname__", ""), found[1]]
    finally:
        overlays.revert()
    assert_same_objects(before, everything())


def test_with_0_nothing_is_applied():
    before, finders = everything(), list(sys.meta_path)
    status = overlays.apply(STOCK)
    assert status.names("applied") == ()
    assert sys.meta_path == finders
    assert_same_objects(before, everything())


def test_applying_initialises_no_device():
    import torch

    overlays.apply(WIDTH)
    overlays.revert()
    assert not torch.cuda.is_initialized()


class TestCompileCacheKey:
    @pytest.fixture
    def key(self, make_config):
        def compute(draft_width, schedule):
            return make_config(
                schedule, draft_width=draft_width, capture_sizes=[8, 16]
            ).speculative_config.compute_hash()

        return compute

    def test_different_draft_widths_never_share(self, applied, key):
        keys = {n: key(n, None) for n in (1, 3, 5, 7, 15)}
        assert len(set(keys.values())) == len(keys)

    def test_arms_that_differ_in_width_only_share(self, applied, key):
        assert key(7, [(1, 8, 3)]) == key(7, [(1, 8, 1)]) == key(7, [(1, 1, 1), (2, 2, 7)]) == key(7, None)

    def test_stock_shares_between_draft_widths(self, key):
        """What the overlay is for: the day this fails, vLLM hashes the draft width itself."""
        assert key(7, None) == key(5, None)

    def test_what_stock_tells_apart_stays_apart(self, applied, make_config):
        one, other = (
            make_config(None, capture_sizes=[8], method=method).speculative_config.compute_hash()
            for method in ("dflash", "ngram")
        )
        assert one != other
