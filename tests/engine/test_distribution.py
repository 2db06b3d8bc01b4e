"""Sampling at temperature 1: the tokens have the target's distribution, whatever the width.

Token 1 comes from the prefill and token 2 from a verification, so both ways out of the engine are seen. The exact
probabilities are those of transformers on the same checkpoint.
"""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats

from dflash_verify.cpu.engine import DRAFT_WIDTH, open_engine
from dflash_verify.cpu.models import VOCAB_SIZE, Models

# After it, six first tokens and seven second ones are likely enough for bins of their own.
PROMPT = tuple(b"is what they")
SAMPLES = 384
# Five tests with fixed seeds, of two tokens each: together they would refuse a right engine for one choice of seeds in
# a hundred.
ALPHA = 0.01 / 10

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Exact:
    """Probabilities of output token 1 [vocab], and of token 2 after each token 1 [vocab, vocab] and over all [vocab]."""

    first: Floats
    after: Floats

    @property
    def second(self) -> Floats:
        return self.first @ self.after


@pytest.fixture(scope="module")
def exact(models: Models) -> Exact:
    from transformers import Qwen3ForCausalLM

    target = Qwen3ForCausalLM.from_pretrained(models.target, dtype=torch.float64).eval()
    with torch.no_grad():
        first = target(torch.tensor([PROMPT])).logits[0, -1].softmax(-1)
        longer = torch.tensor([[*PROMPT, token] for token in range(VOCAB_SIZE)])
        after = target(longer).logits[:, -1].softmax(-1)
    return Exact(first.numpy(), after.numpy())


def bins(expected: Floats, *counts: Floats) -> list[Floats]:
    """Each of `counts` with the tokens of less than 5 `expected` draws taken together."""
    often = expected >= 5
    assert expected[~often].sum() >= 5
    assert often.sum() >= 3  # a test of something
    return [np.append(count[often], count[~often].sum()) for count in counts]


def p_value(tokens: list[int], probabilities: Floats) -> float:
    """Chi-square of drawn tokens against exact probabilities."""
    counts = np.bincount(tokens, minlength=VOCAB_SIZE).astype(np.float64)
    expected = probabilities * counts.sum()
    observed, wanted = bins(expected, counts, expected)
    return float(stats.chisquare(observed, wanted).pvalue)


@pytest.mark.parametrize(
    ("verify_tokens", "draft_sampling"),
    [(None, "greedy"), ("1", "greedy"), ("3", "greedy"), ("7", "greedy"), ("3", "probabilistic")],
    ids=lambda value: value or "stock",
)
def test_sampled_tokens_have_the_targets_marginals(
    models: Models, exact: Exact, verify_tokens: str | None, draft_sampling: str
) -> None:
    width = int(verify_tokens or DRAFT_WIDTH)
    environ = {} if verify_tokens is None else {"DFLASH_VERIFY_TOKENS": verify_tokens}
    with open_engine(
        models,
        "dflash2",
        environ,
        {"draft_sample_method": draft_sampling},
        max_num_seqs=48,
        max_num_batched_tokens=2048,
        seed=20261129,
    ) as engine:
        tokens = engine.generate([PROMPT] * SAMPLES, max_tokens=2, temperature=1.0)
        counters = engine.counters()
    first, second = [t[0] for t in tokens], [t[1] for t in tokens]
    assert p_value(first, exact.first) > ALPHA
    assert p_value(second, exact.second) > ALPHA
    # Both outcomes of a verification took part.
    assert counters.draft_tokens == width * counters.drafts
    assert 0.1 * counters.drafts < counters.accepted_tokens < 0.9 * counters.draft_tokens


def test_that_many_samples_would_show_a_rejection_that_samples_the_refused_draft_again(exact: Exact) -> None:
    """The usual fault of a rejection sampler: after a refusal it draws from the target instead of the residual."""
    favourite = exact.after.argmax(-1)
    wrong = (1 - exact.after.max(-1))[:, None] * exact.after
    wrong[np.arange(VOCAB_SIZE), favourite] += exact.after.max(-1)
    wanted, found = bins(SAMPLES * exact.second, SAMPLES * exact.second, SAMPLES * (exact.first @ wrong))
    freedom = len(wanted) - 1
    noncentrality = float(((found - wanted) ** 2 / wanted).sum())
    power = float(stats.ncx2.sf(stats.chi2.isf(ALPHA, freedom), freedom, noncentrality))
    assert power > 0.99
