"""Acceptance under every method from recorded blocks, for vocabularies that cannot be enumerated."""

from dataclasses import dataclass
from typing import Any

import torch

from dflash_verify.verify.reference import (
    InvalidProbabilities,
    Tensor,
    _ratios,
    as_probabilities,
    as_token_ids,
    check_pair,
)


@dataclass(frozen=True, slots=True)
class PathSurvival:
    """P(accepted >= i | the drafts before i), i = 1 .. N, for each recorded block; float64 [num_blocks, N].

    The average over blocks whose drafts were drawn from the recorded draft distributions is unbiased for S_i. Neither
    method's S_i depends on the width, so a width K takes the first K columns; E[accepted] is their sum.
    """

    token: Tensor
    block: Tensor
    bound: Tensor


def survival_from_paths(target_probs: Any, draft_probs: Any, draft_tokens: Any) -> PathSurvival:
    """Survival of each recorded block, the uniforms and the draft at position i itself integrated out exactly.

    target_probs: [B, N+1, V] (the last row may be missing: [B, N, V]), the target after the first i recorded drafts.
    draft_probs:  [B, N, V], the distributions the drafts were drawn from.
    draft_tokens: [B, N], the drafts; one that its distribution gives probability 0 is refused, it was not drawn from it.

    With w_0 = 1 the drafts before i have weight w_{i-1} and S_i is sum_x min(w_{i-1} target(x), draft(x)), where w is
    token-wise prod min(1, p/q) taken as a factor; block min(w p/q, 1) (Sun et al. 2024, eq. 4: P(accepted >= i) is
    E[p_i] for every width); and for the bound the plain prod p/q, which makes it E over drafts of
    min(target prefix, draft prefix) / draft prefix. Per block token <= block <= bound.
    """
    target = as_probabilities(target_probs, "target_probs", 3)
    draft = as_probabilities(draft_probs, "draft_probs", 3)
    tokens = as_token_ids(draft_tokens, "draft_tokens", target.device)
    num_drafts = draft.shape[1]
    if target.shape[1] == num_drafts and num_drafts:
        target = torch.cat((target, target[:, -1:]), dim=1)  # the row after the last draft decides nothing here
    check_pair(target, draft)
    if tuple(tokens.shape) != tuple(draft.shape[:2]):
        raise InvalidProbabilities(f"draft_tokens has shape {tuple(tokens.shape)}: expected {tuple(draft.shape[:2])}.")
    if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < draft.shape[2]:
        raise InvalidProbabilities(f"draft_tokens holds an id outside 0 .. {draft.shape[2] - 1}.")
    impossible = draft.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) == 0
    if bool(impossible.any()):
        raise InvalidProbabilities(
            f"draft_tokens holds token {int(tokens[impossible][0])} where draft_probs gives it probability 0: expected the "
            "distributions that the drafts were drawn from."
        )
    ratios = _ratios(target, draft, tokens)
    token_weight = ratios.new_ones(ratios.shape[0])
    block_weight = token_weight
    bound_weight = token_weight
    columns: list[tuple[Tensor, Tensor, Tensor]] = []
    for i in range(num_drafts):
        p, q = target[:, i], draft[:, i]
        columns.append(
            (
                token_weight * p.minimum(q).sum(-1),
                (block_weight[:, None] * p).minimum(q).sum(-1),
                (bound_weight[:, None] * p).minimum(q).sum(-1),
            )
        )
        ratio = ratios[:, i]
        token_weight = token_weight * ratio.clamp(max=1.0)
        # Over a denormal draft probability the ratio is infinite; a weight of 0 stays 0.
        block_weight = torch.where(block_weight > 0, block_weight * ratio, block_weight).clamp(max=1.0)
        bound_weight = torch.where(bound_weight > 0, bound_weight * ratio, bound_weight).clamp(max=1e300)
    if not columns:
        empty = draft.new_zeros(draft.shape[0], 0)
        return PathSurvival(empty, empty, empty)
    token, block, bound = (torch.stack(column, dim=1) for column in zip(*columns, strict=True))
    return PathSurvival(token, block, bound)
