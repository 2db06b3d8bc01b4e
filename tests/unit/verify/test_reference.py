"""The reference is lossless, ordered (token-wise <= block <= transport bound) and says what the papers say.

Every promise is a function in CHECKS, run on a gallery of distributions and on Hypothesis's; at the end, wrong acceptance
rules are planted in the reference, and each must be caught by at least three of these same functions.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_verify.verify import (
    Rule,
    acceptance_pmf,
    expected_accepted,
    output_pmf,
    reference,
    survival,
    survival_from_paths,
    transport_bound,
    transport_survival,
    verify,
)
from dflash_verify.verify.distributions import enumerate_blocks

EXACT = 1e-12
LOSSLESS = ("token", "block")
Row = tuple[Fraction, ...]
Prefix = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """Conditional rows as fractions: target for prefixes of 0..K tokens, draft for 0..K-1."""

    vocab_size: int
    num_drafts: int
    target: dict[Prefix, Row]
    draft: dict[Prefix, Row]

    def target_fn(self, prefix: Prefix) -> list[float]:
        return [float(p) for p in self.target[prefix]]

    def draft_fn(self, prefix: Prefix) -> list[float]:
        return [float(p) for p in self.draft[prefix]]

    def paths(self, length: int | None = None) -> Iterator[Prefix]:
        return itertools.product(range(self.vocab_size), repeat=self.num_drafts if length is None else length)

    def weight(self, path: Prefix) -> Fraction:
        return math.prod((self.draft[path[:i]][x] for i, x in enumerate(path)), start=Fraction(1))

    def args(self) -> tuple[Any, Any]:
        return self.target_fn, self.draft_fn


def table(vocab_size: int, depth: int, row: Callable[[Prefix], Row]) -> dict[Prefix, Row]:
    return {path: row(path) for length in range(depth) for path in itertools.product(range(vocab_size), repeat=length)}


def normalised(weights: tuple[int, ...]) -> Row:
    return tuple(Fraction(w, sum(weights)) for w in weights)


def random_row(rng: random.Random, vocab_size: int, sparse: bool) -> Row:
    """A row; a sparse one has zeros, and every fourth time is a point mass."""
    if sparse and rng.random() < 0.25:
        hot = rng.randrange(vocab_size)
        return tuple(Fraction(int(x == hot)) for x in range(vocab_size))
    weights = tuple(rng.choice((0, 0, 1, 2, 3, 7) if sparse else (1, 2, 3, 5, 8)) for _ in range(vocab_size))
    return normalised(weights) if any(weights) else random_row(rng, vocab_size, sparse)


def conditional(seed: int, vocab_size: int, num_drafts: int, sparse: bool = True) -> Case:
    rng = random.Random(seed)
    return Case(
        vocab_size,
        num_drafts,
        table(vocab_size, num_drafts + 1, lambda _: random_row(rng, vocab_size, sparse)),
        table(vocab_size, num_drafts, lambda _: random_row(rng, vocab_size, sparse)),
    )


def per_position(target: list[Row], draft: list[Row]) -> Case:
    vocab_size, num_drafts = len(target[0]), len(draft)
    return Case(
        vocab_size,
        num_drafts,
        table(vocab_size, num_drafts + 1, lambda prefix: target[len(prefix)]),
        table(vocab_size, num_drafts, lambda prefix: draft[len(prefix)]),
    )


def point_mass_drafts(case: Case) -> Case:
    """The same target under a greedy drafter: every draft row becomes its own first maximum."""

    def greedy(row: Row) -> Row:
        return tuple(Fraction(int(x == row.index(max(row)))) for x in range(len(row)))

    return replace(case, draft={prefix: greedy(row) for prefix, row in case.draft.items()})


HALF, ONE, NONE = Fraction(1, 2), Fraction(1), Fraction(0)
# Two drafts, x1 = 0 and x2 = 1: q(x1) = 1, p(x1) = 1/2, q(x2) = 1/2, p(x2) = 1. Token-wise loses x1 half the time, although
# x1 x2 as a block is exactly as likely under the target as under the drafter. After the block: a fair bonus token.
HEADS = per_position([(HALF, HALF), (NONE, ONE), (HALF, HALF)], [(ONE, NONE), (HALF, HALF)])
GALLERY = [
    HEADS,
    per_position([(Fraction(1, 3), Fraction(2, 3))] * 3, [(Fraction(2, 3), Fraction(1, 3))] * 2),  # the paper's example
    # Dense rows over three or more tokens tell residuals apart that fall on the same token when there are only two.
    *(conditional(3, vocab_size, num_drafts, sparse=False) for vocab_size, num_drafts in [(3, 2), (3, 3), (4, 2)]),
    *(
        conditional(seed, vocab_size, num_drafts)
        for seed, (vocab_size, num_drafts) in enumerate(
            [(2, 2), (2, 3), (2, 4), (3, 1), (3, 2), (3, 3), (4, 1), (4, 2)]
        )
    ),
]


def rows() -> st.SearchStrategy[Case]:
    """Per-position distributions, drawn entry by entry so that a failure shrinks to something readable."""

    def build(shape: tuple[int, int]) -> st.SearchStrategy[Case]:
        vocab_size, num_drafts = shape
        weights = st.tuples(*[st.integers(0, 5)] * vocab_size).filter(any)
        row = st.one_of(
            weights, st.integers(0, vocab_size - 1).map(lambda hot: tuple(int(x == hot) for x in range(vocab_size)))
        ).map(normalised)
        return st.builds(
            per_position,
            st.lists(row, min_size=num_drafts + 1, max_size=num_drafts + 1),
            st.lists(row, min_size=num_drafts, max_size=num_drafts),
        )

    return st.tuples(st.integers(2, 4), st.integers(1, 4)).filter(lambda s: s[0] ** s[1] <= 64).flatmap(build)


def cases() -> st.SearchStrategy[Case]:
    """Vocabularies 2 to 4 and blocks of 1 to 4: rows that ignore earlier tokens, and conditional ones."""
    return st.one_of(
        rows(), st.builds(conditional, st.integers(0, 2**32), st.integers(2, 4), st.integers(1, 4), st.booleans())
    )


# --- an oracle that shares nothing with the reference: loops and fractions, read off the papers


def oracle(case: Case, path: Prefix, method: str) -> tuple[list[Fraction], list[Row]]:
    """Acceptance thresholds of each position, and the distribution of the next token after 0 .. K accepted drafts."""
    thresholds, following = [], []
    joint = [ONE]  # p_0 .. p_K
    for i, x in enumerate(path):
        p, q = case.target[path[:i]][x], case.draft[path[:i]][x]
        ratio = p / q if q else Fraction(10**9 if p else 0)
        joint.append(min(joint[-1] * ratio, ONE))
        thresholds.append(min(ratio, ONE))
    for i in range(len(path) + 1):
        target = case.target[path[:i]]
        if i == len(path):
            following.append(target)
            break
        scale = joint[i] if method == "block" else ONE
        excess = [max(scale * p - q, NONE) for p, q in zip(target, case.draft[path[:i]], strict=True)]
        total = sum(excess)
        following.append(tuple(e / total for e in excess) if total else target)
        if method == "block" and i:
            thresholds[i - 1] = total / (total + 1 - joint[i]) if total + 1 - joint[i] else ONE
    if method == "block":
        thresholds[-1] = joint[-1]
    return thresholds, following


def oracle_pmf(thresholds: list[Fraction], method: str) -> list[Fraction]:
    """P(accepted = i) with independent uniforms."""
    passes = [ONE, *thresholds]
    if method == "token":
        fails = [1 - t for t in thresholds] + [ONE]
        return [math.prod(passes[: i + 1]) * fails[i] for i in range(len(passes))]
    return [passes[i] * math.prod((1 - t for t in passes[i + 1 :]), start=ONE) for i in range(len(passes))]


def close(found: Any, expected: Any, what: str) -> None:
    found, expected = (torch.as_tensor(x, dtype=torch.float64) for x in (found, expected))
    gap = float((found - expected).abs().max()) if found.numel() else 0.0
    assert found.shape == expected.shape, f"{what}: shape {tuple(found.shape)} instead of {tuple(expected.shape)}"
    assert gap <= EXACT, f"{what}: off by {gap:.3g}"


# --- the promises


def check_output_is_the_targets(case: Case) -> None:
    length = case.num_drafts + 1
    expected = torch.zeros((case.vocab_size,) * length, dtype=torch.float64)
    for path in case.paths(length):
        expected[path] = float(math.prod((case.target[path[:i]][x] for i, x in enumerate(path)), start=ONE))
    for method in LOSSLESS:
        close(output_pmf(*case.args(), method, length, width=case.num_drafts), expected, f"{method} output")


def check_narrow_and_cut_output_is_the_targets(case: Case) -> None:
    length = case.num_drafts + 1
    full = output_pmf(case.target_fn, case.target_fn, "token", length, width=case.num_drafts)
    for method, width in itertools.product(LOSSLESS, range(case.num_drafts + 1)):
        close(output_pmf(*case.args(), method, length, width=width), full, f"{method} output at width {width}")
        cut = output_pmf(*case.args(), method, length, width=case.num_drafts, limit=width)
        close(cut, full, f"{method} output cut to {width}")


def check_acceptance_is_the_papers(case: Case) -> None:
    for method in LOSSLESS:
        expected = [NONE] * (case.num_drafts + 1)
        for path in case.paths():
            thresholds, _ = oracle(case, path, method)
            for i, p in enumerate(oracle_pmf(thresholds, method)):
                expected[i] += case.weight(path) * p
        found = acceptance_pmf(*case.args(), method, width=case.num_drafts)
        close(found, [float(p) for p in expected], f"{method} acceptance")


def check_next_token_is_the_papers(case: Case) -> None:
    blocks = enumerate_blocks(*case.args(), case.num_drafts)
    for method in LOSSLESS:
        found = reference.rule_of(method, blocks.target, blocks.draft, blocks.tokens)
        for index, path in enumerate(blocks.tokens.tolist()):
            if not case.weight(tuple(path)):
                continue
            thresholds, following = oracle(case, tuple(path), method)
            for i, reached in enumerate(oracle_pmf(thresholds, method)):
                if reached:
                    row = [float(p) for p in following[i]]
                    close(found.next_probs[index, i], row, f"{method} token after {path[:i]} of {path}")


def check_verify_decides_as_the_papers(case: Case) -> None:
    rng = random.Random(5)
    paths = [path for path in case.paths() if case.weight(path)]
    for path in rng.sample(paths, min(len(paths), 4)):
        target = [case.target_fn(path[:i]) for i in range(case.num_drafts + 1)]
        draft = [case.draft_fn(path[:i]) for i in range(case.num_drafts)]
        for method in LOSSLESS:
            thresholds, following = oracle(case, path, method)
            for _ in range(4):
                drawn = [rng.random() for _ in range(case.num_drafts + 1)]
                passing = [i + 1 for i, t in enumerate(thresholds) if drawn[i] < t]
                accepted = max(passing, default=0)
                if method == "token":
                    accepted = next((i for i in range(case.num_drafts) if i + 1 not in passing), case.num_drafts)
                total, token = NONE, 0
                for token, p in enumerate(following[accepted]):  # noqa: B007
                    total += p
                    if total > drawn[-1]:
                        break
                assert verify(target, draft, path, drawn, method) == (accepted, token), f"{method} on {path}"


def check_block_accepts_at_least_token_wise(case: Case) -> None:
    block, token = (survival(*case.args(), method, width=case.num_drafts) for method in ("block", "token"))
    assert bool((block >= token - EXACT).all()), f"P(accepted >= i): block {block.tolist()}, token {token.tolist()}"


def check_nothing_exceeds_the_transport_bound(case: Case) -> None:
    bound = transport_survival(*case.args(), width=case.num_drafts)
    for method in LOSSLESS:
        assert bool((survival(*case.args(), method, width=case.num_drafts) <= bound + EXACT).all()), method
    assert (
        expected_accepted(*case.args(), "block", width=case.num_drafts)
        <= transport_bound(*case.args(), width=case.num_drafts) + EXACT * case.num_drafts
    )


def check_first_draft_meets_the_bound(case: Case) -> None:
    """With one draft there is nothing to gain: both methods are maximal couplings of p and q."""
    bound = transport_survival(*case.args(), width=1)
    for method in LOSSLESS:
        close(survival(*case.args(), method, width=1), bound, f"{method} at width 1")


def check_greedy_drafts_gain_nothing(case: Case) -> None:
    greedy = point_mass_drafts(case)
    token, block = (acceptance_pmf(*greedy.args(), method, width=case.num_drafts) for method in LOSSLESS)
    close(block, token, "acceptance with point-mass drafts")


def check_survival_does_not_depend_on_the_width(case: Case) -> None:
    """What the width controller relies on: counts seen at one width are right for every other."""
    for method in LOSSLESS:
        full = survival(*case.args(), method, width=case.num_drafts)
        for width in range(1, case.num_drafts):
            close(survival(*case.args(), method, width=width), full[:width], f"{method} survival at width {width}")


def check_recorded_paths_average_to_the_survival(case: Case) -> None:
    blocks = enumerate_blocks(*case.args(), case.num_drafts)
    possible = blocks.weight > 0
    weight = blocks.weight[possible, None]
    paths = survival_from_paths(blocks.target[possible], blocks.draft[possible], blocks.tokens[possible])
    close((weight * paths.token).sum(0), survival(*case.args(), "token", width=case.num_drafts), "token")
    close((weight * paths.block).sum(0), survival(*case.args(), "block", width=case.num_drafts), "block")
    close((weight * paths.bound).sum(0), transport_survival(*case.args(), width=case.num_drafts), "bound")
    assert bool((paths.token <= paths.block + EXACT).all())
    assert bool((paths.block <= paths.bound + EXACT).all())


def check_heads(_: Case) -> None:
    """The two-token example, whose answers a reader can compute in the head."""
    close(acceptance_pmf(*HEADS.args(), "block", width=2), [0.5, 0.0, 0.5], "block")
    close(acceptance_pmf(*HEADS.args(), "token", width=2), [0.5, 0.25, 0.25], "token")
    target, draft = [[0.5, 0.5], [0.0, 1.0], [0.5, 0.5]], [[1.0, 0.0], [0.5, 0.5]]
    for step in range(20):
        drawn = [step / 20, 1 - (step + 1) / 20, step / 20]
        bonus = int(step >= 10)
        assert verify(target, draft, [0, 1], drawn, "block") == (2, bonus)
        token_wise = (2, bonus) if step < 10 else (0, 1)
        assert verify(target, draft, [0, 1], drawn, "token") == token_wise


CHECKS = [value for name, value in sorted(globals().items()) if name.startswith("check_")]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_promise_holds_on_the_gallery(check: Callable[[Case], None]) -> None:
    for case in GALLERY:
        check(case)


HYPOTHESIS = settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@HYPOTHESIS
@given(case=cases())
def test_output_distribution_equals_the_targets(case: Case) -> None:
    check_output_is_the_targets(case)


@HYPOTHESIS
@given(case=cases())
def test_token_wise_block_and_bound_are_ordered(case: Case) -> None:
    check_block_accepts_at_least_token_wise(case)
    check_nothing_exceeds_the_transport_bound(case)
    check_first_draft_meets_the_bound(case)
    check_survival_does_not_depend_on_the_width(case)


@HYPOTHESIS
@given(case=cases())
def test_point_mass_drafts_accept_the_same_under_both_methods(case: Case) -> None:
    check_greedy_drafts_gain_nothing(case)


@HYPOTHESIS
@given(case=cases().filter(lambda case: case.vocab_size**case.num_drafts <= 64))
def test_acceptance_and_next_token_equal_the_oracle(case: Case) -> None:
    check_acceptance_is_the_papers(case)
    check_next_token_is_the_papers(case)
    check_verify_decides_as_the_papers(case)
    check_recorded_paths_average_to_the_survival(case)


@settings(HYPOTHESIS, max_examples=15)
@given(case=cases().filter(lambda case: case.vocab_size**case.num_drafts <= 27))
def test_narrow_widths_and_cut_offs_stay_lossless(case: Case) -> None:
    check_narrow_and_cut_output_is_the_targets(case)


@HYPOTHESIS
@given(case=cases())
def test_temperature_zero_gives_the_targets_most_likely_tokens_under_every_method(case: Case) -> None:
    """T = 0 makes the target a point mass: the three methods accept the same and emit the same."""
    cold = replace(case, target=point_mass_drafts(replace(case, draft=case.target)).draft)
    drafts = cold.num_drafts
    pmfs = [acceptance_pmf(*cold.args(), method, width=drafts) for method in ("greedy", *LOSSLESS)]
    outputs = [output_pmf(*cold.args(), method, drafts + 1, width=drafts) for method in ("greedy", *LOSSLESS)]
    warm = output_pmf(*case.args(), "greedy", drafts + 1, width=drafts)
    for pmf, output in zip(pmfs[1:], outputs[1:], strict=True):
        close(pmf, pmfs[0], "acceptance at temperature 0")
        close(output, outputs[0], "output at temperature 0")
    close(warm, outputs[0], "greedy output")


# --- wrong rules


def no_clamp(target: Any, draft: Any, tokens: Any) -> Rule:
    """Block verification without the min(., 1) of eq. 4: an unlikely draft is paid for by a likely one before it."""
    rule = reference.block_rule(target, draft, tokens)
    joint = reference._ratios(target, draft, tokens).cumprod(-1)
    return replace(rule, thresholds=joint.clamp(max=1.0))


def joint_ratio_everywhere(target: Any, draft: Any, tokens: Any) -> Rule:
    """h_i = p_i at every position, as if every prefix were the whole block."""
    rule = reference.block_rule(target, draft, tokens)
    if not tokens.shape[1]:
        return rule
    joint, columns = target.new_ones(target.shape[0]), []
    for ratio in reference._ratios(target, draft, tokens).unbind(-1):
        joint = (joint * ratio).clamp(max=1.0)
        columns.append(joint)
    return replace(rule, thresholds=torch.stack(columns, -1))


def stops_at_first_failure(target: Any, draft: Any, tokens: Any) -> Rule:
    return replace(reference.block_rule(target, draft, tokens), first_failure_ends=True)


def unscaled_residual(target: Any, draft: Any, tokens: Any) -> Rule:
    """Block acceptance with the token-wise residual: max(p - q, 0) instead of max(p_i p - q, 0)."""
    rule = reference.block_rule(target, draft, tokens)
    return replace(rule, next_probs=reference.token_rule(target, draft, tokens).next_probs)


def residual_mass_one_row_early(target: Any, draft: Any, tokens: Any) -> Rule:
    """Z_i from the rows of position i instead of those after it."""
    rule = reference.block_rule(target, draft, tokens)
    wrong = (target[:, :-1] - draft).clamp(min=0.0).sum(-1)
    joint = joint_ratio_everywhere(target, draft, tokens).thresholds
    h = wrong / (wrong + 1.0 - joint)
    return replace(rule, thresholds=torch.cat((h[:, :-1].nan_to_num(1.0), rule.thresholds[:, -1:]), -1))


def ignores_the_draft(target: Any, draft: Any, tokens: Any) -> Rule:
    """Token-wise acceptance with probability p instead of min(1, p/q)."""
    rule = reference.token_rule(target, draft, tokens)
    return replace(rule, thresholds=target[:, :-1].gather(-1, tokens.unsqueeze(-1)).squeeze(-1))


def ratio_upside_down(target: Any, draft: Any, tokens: Any) -> Rule:
    rule = reference.token_rule(target, draft, tokens)
    return replace(rule, thresholds=(1.0 / reference._ratios(target, draft, tokens)).clamp(max=1.0))


def accepts_a_little_more(target: Any, draft: Any, tokens: Any) -> Rule:
    """Token-wise with a lenience of 5 %."""
    rule = reference.token_rule(target, draft, tokens)
    return replace(rule, thresholds=(reference._ratios(target, draft, tokens) * 1.05).clamp(max=1.0))


def last_passing_position_wins(target: Any, draft: Any, tokens: Any) -> Rule:
    return replace(reference.token_rule(target, draft, tokens), first_failure_ends=False)


def resamples_from_the_target(target: Any, draft: Any, tokens: Any) -> Rule:
    return replace(reference.token_rule(target, draft, tokens), next_probs=target)


WRONG_RULES = {
    "block": [
        no_clamp,
        joint_ratio_everywhere,
        stops_at_first_failure,
        unscaled_residual,
        residual_mass_one_row_early,
    ],
    "token": [
        ignores_the_draft,
        ratio_upside_down,
        accepts_a_little_more,
        last_passing_position_wins,
        resamples_from_the_target,
    ],
}


def catches(check: Callable[[Case], None]) -> bool:
    for case in GALLERY:
        try:
            check(case)
        except AssertionError:
            return True
    return False


@pytest.mark.parametrize(
    ("method", "wrong"), [(method, wrong) for method, rules in WRONG_RULES.items() for wrong in rules]
)
def test_a_wrong_acceptance_rule_is_caught_at_least_three_times(
    method: str, wrong: Callable[..., Rule], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(reference.RULES, method, wrong)
    caught_by = [check.__name__ for check in CHECKS if catches(check)]
    assert len(caught_by) >= 3, f"{wrong.__name__} is caught only by {caught_by}"
