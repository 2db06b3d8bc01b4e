"""Exact acceptance and output distributions by enumeration of every drafted block."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dflash_verify.verify.reference import InvalidProbabilities, Tensor, as_probabilities, check_pair, rule_of, whole

# V**K blocks are held at once, each with (K+1) rows of V; above this the answer belongs to gain.survival_from_paths.
MAX_BLOCKS = 1 << 20

Distribution = Any  # [K+1, V] or [K, V] rows, or a function from a prefix (tuple of token ids) to a [V] row
Prefix = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Blocks:
    """Every block a drafter can propose: target [B, K+1, V], draft [B, K, V], tokens [B, K], weight [B] (its probability)."""

    target: Tensor
    draft: Tensor
    tokens: Tensor
    weight: Tensor


def _row(source: Callable[[Prefix], Any], prefix: Prefix, name: str) -> Tensor:
    return as_probabilities(source(prefix), f"{name}{prefix}", 1)


def _as_function(source: Distribution, name: str) -> tuple[Callable[[Prefix], Tensor], int | None]:
    """`source` as a checked function of the prefix, and its number of rows (None if it was a function already)."""
    if callable(source):
        cache: dict[Prefix, Tensor] = {}

        def row(prefix: Prefix) -> Tensor:
            if prefix not in cache:
                cache[prefix] = _row(source, prefix, name)
            return cache[prefix]

        return row, None
    rows = as_probabilities(source, name, 2)

    def fixed_row(prefix: Prefix) -> Tensor:
        if len(prefix) >= rows.shape[0]:
            raise ValueError(
                f"{name} has {rows.shape[0]} rows and row {len(prefix) + 1} was asked for: "
                "pass a function of the prefix, or ask for a shorter output."
            )
        return rows[len(prefix)]

    return fixed_row, rows.shape[0]


def _width(target_rows: int | None, draft_rows: int | None, width: int | None) -> int:
    if target_rows is not None and draft_rows is not None and target_rows != draft_rows + 1:
        raise InvalidProbabilities(
            f"target has {target_rows} rows and draft {draft_rows}: expected one target row more than draft rows."
        )
    most = draft_rows if draft_rows is not None else (None if target_rows is None else target_rows - 1)
    if width is None:
        if most is None:
            raise ValueError("target and draft are both functions: say how many drafts a block has with width=.")
        return most
    width = whole(width, "width")
    if width < 0 or (most is not None and width > most):
        raise ValueError(f"Verify width {width} is impossible: expected 0 to {most}, the number of drafts.")
    return width


def enumerate_blocks(target: Distribution, draft: Distribution, width: int | None = None) -> Blocks:
    """Every block of `width` drafts (default: as many as the rows say) with its conditional rows and its probability.

    target and draft: see `acceptance_pmf`. Raises ValueError if there are more than MAX_BLOCKS blocks.
    """
    target_row, target_rows = _as_function(target, "target")
    draft_row, draft_rows = _as_function(draft, "draft")
    num_drafts = _width(target_rows, draft_rows, width)
    vocab_size = int(target_row(()).shape[-1])
    if vocab_size**num_drafts > MAX_BLOCKS:
        raise ValueError(
            f"{vocab_size} tokens and {num_drafts} drafts give {vocab_size**num_drafts} blocks: expected at most "
            f"{MAX_BLOCKS}; use survival_from_paths on recorded blocks."
        )
    paths = list(itertools.product(range(vocab_size), repeat=num_drafts))
    device = target_row(()).device
    target_rows_of = torch.stack([torch.stack([target_row(path[:i]) for i in range(num_drafts + 1)]) for path in paths])
    tokens = torch.tensor(paths, dtype=torch.int64, device=device).reshape(len(paths), num_drafts)
    if num_drafts == 0:
        draft_rows_of = target_rows_of.new_zeros(1, 0, vocab_size)
        return Blocks(target_rows_of, draft_rows_of, tokens, target_rows_of.new_ones(1))
    draft_rows_of = torch.stack([torch.stack([draft_row(path[:i]) for i in range(num_drafts)]) for path in paths])
    check_pair(target_rows_of, draft_rows_of)
    weight = draft_rows_of.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).prod(dim=-1)
    return Blocks(target_rows_of, draft_rows_of, tokens, weight)


def _cut_pmf(pmf: Tensor, limit: int | None) -> Tensor:
    """P(accepted = i) after a cut-off of `limit` drafts, along the last axis; its length stays."""
    if limit is None:
        return pmf
    limit = whole(limit, "limit")
    if limit >= pmf.shape[-1] - 1:
        return pmf
    if limit < 0:
        raise ValueError(f"A cut-off of {limit} drafts is impossible: expected 0 or more.")
    cut = pmf.clone()
    cut[..., limit] = pmf[..., limit:].sum(dim=-1)
    cut[..., limit + 1 :] = 0.0
    return cut


def acceptance_pmf(
    target: Distribution, draft: Distribution, method: str, *, width: int | None = None, limit: int | None = None
) -> Tensor:
    """P(accepted = i), i = 0 .. K, over the drafter's draws and the verifier's, as float64 [K+1].

    target: [K+1, V] rows, or a function from a prefix (tuple of token ids) to a [V] row.
    draft:  [K, V] rows, or such a function; width says K where neither has rows, or narrows the block.
    limit:  a per-request cut-off applied after the sampler (see reference.cut).
    """
    blocks = enumerate_blocks(target, draft, width)
    pmf = rule_of(method, blocks.target, blocks.draft, blocks.tokens).pmf()
    return _cut_pmf((blocks.weight[:, None] * pmf).sum(dim=0), limit)


def survival(target: Distribution, draft: Distribution, method: str, *, width: int | None = None) -> Tensor:
    """S_i = P(accepted >= i), i = 1 .. K, as float64 [K]."""
    pmf = acceptance_pmf(target, draft, method, width=width)
    return pmf.flip(0).cumsum(0).flip(0)[1:]


def expected_accepted(target: Distribution, draft: Distribution, method: str, *, width: int | None = None) -> float:
    """E[accepted drafts]; the acceptance length is one more."""
    return float(survival(target, draft, method, width=width).sum())


def output_pmf(
    target: Distribution,
    draft: Distribution,
    method: str,
    length: int,
    *,
    width: int | None = None,
    limit: int | None = None,
) -> Tensor:
    """The distribution of the first `length` tokens that come out, as float64 [V] * length.

    One step emits the accepted drafts and the next token; what is missing to `length` is drawn from the target. A
    verifier is lossless if and only if this equals the target's own distribution for every length (Sun et al. 2024,
    Definition 1); for "greedy" the target is its own most likely token. With [K+1, V] rows `length` is at most K+1; with functions it is free.
    """
    length = whole(length, "length")
    limit = None if limit is None else whole(limit, "limit")
    if length < 1:
        raise ValueError(f"An output of {length} tokens has no distribution: expected at least 1.")
    blocks = enumerate_blocks(target, draft, width)
    target_row, _ = _as_function(target, "target")
    if method == "greedy":
        target_row = _most_likely(target_row)
    rule = rule_of(method, blocks.target, blocks.draft, blocks.tokens)
    if limit is not None and limit < 0:
        raise ValueError(f"A cut-off of {limit} drafts is impossible: expected 0 or more.")
    pmf = (blocks.weight[:, None] * rule.pmf()).tolist()
    next_probs = rule.next_probs.tolist()
    num_drafts = blocks.tokens.shape[1]

    mass: dict[Prefix, float] = {}

    def add(prefix: Prefix, amount: float) -> None:
        if amount:
            mass[prefix[:length]] = mass.get(prefix[:length], 0.0) + amount

    for block, path in enumerate(blocks.tokens.tolist()):
        for accepted in range(num_drafts + 1):
            reached = pmf[block][accepted]
            if limit is not None and accepted > limit:
                add(tuple(path[: limit + 1]), reached)
                continue
            for token, probability in enumerate(next_probs[block][accepted]):
                add((*path[:accepted], token), reached * probability)
    return _completed(mass, target_row, length)


def _most_likely(row: Callable[[Prefix], Tensor]) -> Callable[[Prefix], Tensor]:
    """The target at temperature 0: a point mass at the first maximum."""

    def point_mass(prefix: Prefix) -> Tensor:
        probabilities = row(prefix)
        best = int((probabilities == probabilities.max()).long().argmax())
        return torch.zeros_like(probabilities).index_fill_(0, torch.tensor([best], device=probabilities.device), 1.0)

    return point_mass


def _completed(mass: dict[Prefix, float], target_row: Callable[[Prefix], Tensor], length: int) -> Tensor:
    """Spread the mass of shorter prefixes over their continuations under the target."""
    for size in range(1, length):
        for prefix in [prefix for prefix in mass if len(prefix) == size]:
            here = mass.pop(prefix)
            for token, probability in enumerate(target_row(prefix).tolist()):
                if probability:
                    longer = (*prefix, token)
                    mass[longer] = mass.get(longer, 0.0) + here * probability
    first = target_row(())
    result = first.new_zeros((first.shape[-1],) * length)
    for prefix, amount in mass.items():
        result[prefix] = amount
    return result
