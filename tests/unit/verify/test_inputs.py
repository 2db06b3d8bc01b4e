"""What is not a distribution, a block or a uniform is refused with one sentence; what is stays exact."""

from typing import Any

import numpy as np
import pytest
import torch

from dflash_verify.verify import InvalidProbabilities, acceptance_pmf, cut, output_pmf, survival_from_paths, verify

TARGET = [[0.5, 0.5], [0.0, 1.0], [0.5, 0.5]]
DRAFT = [[1.0, 0.0], [0.5, 0.5]]
GOOD: dict[str, Any] = {"target_probs": TARGET, "draft_probs": DRAFT, "draft_tokens": [0, 1], "uniforms": [0.1] * 3}


@pytest.mark.parametrize(
    ("argument", "value", "says"),
    [
        ("target_probs", [[0.5, 0.6], [0.0, 1.0], [0.5, 0.5]], "sums to 1.1"),
        ("target_probs", [[1.5, -0.5], [0.0, 1.0], [0.5, 0.5]], "-0.5"),
        ("target_probs", [[float("nan"), 1.0], [0.0, 1.0], [0.5, 0.5]], "NaN"),
        ("target_probs", [[0.0, 0.0], [0.0, 1.0], [0.5, 0.5]], "sums to 0"),
        ("target_probs", TARGET[:2], "one target row more"),
        ("target_probs", [0.5, 0.5], "2 axes"),
        ("draft_probs", [[2.0, -1.0], [0.5, 0.5]], "-1"),
        ("draft_probs", [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]], "vocabularies of 2 and 3"),
        ("draft_tokens", [0, 2], "vocabulary size 2"),
        ("draft_tokens", [0], "expected (2,)"),
        ("uniforms", [0.1, 0.1], "expected (3,)"),
        ("uniforms", [0.1, 0.1, 1.5], "outside [0, 1]"),
        ("uniforms", [0.1, 0.1, float("nan")], "outside [0, 1]"),
        ("method", "tree", "token, block, greedy"),
        ("width", 3, "0 to 2"),
        ("limit", -1, "0 or more"),
    ],
)
def test_what_cannot_be_is_refused_with_one_sentence(argument: str, value: Any, says: str) -> None:
    with pytest.raises(ValueError) as refusal:
        verify(**{**GOOD, argument: value})
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_the_enumeration_refuses_the_same_probabilities() -> None:
    with pytest.raises(InvalidProbabilities):
        acceptance_pmf([[0.5, 0.6], [1.0, 0.0]], [[1.0, 0.0]], "block")
    with pytest.raises(InvalidProbabilities):
        output_pmf(lambda prefix: [0.5, 0.6], lambda prefix: [1.0, 0.0], "block", 2, width=1)
    with pytest.raises(InvalidProbabilities):
        survival_from_paths([TARGET], [DRAFT], [[0, 5]])


def test_a_vocabulary_too_large_to_enumerate_is_refused_before_memory_is_spent() -> None:
    with pytest.raises(ValueError, match="survival_from_paths"):
        acceptance_pmf(torch.full((8, 256), 1 / 256), torch.full((7, 256), 1 / 256), "block")


def test_two_functions_need_a_width() -> None:
    with pytest.raises(ValueError, match="width="):
        acceptance_pmf(lambda prefix: [0.5, 0.5], lambda prefix: [0.5, 0.5], "token")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_softmax_over_a_large_vocabulary_is_accepted(dtype: torch.dtype) -> None:
    logits = torch.randn(3, 150_000, generator=torch.Generator().manual_seed(0), dtype=dtype)
    probs = logits.softmax(-1)
    accepted, token = verify(probs, probs[:2], [1, 2], [0.5, 0.5, 0.5], "block")
    assert accepted == 2, "a drafter equal to the target is always accepted"
    assert 0 <= token < 150_000


def test_numpy_arrays_and_lists_give_what_tensors_give() -> None:
    as_lists = verify(**GOOD)
    as_arrays = verify(**{name: np.asarray(value) for name, value in GOOD.items()})
    assert as_lists == as_arrays == verify(**{name: torch.tensor(value) for name, value in GOOD.items()})


@pytest.mark.parametrize("method", ["token", "block", "greedy"])
def test_a_placeholder_ends_the_block_before_it(method: str) -> None:
    full = verify(TARGET[:2], DRAFT[:1], [0], [0.1, 0.2], method)
    padded = verify(TARGET, DRAFT, [0, -1], [0.1, 0.9, 0.2], method)
    assert padded == full
    assert verify(TARGET, DRAFT, [-1, 1], [0.1, 0.1, 0.7], method)[0] == 0


def test_no_drafts_is_plain_sampling() -> None:
    for method in ("token", "block"):
        assert verify([[0.25, 0.75]], torch.zeros(0, 2), [], [0.3], method) == (0, 1)


def test_a_uniform_of_one_passes_what_is_certain() -> None:
    assert verify([[0.5, 0.5]] * 2, [[0.5, 0.5]], [1], [1.0, 1.0], "block") == (1, 1)


def test_a_cut_off_after_the_sampler_keeps_the_drafts_it_accepted() -> None:
    assert cut(2, 7, [4, 5], 1) == (1, 5)
    assert cut(2, 7, [4, 5], 2) == (2, 7)
    assert cut(1, 7, [4, 5], None) == (1, 7)
    uniforms = [0.1, 0.1, 0.1]
    assert verify(TARGET, DRAFT, [0, 1], uniforms, "block") == (2, 0)
    assert verify(TARGET, DRAFT, [0, 1], uniforms, "block", limit=1) == (1, 1), "the second draft is the next token"
    assert verify(TARGET, DRAFT, [0, 1], uniforms, "block", width=1)[0] == 1, "a narrow step draws its own next token"
