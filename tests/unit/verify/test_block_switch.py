"""DFLASH_BLOCK_VERIFY=1 sets, says or refuses the right thing for every drafter, release and setting."""

from dataclasses import replace
from pathlib import Path

import pytest

from dflash_verify.block import (
    GREEDY_ARCHITECTURES,
    SAMPLING_ARCHITECTURES,
    Capabilities,
    Decision,
    Request,
    decide,
    read_capabilities,
)

ABLE = Capabilities(
    release="0.33.0",
    has_block_method=True,
    draft_noise_separate=True,
    placeholders_guarded=True,
    step_noise_separate=True,
    architectures=frozenset(SAMPLING_ARCHITECTURES) | frozenset(GREEDY_ARCHITECTURES),
)
DFLASH2 = Request("dflash", ("DFlash2DraftModel",), ABLE, model_runner_v2=True)


def refused(request: Request) -> str:
    decision = decide(request)
    assert decision.refusal is not None
    assert decision == Decision(refusal=decision.refusal), "a refusal sets nothing"
    assert decision.refusal.startswith("DFLASH_BLOCK_VERIFY=1 ")
    assert decision.refusal.endswith(".")
    assert "\n" not in decision.refusal
    return decision.refusal


@pytest.mark.parametrize(("architecture", "method"), SAMPLING_ARCHITECTURES.items())
def test_unset_draft_sampling_becomes_probabilistic_and_the_start_line_says_so(architecture: str, method: str) -> None:
    decision = decide(Request(method, (architecture,), ABLE, model_runner_v2=True))
    assert decision.rejection_sample_method == "block"
    assert decision.draft_sample_method == "probabilistic"
    assert decision.start_line is not None
    assert 'draft_sample_method set to "probabilistic"' in decision.start_line
    assert decision.warning is None


def test_sampling_that_the_user_chose_is_left_alone() -> None:
    decision = decide(replace(DFLASH2, draft_sample_method="probabilistic", rejection_sample_method="block"))
    assert (decision.rejection_sample_method, decision.draft_sample_method) == ("block", None)
    assert decision.warning is None


@pytest.mark.parametrize(
    ("request_", "cause"),
    [
        (replace(DFLASH2, draft_sample_method="greedy"), 'draft_sample_method is "greedy"'),
        (replace(DFLASH2, use_local_argmax_reduction=True), "use_local_argmax_reduction"),
        (replace(DFLASH2, architectures=("Qwen3XPressModel",)), "Qwen3XPressModel always drafts greedily"),
        (replace(DFLASH2, architectures=("DFlashQwen3XPressModel",)), "DFlashQwen3XPressModel always drafts greedily"),
    ],
)
def test_greedy_drafts_start_and_are_told_why_nothing_changes(request_: Request, cause: str) -> None:
    decision = decide(request_)
    assert decision.refusal is None
    assert decision.draft_sample_method is None
    assert decision.warning is not None
    assert "no effect" in decision.warning
    assert cause in decision.warning


@pytest.mark.parametrize("method", ["eagle3", "eagle", "ngram", "mtp", "suffix", None])
def test_other_methods_are_refused(method: str | None) -> None:
    assert f"method is {method or 'none'}" in refused(replace(DFLASH2, method=method))


@pytest.mark.parametrize("architectures", [("Eagle3DFlashThing",), (), ("Qwen3DSparkModel",)])
def test_an_unknown_dflash_architecture_is_refused(architectures: tuple[str, ...]) -> None:
    sentence = refused(replace(DFLASH2, architectures=architectures))
    assert "DFlash2DraftModel" in sentence, "says what is known"


def test_model_runner_v1_is_refused() -> None:
    assert "Model Runner V1" in refused(replace(DFLASH2, model_runner_v2=False))


@pytest.mark.parametrize("device", ["npu", "tpu", ""])
def test_devices_without_a_block_mode_are_refused(device: str) -> None:
    assert "no block mode" in refused(replace(DFLASH2, device=device))


@pytest.mark.parametrize("method", ["synthetic", "fly", "standard"])
def test_another_rejection_method_by_name_is_a_contradiction(method: str) -> None:
    assert method in refused(replace(DFLASH2, rejection_sample_method=method))


def test_sampling_asked_of_a_greedy_drafter_is_refused() -> None:
    request = replace(DFLASH2, architectures=("Qwen3XPressModel",), draft_sample_method="probabilistic")
    assert "records no distribution" in refused(request)


def test_sampling_without_logits_is_refused() -> None:
    refused(replace(DFLASH2, draft_sample_method="probabilistic", use_local_argmax_reduction=True))


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("has_block_method", "no block verification"),
        ("draft_noise_separate", "54282"),
        ("placeholders_guarded", "50939"),
        ("step_noise_separate", "verified again"),
    ],
)
def test_each_fault_of_a_release_is_refused(fault: str, says: str) -> None:
    assert says in refused(replace(DFLASH2, capabilities=replace(ABLE, **{fault: False})))


def write(root: Path, relative: str, text: str) -> None:
    path = root / relative
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


GUARDED = "".join(
    f"def {name}(draft_token):\n    if draft_token >= 0:\n        pass\n"
    for name in ("_compute_cumulative_log_p_kernel", "_compute_local_residual_mass_kernel", "_resample_kernel")
)


def test_capabilities_come_from_the_source_not_from_the_release_name(tmp_path: Path) -> None:
    kernel = (
        "def _rejection_kernel(draft_sampled, seed, i):\n    ok = draft_sampled >= 0\n    s = spec_step_seed(seed, i)\n"
    )
    write(tmp_path, "v1/worker/gpu/spec_decode/rejection_sampler_utils.py", GUARDED + kernel)
    write(
        tmp_path,
        "v1/worker/gpu/sample/gumbel.py",
        "_DRAFT_NOISE_SALT = 1\ndef gumbel_block_argmax(seed, col):\n    return spec_step_seed(seed, col)\n",
    )
    write(tmp_path, "config/speculative.py", 'RejectionSampleMethod = Literal["standard", "block"]\n')
    write(tmp_path, "model_executor/models/registry.py", 'M = {"DFlash2DraftModel": ("a", "b"), "Other": ("a", "c")}\n')
    found = read_capabilities(tmp_path, "0.34.0.dev7+g123")
    assert found == replace(ABLE, release="0.34.0.dev7+g123", architectures=frozenset({"DFlash2DraftModel"}))


def test_an_empty_tree_can_do_nothing(tmp_path: Path) -> None:
    found = read_capabilities(tmp_path, "none")
    assert found == Capabilities("none", False, False, False, False, frozenset())
    refused(replace(DFLASH2, capabilities=found))
