"""What `check --gpu` runs on a device, run here through Triton's interpreter: the kernels are vLLM's own."""

import pytest

from dflash_verify.cpu import interpreter
from dflash_verify.overlays import gdn_active_width, probes
from dflash_verify.settings import load

interpreter.install()


@pytest.fixture
def narrow_step():
    """The probe of one kernel at one width, with the overlays on."""
    from dflash_verify import overlays

    overlays.apply(load({"DFLASH_VERIFY_TOKENS": "auto:1,3,7"}))
    kernels = probes._recurrences()
    yield lambda name, width: probes._narrow_step(name, kernels[name], width, "cpu")
    overlays.revert()


KERNELS = ["GDN (Qwen, Triton)", "KDA (Kimi, Bailing)", "KDA (GLM-5.3)"]


@pytest.mark.parametrize("name", KERNELS)
def test_a_narrowed_step_is_the_stock_step_bit_for_bit(narrow_step, release, name):
    if "GLM" in name and release < (0, 30, 0):
        pytest.skip("GLM-5.3's kernel exists from 0.30.0 on")
    probe = narrow_step(name, 3)
    assert probe.ok, probe.detail
    assert "4 of 8 columns" in probe.detail


def test_a_copied_row_would_be_noticed(narrow_step, monkeypatch):
    """The mistake the layer list is there for: a kernel that copies the rows loses the slot to resume from."""

    def copied(metadata, columns):
        rows = metadata.spec_state_indices_tensor
        # In the memory of the whole rows, so that what is read past the end of the copy is a slot, though a wrong one.
        copy = rows.clone().view(-1)[: rows.shape[0] * columns].view(-1, columns)
        metadata.spec_state_indices_tensor = copy.copy_(rows[:, :columns].clone())
        return metadata

    monkeypatch.setattr(gdn_active_width, "_narrowed", copied)
    assert not narrow_step(KERNELS[0], 3).ok


def test_without_a_device_the_check_says_where_to_run(monkeypatch):
    (probe,) = probes.run_probes("cuda")
    assert not probe.ok
    assert "machine that serves" in probe.detail
