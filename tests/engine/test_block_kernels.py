"""vLLM's own rejection kernels do what the reference does: same acceptances from the same random numbers, same output law.

The kernels of the installed vLLM run in Triton's interpreter on a CPU. A batch mixes requests at temperature 0, requests
with temperature, top-k and top-p, and requests whose drafts are cut by -1 placeholders; target and draft distributions
depend on the tokens before them. At the end wrong acceptance rules are planted in a copy of the kernels' source, and each
must be caught by at least three of the same checks.
"""

import functools
import importlib.util
import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dflash_verify.cpu import environment, interpreter

environment.activate()

import numpy as np
import torch
from scipy import stats

interpreter.install()

from vllm.triton_utils import tl, triton
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch
from vllm.v1.worker.gpu.sample.gumbel import (
    apply_temperature,
    murmur3_uniform32,
    spec_step_seed,
    tl_rand32,
)
from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils

from dflash_verify.verify import acceptance_pmf
from dflash_verify.verify.reference import rule_of

N = 7  # draft width
VOCAB = 5
METHODS = ("token", "block")
# A kernel in float32 and the reference in float64 may disagree where a uniform falls this close to its threshold (2**-23
# from the uniform, a few of them from the logarithms, times up to 7 positions). At fixed seeds it hits a few of hundreds.
MARGIN = 1e-5
# Every chi-square here runs at a fixed seed; 24 of them at this level leave a 0.24 % chance that a right kernel needed
# another seed.
LEVEL = 1e-4


@triton.jit
def _uniforms_kernel(out_ptr, seed_ptr, pos_ptr, step_ptr, MIX_STEP: tl.constexpr):
    i = tl.program_id(0)
    seed = tl.load(seed_ptr + i)
    if MIX_STEP:
        seed = spec_step_seed(seed, tl.load(step_ptr + i))
    tl.store(out_ptr + i, tl_rand32(seed, tl.load(pos_ptr + i), includes_zero=False))


@triton.jit
def _noise_kernel(out_ptr, seed_ptr, pos_ptr, vocab_size, BLOCK: tl.constexpr):
    i = tl.program_id(0)
    token = tl.arange(0, BLOCK)
    u = murmur3_uniform32(tl.load(seed_ptr + i), tl.load(pos_ptr + i), token)
    tl.store(out_ptr + i * vocab_size + token, u, mask=token < vocab_size)


@dataclass(frozen=True)
class Sampling:
    temperature: float
    top_k: int = VOCAB
    top_p: float = 1.0


WARM = Sampling(1.0)
FILTERED = Sampling(0.7, top_k=4, top_p=0.9)
GREEDY = Sampling(0.0)


@dataclass(frozen=True)
class Chain:
    """Target and draft logits as functions of the tokens before; the drafter knows a blurred target."""

    seed: int = 3
    blur: float = 0.9

    def logits(self, prefix: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        state = self.seed
        for token in prefix:
            state = (state * 31 + token + 1) % (2**31)
        rng = torch.Generator().manual_seed(state)
        target = torch.randn(VOCAB, generator=rng) * 1.2
        return target, target + torch.randn(VOCAB, generator=rng) * self.blur


def processed(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Target logits [rows, V] as the verifier gets them: vLLM's own temperature kernel and top-k/top-p."""
    rows = logits.shape[0]
    logits = logits.clone()
    apply_temperature(logits, torch.zeros(rows, dtype=torch.int32), torch.tensor([sampling.temperature]))
    if sampling.temperature == 0.0:
        return logits
    top_k, top_p = torch.full((rows,), sampling.top_k), torch.full((rows,), sampling.top_p)
    return apply_top_k_top_p_pytorch(logits, top_k, top_p)


@dataclass(frozen=True)
class Row:
    """One request of the batch. pad_from: drafts from this index on are -1 placeholders."""

    sampling: Sampling
    drafts: tuple[int, ...]
    target: torch.Tensor  # [K+1, V], processed
    draft: torch.Tensor  # [K, V], before temperature
    pad_from: int | None = None

    @property
    def published(self) -> tuple[int, ...]:
        used = len(self.drafts) if self.pad_from is None else self.pad_from
        return self.drafts[:used] + (-1,) * (len(self.drafts) - used)

    def probabilities(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """target [K+1, V], draft [K, V], tokens [K] up to the first placeholder, in float64."""
        used = len(self.drafts) if self.pad_from is None else self.pad_from
        draft = self.draft[:used].double()
        if self.sampling.temperature:
            draft = draft / self.sampling.temperature
        return self.target[: used + 1].double().softmax(-1), draft.softmax(-1), torch.tensor(self.drafts[:used])


def draw_row(
    chain: Chain, width: int, sampling: Sampling, rng: np.random.Generator, pad_from: int | None = None
) -> Row:
    """A request whose drafts are drawn as the drafter draws them (the most likely ones at temperature 0)."""
    drafts: tuple[int, ...] = ()
    targets, proposals = [], []
    for _ in range(width):
        target, draft = chain.logits(drafts)
        targets.append(target)
        proposals.append(draft)
        if sampling.temperature:
            probs = (draft.double() / sampling.temperature).softmax(-1).numpy()
            drafts += (int(rng.choice(VOCAB, p=probs / probs.sum())),)
        else:
            drafts += (int(draft.argmax()),)
    targets.append(chain.logits(drafts)[0])
    return Row(sampling, drafts, processed(torch.stack(targets), sampling), torch.stack(proposals), pad_from)


@dataclass(frozen=True)
class Result:
    """accepted [R], next_token [R]; uniforms: per row the [K] the kernel used; noise [R, V] of the next token."""

    rows: list[Row]
    accepted: list[int]
    tokens: list[list[int]]
    uniforms: list[torch.Tensor]
    noise: torch.Tensor


def run_kernels(kernels: ModuleType, rows: list[Row], method: str, seed: int) -> Result:
    """Verify the rows in one batch, request slots shuffled, and read back the random numbers the kernels used."""
    rng = np.random.default_rng(seed)
    count = len(rows)
    slots = torch.from_numpy(rng.permutation(count + 3)[:count].astype(np.int32))
    lengths = torch.tensor([len(row.drafts) + 1 for row in rows])
    starts = torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
    local = torch.cat([torch.arange(n) for n in lengths.tolist()]).to(torch.int32)
    first_position = torch.from_numpy(rng.integers(5, 4000, count))
    draft_logits = torch.full((count + 3, N, VOCAB), -50.0)
    temperature, seeds = torch.zeros(count + 3), torch.zeros(count + 3, dtype=torch.int64)
    sampled = []
    for i, row in enumerate(rows):
        draft_logits[slots[i], : len(row.drafts)] = row.draft
        temperature[slots[i]] = row.sampling.temperature
        seeds[slots[i]] = int(rng.integers(0, 2**31))
        sampled.append(torch.tensor([0, *row.published]))
    position = first_position.repeat_interleave(lengths) + local
    out, num_out = kernels.rejection_sample(
        torch.cat([row.target for row in rows]),
        draft_logits,
        torch.cat(sampled),
        starts.to(torch.int32),
        position,
        slots,
        slots.repeat_interleave(lengths),
        local,
        temperature,
        seeds,
        N,
        use_block_verification=method == "block",
    )
    accepted = (num_out - 1).tolist()
    row_seeds = seeds[slots.long()]
    uniforms = torch.empty(int(starts[-1]))
    _uniforms_kernel[(len(uniforms),)](
        uniforms, row_seeds.repeat_interleave(lengths), position, local, MIX_STEP=method == "block"
    )
    noise = torch.empty(count, VOCAB)
    _noise_kernel[(count,)](noise, row_seeds, first_position + torch.tensor(accepted), VOCAB, BLOCK=8)
    return Result(
        rows=rows,
        accepted=accepted,
        tokens=[out[i, : n + 1].tolist() for i, n in enumerate(accepted)],
        uniforms=[uniforms[starts[i] : starts[i + 1] - 1].double() for i in range(count)],
        noise=-torch.log(-torch.log1p(-noise.double())),
    )


def check_rows_agree(result: Result, method: str) -> None:
    """Accepted count and next token of every row, computed by the reference from the kernel's own random numbers."""
    undecided = 0
    for i, row in enumerate(result.rows):
        target, draft, tokens = row.probabilities()
        greedy = row.sampling.temperature == 0.0
        rule = rule_of("greedy" if greedy else method, target[None], draft[None], tokens[None])
        drawn = result.uniforms[i][None, : len(tokens)]
        if not greedy and bool(((drawn - rule.thresholds).abs() < MARGIN).any()):
            undecided += 1
            continue
        accepted = int(rule.accepted(drawn)[0])
        assert result.accepted[i] == accepted, (
            f"row {i} ({row.sampling}): {result.accepted[i]} accepted, not {accepted}"
        )
        assert tuple(result.tokens[i][:-1]) == row.drafts[:accepted], f"row {i}: emits other tokens than its drafts"
        scores = rule.next_probs[0, accepted].log() + (0.0 if greedy else result.noise[i])
        best, second = scores.topk(2).values.tolist()
        if best - second > MARGIN * 10:
            assert result.tokens[i][-1] == int(scores.argmax()), (
                f"row {i} ({row.sampling}): wrong token after {accepted}"
            )
    assert undecided <= len(result.rows) // 50, f"{undecided} rows fall within {MARGIN} of a threshold"


def chi_square(observed: dict[Any, int], expected: dict[Any, float], what: str) -> None:
    """Pearson's test with cells of fewer than 5 expected merged; an outcome of probability 0 fails outright."""
    total = sum(observed.values())
    impossible = [cell for cell in observed if expected.get(cell, 0.0) < 1e-9]
    assert not impossible, f"{what}: {impossible} cannot happen"
    large = [cell for cell, p in expected.items() if p * total >= 5]
    found = [observed.get(cell, 0) for cell in large]
    wanted = [expected[cell] * total for cell in large]
    rest_wanted = total - sum(wanted)
    if rest_wanted >= 5:
        found.append(total - sum(found))
        wanted.append(rest_wanted)
    else:  # the rest joins the smallest large cell
        smallest = wanted.index(min(wanted))
        found[smallest] += total - sum(found)
        wanted[smallest] += rest_wanted
    p_value = stats.chisquare(found, wanted).pvalue
    assert p_value > LEVEL, f"{what}: p = {p_value:.2g}, observed {found}, expected {[round(w, 1) for w in wanted]}"


def check_laws(
    result: Result, method: str, chain: Chain, sampling: Sampling, width: int, rng: np.random.Generator
) -> None:
    """Accepted counts follow acceptance_pmf, and the first two output tokens follow the target."""

    @functools.cache
    def target_fn(prefix: tuple[int, ...]) -> torch.Tensor:
        return processed(chain.logits(prefix)[0][None], sampling)[0].double().softmax(-1)

    def draft_fn(prefix: tuple[int, ...]) -> torch.Tensor:
        return (chain.logits(prefix)[1].double() / sampling.temperature).softmax(-1)

    mine = [i for i, row in enumerate(result.rows) if row.sampling == sampling and row.pad_from is None]
    counts: dict[int, int] = {}
    pairs: dict[tuple[int, int], int] = {}
    for i in mine:
        counts[result.accepted[i]] = counts.get(result.accepted[i], 0) + 1
        first, *more = result.tokens[i]
        second = more[0] if more else int(rng.choice(VOCAB, p=target_fn((first,)).numpy()))
        pairs[first, second] = pairs.get((first, second), 0) + 1
    short = min(width, 4)  # 5**4 blocks; longer ones are compared up to "4 or more", which no width changes
    pmf = acceptance_pmf(target_fn, draft_fn, method, width=short).tolist()
    capped: dict[int, int] = {}
    for accepted, number in counts.items():
        capped[min(accepted, short)] = capped.get(min(accepted, short), 0) + number
    chi_square(capped, dict(enumerate(pmf)), f"{method} width {width} accepted")
    expected = {
        (x, y): float(target_fn(())[x] * target_fn((x,))[y]) for x, y in itertools.product(range(VOCAB), repeat=2)
    }
    chi_square(pairs, expected, f"{method} width {width} output")


def mixed_batch(chain: Chain, width: int, count: int, seed: int) -> list[Row]:
    """Of ten requests six filtered, two at temperature 1, one greedy, one cut by placeholders (every third of them greedy)."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        kind = i % 10
        if kind < 6:
            rows.append(draw_row(chain, width, FILTERED, rng))
        elif kind < 8:
            rows.append(draw_row(chain, width, WARM, rng))
        elif kind == 8:
            rows.append(draw_row(chain, width, GREEDY, rng))
        else:
            sampling = (WARM, FILTERED, GREEDY)[i // 10 % 3]
            rows.append(draw_row(chain, width, sampling, rng, pad_from=int(rng.integers(0, width))))
    return rows


# Interpreted, a row costs 10 (width 1) to 50 ms (width 7).
ROWS = {1: 200, 3: 150, 7: 60}
MANY_ROWS = {1: 2000, 3: 1500, 7: 600}


def run_mixed(method: str, width: int, count: int, samplings: tuple[Sampling, ...]) -> None:
    chain = Chain()
    result = run_kernels(rejection_sampler_utils, mixed_batch(chain, width, count, 100 + width), method, seed=width)
    check_rows_agree(result, method)
    rng = np.random.default_rng(9)
    for sampling in samplings:
        check_laws(result, method, chain, sampling, width, rng)


@pytest.mark.parametrize("width", ROWS)
@pytest.mark.parametrize("method", METHODS)
def test_kernels_agree_with_the_reference_and_with_the_exact_laws(method: str, width: int) -> None:
    run_mixed(method, width, ROWS[width], (FILTERED,))


@pytest.mark.full
@pytest.mark.parametrize("width", MANY_ROWS)
@pytest.mark.parametrize("method", METHODS)
def test_kernels_agree_on_many_rows(method: str, width: int) -> None:
    run_mixed(method, width, MANY_ROWS[width], (FILTERED, WARM))


def check_ragged_batch(kernels: ModuleType, method: str) -> None:
    """What vLLM itself shortens: one batch with 1 to 7 drafts a request."""
    rng = np.random.default_rng(77)
    chain = Chain(seed=8)
    rows = [draw_row(chain, 1 + i % N, (WARM, FILTERED, GREEDY)[i % 3], rng) for i in range(42)]
    check_rows_agree(run_kernels(kernels, rows, method, seed=5), method)


@pytest.mark.parametrize("method", METHODS)
def test_batches_of_different_widths_agree_row_by_row(method: str) -> None:
    check_ragged_batch(rejection_sampler_utils, method)


# --- the two-token example of tests/unit/verify, on the kernels

OFF = float("-inf")


def heads_rows(greedy_every: int | None = None) -> list[Row]:
    """63 requests with q(x1) = 1, p(x1) = 1/2, q(x2) = 1/2, p(x2) = 1 and the drafts fixed to x1, x2."""
    target = torch.full((3, VOCAB), OFF)
    target[0, :2], target[1, 1], target[2, :2] = 0.0, 0.0, 0.0
    draft = torch.full((2, VOCAB), OFF)
    draft[0, 0], draft[1, :2] = 0.0, 0.0
    rows = [Row(WARM, (0, 1), target, draft) for _ in range(63)]
    if greedy_every is None:
        return rows
    greedy = Row(GREEDY, (0, 1), target, draft)  # x1 is the first maximum and x2 the only one: accepted
    return [copy for i, row in enumerate(rows) for copy in ([row, greedy] if i % greedy_every == 0 else [row])]


def check_block_accepts_every_row(kernels: ModuleType, greedy_every: int | None) -> None:
    result = run_kernels(kernels, heads_rows(greedy_every), "block", seed=63)
    assert result.accepted == [2] * len(result.rows)
    for row, tokens in zip(result.rows, result.tokens, strict=True):
        assert tokens[:2] == [0, 1]
        assert tokens[2] in ((0, 1) if row.sampling.temperature else (0,)), "the bonus token is the target's"


def check_token_wise_loses_some(kernels: ModuleType, greedy_every: int | None) -> None:
    """The chance that token-wise accepts all 63 is 2**-63; half of them is what it accepts on average."""
    result = run_kernels(kernels, heads_rows(greedy_every), "token", seed=63)
    sampled = [n for n, row in zip(result.accepted, result.rows, strict=True) if row.sampling.temperature]
    assert set(sampled) == {0, 2}
    assert stats.binomtest(sampled.count(2), 63, 0.5).pvalue > LEVEL
    for tokens, n in zip(result.tokens, result.accepted, strict=True):
        assert n or tokens == [1], "the residual is the other token"


@pytest.mark.parametrize("greedy_every", [None, 4], ids=["all sampling", "mixed with greedy rows"])
def test_block_accepts_the_block_that_token_wise_loses_half_the_time(greedy_every: int | None) -> None:
    check_block_accepts_every_row(rejection_sampler_utils, greedy_every)
    check_token_wise_loses_some(rejection_sampler_utils, greedy_every)


def check_a_likely_draft_does_not_pay_for_the_next(kernels: ModuleType, method: str) -> None:
    """The example turned round: p(x1) = 1, q(x1) = 1/2, p(x2) = 1/2, q(x2) = 1. Both methods keep x1 and lose x2 half the
    time; a joint ratio that is not capped at 1 would always keep both."""
    target, draft = torch.full((3, VOCAB), OFF), torch.full((2, VOCAB), OFF)
    target[0, 0], target[1, :2], target[2, 0] = 0.0, 0.0, 0.0
    draft[0, :2], draft[1, 0] = 0.0, 0.0
    result = run_kernels(kernels, [Row(WARM, (0, 0), target, draft) for _ in range(63)], method, seed=64)
    assert set(result.accepted) == {1, 2}
    assert stats.binomtest(result.accepted.count(2), 63, 0.5).pvalue > LEVEL
    for tokens, n in zip(result.tokens, result.accepted, strict=True):
        assert tokens == ([0, 0, 0] if n == 2 else [0, 1])


@pytest.mark.parametrize("method", METHODS)
def test_a_likely_draft_does_not_pay_for_an_unlikely_one_after_it(method: str) -> None:
    check_a_likely_draft_does_not_pay_for_the_next(rejection_sampler_utils, method)


def test_greedy_drafts_without_recorded_distribution_accept_the_same_under_both_methods() -> None:
    """draft_logits=None is vLLM's greedy drafter: block verification has no effect on how much is accepted."""
    rng = np.random.default_rng(4)
    rows = [draw_row(Chain(seed=21), 3, WARM, rng) for _ in range(100)]
    accepted = {}
    for method in METHODS:
        lengths = torch.full((len(rows),), 4)
        slots = torch.arange(len(rows), dtype=torch.int32)
        local = torch.arange(4, dtype=torch.int32).repeat(len(rows))
        _, num_out = rejection_sampler_utils.rejection_sample(
            torch.cat([row.target for row in rows]),
            None,
            torch.cat([torch.tensor([0, *row.drafts]) for row in rows]),
            torch.arange(len(rows) + 1, dtype=torch.int32) * 4,
            local.long() + 50,
            slots,
            slots.repeat_interleave(lengths),
            local,
            torch.ones(len(rows)),
            torch.arange(len(rows)) * 7919,
            N,
            use_block_verification=method == "block",
        )
        accepted[method] = (num_out - 1).tolist()
    expected = [0.0] * 4
    for row in rows:  # a point mass at the draft: position i passes with the target's probability of it
        passes = [
            float(p) for p in row.target[:3].double().softmax(-1).gather(1, torch.tensor(row.drafts)[:, None])[:, 0]
        ]
        for i in range(4):
            expected[i] += np.prod(passes[:i]) * (1 - passes[i] if i < 3 else 1.0) / len(rows)
    for method in METHODS:
        counts = {i: accepted[method].count(i) for i in range(4)}
        chi_square(counts, dict(enumerate(expected)), f"{method} with greedy drafts")


# --- wrong rules in a copy of the kernels

WRONG_KERNELS = {
    "block without the clamp of eq. 4": (
        "block",
        "log_p = tl.minimum(log_p + (target_logprob - draft_logprob), 0.0)",
        "log_p = log_p + (target_logprob - draft_logprob)",
    ),
    "block accepts with the joint ratio of every prefix": (
        "block",
        "h = tl.where(denom > 0.0, residual_mass / denom, 1.0)",
        "h = prefix_joint_ratio",
    ),
    "block lets the first position that passes win": (
        "block",
        "accepted_length = tl.where(u <= h, i + 1, accepted_length)",
        "accepted_length = tl.where((u <= h) & (accepted_length == i), i + 1, accepted_length)",
    ),
    "token-wise ignores the draft's probability": (
        "token",
        "accepted = target_logprob > tl.log(u) + draft_logprob",
        "accepted = target_logprob > tl.log(u)",
    ),
    "token-wise with a lenience of a fifth": (
        "token",
        "accepted = target_logprob > tl.log(u) + draft_logprob",
        "accepted = target_logprob + 0.18 > tl.log(u) + draft_logprob",
    ),
}


def planted(tmp_path: Path, right: str, wrong: str) -> ModuleType:
    """A module with the installed kernels, one expression of the acceptance rule replaced."""
    source = inspect.getsource(rejection_sampler_utils)
    assert source.count(right) == 1, f"the kernels have changed: {source.count(right)} times {right!r}"
    path = tmp_path / "planted_kernels.py"
    path.write_text(source.replace(right, wrong))
    spec = importlib.util.spec_from_file_location("planted_kernels", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def small_checks(kernels: ModuleType, method: str) -> dict[str, Callable[[], None]]:
    """The checks above on batches small enough to run them on every wrong kernel."""

    def agree(width: int, seed: int) -> None:
        rows = mixed_batch(Chain(seed=seed), width, 40, seed)
        check_rows_agree(run_kernels(kernels, rows, method, seed), method)

    def laws(blur: float) -> None:
        chain = Chain(blur=blur)
        rng = np.random.default_rng(1)
        rows = [draw_row(chain, 3, WARM, rng) for _ in range(120)]
        check_laws(run_kernels(kernels, rows, method, seed=2), method, chain, WARM, 3, rng)

    heads = check_block_accepts_every_row if method == "block" else check_token_wise_loses_some
    return {
        "the two-token example": lambda: heads(kernels, None),
        "the two-token example mixed with greedy rows": lambda: heads(kernels, 4),
        "the example turned round": lambda: check_a_likely_draft_does_not_pay_for_the_next(kernels, method),
        "row by row at width 1": lambda: agree(1, 29),
        "row by row at width 3": lambda: agree(3, 31),
        "row by row in a ragged batch": lambda: check_ragged_batch(kernels, method),
        "row by row at width 7": lambda: agree(7, 37),
        "exact laws": lambda: laws(0.9),
        "exact laws with a poor drafter": lambda: laws(2.5),
    }


@pytest.mark.parametrize("method", METHODS)
def test_the_small_checks_pass_on_the_right_kernels(method: str) -> None:
    for check in small_checks(rejection_sampler_utils, method).values():
        check()


@pytest.mark.parametrize("name", WRONG_KERNELS)
def test_a_wrong_rule_in_a_copied_kernel_is_caught_at_least_three_times(name: str, tmp_path: Path) -> None:
    method, right, wrong = WRONG_KERNELS[name]
    caught_by = []
    for check_name, check in small_checks(planted(tmp_path, right, wrong), method).items():
        try:
            check()
        except AssertionError:
            caught_by.append(check_name)
        if len(caught_by) == 3:
            break
    assert len(caught_by) >= 3, f"{name}: caught only by {caught_by}"
