"""What the switch for block verification reads in the sources of every supported release."""

from pathlib import Path

import pytest
from wheels import INSTALLED, RELEASES, unpacked

from dflash_verify.block import GREEDY_ARCHITECTURES, SAMPLING_ARCHITECTURES, Request, decide, read_capabilities

EVERY_RELEASE = [pytest.param(r, marks=[] if r == INSTALLED else [pytest.mark.full]) for r in RELEASES]


def package(release: str) -> Path:
    if release == INSTALLED:
        import importlib.util

        spec = importlib.util.find_spec("vllm")
        assert spec is not None
        assert spec.origin is not None
        return Path(spec.origin).parent
    return unpacked(release) / "vllm"


@pytest.mark.parametrize("release", EVERY_RELEASE)
def test_only_releases_without_a_fault_verify_blocks(release: str) -> None:
    found = read_capabilities(package(release), release)
    assert found.has_block_method
    assert found.placeholders_guarded, "vLLM 50939 is repaired in every supported release"
    assert found.draft_noise_separate == (release != "0.28.0"), "vLLM 54282"
    assert found.step_noise_separate == (release >= "0.33.0")
    decision = decide(Request("dflash", ("DFlash2DraftModel",), found, model_runner_v2=True))
    assert (decision.refusal is None) == (release >= "0.33.0")


@pytest.mark.parametrize("release", EVERY_RELEASE)
def test_every_draft_architecture_of_the_registry_is_known(release: str) -> None:
    """A DFlash or DSpark architecture that a release adds must be read and entered before the switch accepts it."""
    import re

    text = (package(release) / "model_executor" / "models" / "registry.py").read_text()
    registered = set(
        re.findall(r'^\s+"(\w*(?:DFlash|DSpark|LiLiCorr|XPress)\w*|MuseGlimmerAssistantModel)": \(', text, re.M)
    )
    assert {"DFlashDraftModel", "DFlash2DraftModel", "DSparkDraftModel"} <= registered
    assert registered <= set(SAMPLING_ARCHITECTURES) | set(GREEDY_ARCHITECTURES)
    assert read_capabilities(package(release), release).architectures == registered
