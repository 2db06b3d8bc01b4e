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
        ("draft_tokens", [0, 1.5], "whole token ids"),
        ("draft_tokens", [0, float("nan")], "whole token ids"),
        ("draft_tokens", [0, None], "expected numbers"),
        ("draft_tokens", [0, -2], "holds -2"),
        ("target_probs", np.array(TARGET, dtype=np.complex64), "complex64"),
        ("target_probs", [["a", "b"]] * 3, "expected numbers"),
        ("target_probs", [[0.5, 0.5], [1.0]], "rows of one length"),
        ("target_probs", None, "expected numbers"),
        ("draft_probs", torch.tensor(DRAFT, dtype=torch.complex64), "complex64"),
        ("uniforms", [0.1, 0.1, 1j], "complex128"),
        ("width", 1.5, "whole number"),
        ("limit", 1.5, "whole number"),
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


VOCAB_SIZE = 151_936  # Qwen3's


def float32_softmax(scale: float, rows: int = 3) -> np.ndarray:
    """A softmax whose denominator was added up one by one in float32: the least accurate order there is."""
    logits = (np.random.default_rng(0).standard_normal((rows, VOCAB_SIZE)) * scale).astype(np.float32)
    mass = np.exp(logits - logits.max(-1, keepdims=True))
    return mass / mass.cumsum(-1, dtype=np.float32)[:, -1:]


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy, list])
def test_float32_rows_may_miss_one_by_the_rounding_of_their_vocabulary(kind: Any, scale: float) -> None:
    rows = float32_softmax(scale)
    exact = rows.astype(np.float64)
    assert np.abs(exact.sum(-1) - 1).max() > 1e-5, "or the test shows nothing"
    paths = survival_from_paths([rows], [rows[:2]], [[1, 2]]) if kind is list else None
    accepted, token = verify(kind(rows), kind(rows[:2]), [1, 2], [0.5, 0.5, 0.5], "block")
    assert accepted == 2, "a drafter equal to the target is always accepted"
    exact /= exact.sum(-1, keepdims=True)
    assert token == int((exact[2].cumsum() > 0.5).argmax()), "drawn from the rows renormalised in float64"
    if paths is not None:
        # One rounding of 2**-53 in each of V terms and in each addition, twice: rows are scaled to sum to 1.
        assert float((paths.token - 1).abs().max()) <= 4 * VOCAB_SIZE * 2.0**-53


def test_the_rounding_allowed_to_float32_is_not_allowed_to_float64_nor_to_a_small_vocabulary() -> None:
    rows = float32_softmax(3.0)
    with pytest.raises(InvalidProbabilities, match="within 1e-06"):
        verify(rows.astype(np.float64), rows[:2].astype(np.float64), [1, 2], [0.5] * 3)
    small = np.array([[0.5, 0.50001]] * 3, dtype=np.float32)
    with pytest.raises(InvalidProbabilities, match="within 1e-06"):
        verify(small, small[:2], [0, 1], [0.5] * 3)


def test_a_float32_row_that_top_p_cut_and_nobody_renormalised_is_refused() -> None:
    rows = float32_softmax(1.0) * np.float32(0.998)
    with pytest.raises(InvalidProbabilities, match=r"within 0\.001"):
        verify(rows, rows[:2], [1, 2], [0.5] * 3)


def test_arrays_of_either_byte_order_are_read() -> None:
    swapped = {name: np.asarray(value) for name, value in GOOD.items()}
    assert verify(**{name: value.astype(value.dtype.newbyteorder(">")) for name, value in swapped.items()}) == verify(
        **GOOD
    )


def test_a_recorded_draft_that_its_distribution_forbids_is_refused() -> None:
    with pytest.raises(InvalidProbabilities, match=r"token 1 .* probability 0"):
        survival_from_paths([TARGET], [DRAFT], [[1, 1]])
    with pytest.raises(InvalidProbabilities, match="whole token ids"):
        survival_from_paths([TARGET], [DRAFT], [[0, 0.5]])


def test_functions_that_return_no_rows_and_lengths_that_are_no_numbers_are_one_sentence() -> None:
    with pytest.raises(InvalidProbabilities, match="expected numbers"):
        acceptance_pmf(lambda prefix: None, lambda prefix: [0.5, 0.5], "token", width=1)
    for arguments in ({"length": 2.5}, {"length": "2"}, {"length": 2, "width": 1.5}, {"length": 2, "limit": 0.5}):
        with pytest.raises(ValueError, match="whole number"):
            output_pmf(TARGET, DRAFT, "token", **arguments)
    with pytest.raises(ValueError, match="whole number"):
        acceptance_pmf(TARGET, DRAFT, "token", limit=1.5)


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
