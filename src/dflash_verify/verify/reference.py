"""The three verification rules, written so that the paper can be read beside them."""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Tensor = Any  # torch.Tensor; torch is seen as Any by the type checker

METHODS = ("token", "block", "greedy")

# A row of probabilities may miss 1 by this much before it is refused. Accepted rows are renormalised in float64.
SUM_TOLERANCE = 1e-6

# A softmax divides by a sum of V terms, and each of its additions and divisions rounds by at most half an epsilon, so in
# float32 a row of V probabilities misses 1 by at most V times this. Kernels add in trees and stay far below; one that adds
# one by one came to 2.4e-4 at V = 151,936. A row that misses 1 by a thousandth was cut or averaged, however large V is.
FLOAT32_ROUNDING = 2.0**-24
MOST_SUM_TOLERANCE = 1e-3

# vLLM's id of a draft that is none (padding under a grammar).
PLACEHOLDER = -1


class InvalidProbabilities(ValueError):
    """The probabilities, tokens or uniforms handed in cannot be what they are said to be."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What one method does with one batch of drafted blocks, before any uniform is drawn.

    thresholds: [B, K], in [0, 1]; position i passes if its uniform is below thresholds[:, i].
    first_failure_ends: True if the accepted prefix ends before the first position that fails (token-wise, greedy);
        False if it ends at the last position that passes (block).
    next_probs: [B, K+1, V], the distribution of the token emitted after exactly i accepted drafts.
    """

    thresholds: Tensor
    first_failure_ends: bool
    next_probs: Tensor

    def accepted(self, uniforms: Tensor) -> Tensor:
        """Accepted drafts for given uniforms [B, K], as int64 [B]."""
        passes = uniforms < self.thresholds
        if self.first_failure_ends:
            return passes.long().cumprod(dim=-1).sum(dim=-1)
        positions = torch.arange(1, passes.shape[-1] + 1, device=passes.device)
        return (passes * positions).amax(dim=-1) if passes.shape[-1] else positions.new_zeros(passes.shape[0])

    def pmf(self) -> Tensor:
        """P(accepted = i) for this block, as float64 [B, K+1], the uniforms integrated out."""
        one = self.thresholds.new_ones(self.thresholds.shape[0], 1)
        passes = torch.cat((one, self.thresholds), dim=-1)  # position 0 always passes: nothing accepted
        fails = torch.cat((1.0 - self.thresholds, one), dim=-1)
        if self.first_failure_ends:
            return passes.cumprod(dim=-1) * fails
        all_later_fail = fails.flip(-1).cumprod(dim=-1).flip(-1)
        return passes * all_later_fail


def _normalised(mass: Tensor, otherwise: Tensor) -> Tensor:
    """Rows of `mass` scaled to 1; a row without mass (it cannot be reached) takes the row of `otherwise`."""
    total = mass.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, mass / torch.where(total > 0, total, torch.ones_like(total)), otherwise)


def _ratios(target: Tensor, draft: Tensor, tokens: Tensor) -> Tensor:
    """p(x_i) / q(x_i) of the drafted tokens, [B, K].

    A token that the drafter gives probability 0 cannot have been drafted; it counts as infinitely preferred by the
    target if that allows it, and as impossible otherwise.
    """
    index = tokens.unsqueeze(-1)
    p = target[:, :-1].gather(-1, index).squeeze(-1)
    q = draft.gather(-1, index).squeeze(-1)
    impossible = torch.where(p > 0, torch.full_like(p, torch.inf), torch.zeros_like(p))
    return torch.where(q > 0, p / torch.where(q > 0, q, torch.ones_like(q)), impossible)


def token_rule(target: Tensor, draft: Tensor, tokens: Tensor) -> Rule:
    """Token-wise verification (Leviathan et al. 2022, Algorithm 1): each draft on its own, min(1, p/q).

    target: [B, K+1, V], draft: [B, K, V], tokens: [B, K]; the residual is max(p - q, 0).
    """
    thresholds = _ratios(target, draft, tokens).clamp(max=1.0)
    residual = (target[:, :-1] - draft).clamp(min=0.0)
    next_probs = torch.cat((_normalised(residual, target[:, :-1]), target[:, -1:]), dim=1)
    return Rule(thresholds, True, next_probs)


def block_rule(target: Tensor, draft: Tensor, tokens: Tensor) -> Rule:
    """Block verification (Sun et al. 2024, Algorithm 2): the longest prefix that passes its own test.

    target: [B, K+1, V], draft: [B, K, V], tokens: [B, K]. With p_0 = 1 and p_i = min(p_{i-1} p(x_i)/q(x_i), 1) (eq. 4),
    Z_i = sum_x max(p_i target(x | x_1..x_i) - draft(x | x_1..x_i), 0), a prefix of i < K drafts passes with
    probability h_i = Z_i / (Z_i + 1 - p_i) and the whole block with h_K = p_K (eq. 5); after i < K accepted drafts
    the next token has mass max(p_i target - draft, 0). It follows that P(accepted >= i | x_1..x_i) = p_i for every
    width K >= i, which is why survival measured at one width is right at every other.
    """
    ratios = _ratios(target, draft, tokens)
    joint = [torch.ones_like(ratios[:, 0]) if ratios.shape[1] else target.new_ones(target.shape[0])]
    for i in range(ratios.shape[1]):
        # 0 * inf: a prefix that the target forbids stays forbidden whatever follows it.
        grown = torch.where(joint[-1] > 0, joint[-1] * ratios[:, i], torch.zeros_like(joint[-1]))
        joint.append(grown.clamp(max=1.0))
    prefix = torch.stack(joint, dim=1)  # [B, K+1], p_0 .. p_K
    residual = (prefix[:, :-1, None] * target[:, :-1] - draft).clamp(min=0.0)  # [B, K, V], after 0 .. K-1 drafts
    mass = residual.sum(dim=-1)  # Z_0 .. Z_{K-1}
    inner_mass, inner_prefix = mass[:, 1:], prefix[:, 1:-1]
    denominator = inner_mass + 1.0 - inner_prefix
    inner = torch.where(
        denominator > 0,
        inner_mass / torch.where(denominator > 0, denominator, torch.ones_like(denominator)),
        torch.ones_like(denominator),
    )
    thresholds = torch.cat((inner, prefix[:, 1:][:, -1:]), dim=1)
    next_probs = torch.cat((_normalised(residual, target[:, :-1]), target[:, -1:]), dim=1)
    return Rule(thresholds, False, next_probs)


def greedy_rule(target: Tensor, draft: Tensor, tokens: Tensor) -> Rule:
    """Greedy verification (temperature 0): a draft passes if it is the target's first maximum.

    target: [B, K+1, V], draft: [B, K, V] (not used), tokens: [B, K]; the next token is the target's first maximum.
    """
    del draft
    is_max = target == target.amax(dim=-1, keepdim=True)
    best = is_max.long().argmax(dim=-1)  # the first maximum, on every device
    next_probs = torch.zeros_like(target).scatter_(-1, best.unsqueeze(-1), 1.0)
    return Rule((tokens == best[:, :-1]).to(target.dtype), True, next_probs)


RULES: dict[str, Callable[[Tensor, Tensor, Tensor], Rule]] = {
    "token": token_rule,
    "block": block_rule,
    "greedy": greedy_rule,
}


def rule_of(method: str, target: Tensor, draft: Tensor, tokens: Tensor) -> Rule:
    """The rule of `method` for a batch of blocks: target [B, K+1, V], draft [B, K, V], tokens [B, K] (float64, checked)."""
    if method not in RULES:
        raise ValueError(f"Verification method {method!r} is unknown: use one of {', '.join(METHODS)}.")
    return RULES[method](target, draft, tokens)


def _numbers(values: Any, name: str) -> Tensor:
    """`values` as a tensor of the type they have (Python's floats: float64); refused if they are not real numbers."""
    if isinstance(values, torch.Tensor):
        if values.is_complex():
            raise InvalidProbabilities(f"{name} is of type {values.dtype}: expected real numbers.")
        return values.detach()
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise InvalidProbabilities(f"{name} is ragged: expected rows of one length.") from error
    except (TypeError, RuntimeError) as error:  # lists of tensors that are elsewhere or carry gradients
        raise InvalidProbabilities(
            f"{name} cannot be read as an array ({error}): expected an array or tensor."
        ) from error
    if array.dtype.kind == "c":
        raise InvalidProbabilities(f"{name} is of type {array.dtype}: expected real numbers.")
    if array.dtype.kind not in "biuf":
        raise InvalidProbabilities(f"{name} is of type {array.dtype}: expected numbers.")
    # A copy: torch takes neither foreign byte orders nor long doubles, and warns about arrays that cannot be written.
    native = np.float64 if array.dtype.itemsize > 8 else array.dtype.newbyteorder("=")
    return torch.from_numpy(np.array(array, dtype=native))


def as_token_ids(values: Any, name: str, device: Any = None) -> Tensor:
    """`values` as int64 token ids; raises InvalidProbabilities for fractions, NaN and what is no number."""
    given = _numbers(values, name).to(device)
    ids = given.to(torch.int64)
    if not bool((ids.to(given.dtype) == given).all()):  # NaN and infinities do not survive the way there and back
        raise InvalidProbabilities(f"{name} holds a fraction or NaN: expected whole token ids.")
    return ids


def whole(value: Any, name: str) -> int:
    """`value` as an int; raises ValueError, naming it, for anything that is not a whole number."""
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name} is {value!r}: expected a whole number.") from None


def _sum_tolerance(given: Any, vocab_size: int) -> float:
    if given != torch.float32:
        return SUM_TOLERANCE
    return min(max(SUM_TOLERANCE, vocab_size * FLOAT32_ROUNDING), MOST_SUM_TOLERANCE)


def as_probabilities(values: Any, name: str, ndim: int) -> Tensor:
    """`values` as float64 rows that sum to 1 along the last axis.

    Raises InvalidProbabilities for a wrong number of axes, an empty vocabulary, what is no real number, NaN, infinities,
    negative entries or a row whose sum misses 1 by more than SUM_TOLERANCE; float32 rows of V tokens may miss it by the
    rounding of their softmax, V * FLOAT32_ROUNDING but at most MOST_SUM_TOLERANCE.
    """
    given = _numbers(values, name)
    rows = given.to(torch.float64)
    if rows.ndim != ndim or rows.shape[-1] == 0:
        raise InvalidProbabilities(
            f"{name} has shape {tuple(rows.shape)}: expected {ndim} axes with the vocabulary, not empty, as the last one."
        )
    if rows.numel() == 0:
        return rows
    if not bool(torch.isfinite(rows).all()):
        raise InvalidProbabilities(
            f"{name} holds NaN or an infinity: expected probabilities, so apply softmax to logits."
        )
    if bool((rows < 0).any()):
        raise InvalidProbabilities(
            f"{name} holds {float(rows.min()):.6g}: expected probabilities >= 0, so apply softmax to logits."
        )
    sums = rows.sum(dim=-1, keepdim=True)
    worst = float(sums.flatten()[(sums.flatten() - 1.0).abs().argmax()])
    tolerance = _sum_tolerance(given.dtype, rows.shape[-1])
    if abs(worst - 1.0) > tolerance:
        raise InvalidProbabilities(
            f"A row of {name} sums to {worst:.9g}: expected 1 within {tolerance:.3g}, so normalise it in float64."
        )
    return rows / sums


def check_pair(target: Tensor, draft: Tensor) -> None:
    """Raise InvalidProbabilities unless target is [.., K+1, V] and draft [.., K, V] for the same K and V."""
    if target.shape[:-2] != draft.shape[:-2] or target.shape[-2] != draft.shape[-2] + 1:
        raise InvalidProbabilities(
            f"Target rows {tuple(target.shape)} do not fit draft rows {tuple(draft.shape)}: "
            "expected one target row more than draft rows (the row after the last draft)."
        )
    if draft.shape[-2] and target.shape[-1] != draft.shape[-1]:
        raise InvalidProbabilities(
            f"Target and draft have vocabularies of {target.shape[-1]} and {draft.shape[-1]} tokens: expected the same."
        )


def cut(accepted: int, next_token: int, draft_tokens: Sequence[int], limit: int | None) -> tuple[int, int]:
    """A step's result cut to at most `limit` accepted drafts, after the sampler.

    The step emits draft_tokens[:accepted] and then next_token. A cut keeps the first limit + 1 of these tokens: what it
    keeps is a prefix of a target-distributed sample, so it is target-distributed whatever the limit was chosen from
    before the drafts were drawn. Cutting the block before the sampler is the same as a narrower width.

    Returns (accepted, next_token) after the cut; limit None cuts nothing; a negative limit raises ValueError.
    """
    if limit is None:
        return accepted, next_token
    limit = whole(limit, "limit")
    if limit < 0:
        raise ValueError(f"A cut-off of {limit} drafts is impossible: expected 0 or more.")
    if accepted <= limit:
        return accepted, next_token
    return limit, int(draft_tokens[limit])


def _uniforms(values: Any, count: int, like: Tensor) -> Tensor:
    drawn = _numbers(values, "uniforms").to(device=like.device, dtype=torch.float64)
    if tuple(drawn.shape) != (count,):
        raise InvalidProbabilities(
            f"uniforms has shape {tuple(drawn.shape)}: expected ({count},), one per draft and one for the next token."
        )
    if not bool(((drawn >= 0) & (drawn <= 1)).all()):
        raise InvalidProbabilities("uniforms holds a value outside [0, 1].")
    # Single-precision generators may round up to 1; a threshold of 1 must pass all the same.
    return drawn.clamp(max=1.0 - 2.0**-53)


def verify(
    target_probs: Any,
    draft_probs: Any,
    draft_tokens: Any,
    uniforms: Any,
    method: str = "token",
    *,
    width: int | None = None,
    limit: int | None = None,
) -> tuple[int, int]:
    """Accept a prefix of one drafted block and draw the token that follows it.

    target_probs: [K+1, V], row i is the target's distribution after the first i drafts.
    draft_probs:  [K, V], row i is the distribution that draft i was drawn from (a point mass for a greedy drafter).
    draft_tokens: [K], token ids; -1 is a placeholder (grammar padding) and ends the block before it.
    uniforms:     [K+1], in [0, 1); the first K decide the drafts, the last one draws the next token.
    width:        verify only the first `width` drafts (a narrow step); None for all.
    limit:        cut the result to this many accepted drafts after the sampler (see `cut`); None for no cut.

    Returns (accepted, next_token). Raises InvalidProbabilities (a ValueError) for rows that are not distributions,
    shapes that do not fit and token ids outside the vocabulary, and ValueError for an unknown method or width.
    """
    target = as_probabilities(target_probs, "target_probs", 2)
    draft = as_probabilities(draft_probs, "draft_probs", 2)
    check_pair(target, draft)
    num_drafts, vocab_size = draft.shape[0], target.shape[1]
    tokens = as_token_ids(draft_tokens, "draft_tokens", target.device)
    if tuple(tokens.shape) != (num_drafts,):
        raise InvalidProbabilities(f"draft_tokens has shape {tuple(tokens.shape)}: expected ({num_drafts},).")
    drawn = _uniforms(uniforms, num_drafts + 1, target)
    if num_drafts and int(tokens.min()) < PLACEHOLDER:
        raise InvalidProbabilities(
            f"draft_tokens holds {int(tokens.min())}: expected token ids, or {PLACEHOLDER} for a placeholder."
        )
    if num_drafts and int(tokens.max()) >= vocab_size:
        raise InvalidProbabilities(
            f"draft_tokens holds {int(tokens.max())}: expected ids below the vocabulary size {vocab_size}."
        )
    used = num_drafts if width is None else whole(width, "width")
    if not 0 <= used <= num_drafts:
        raise ValueError(f"Verify width {width} is impossible: expected 0 to {num_drafts}, the number of drafts.")
    placeholders = (tokens[:used] == PLACEHOLDER).nonzero()
    if len(placeholders):
        used = int(placeholders[0])
    rule = rule_of(
        method, target[None, : used + 1], draft[None, :used].reshape(1, used, vocab_size), tokens[None, :used]
    )
    accepted = int(rule.accepted(drawn[None, :used])[0])
    cumulative = rule.next_probs[0, accepted].cumsum(dim=-1)
    # The first token whose cumulative probability exceeds the uniform; rounding must not walk past the last one.
    next_token = int((cumulative > drawn[-1] * cumulative[-1]).long().argmax())
    return cut(accepted, next_token, tokens[:used].tolist(), limit)
