"""What no lossless verifier can exceed."""

from dflash_verify.verify.distributions import Distribution, enumerate_blocks
from dflash_verify.verify.reference import Tensor


def transport_survival(target: Distribution, draft: Distribution, *, width: int | None = None) -> Tensor:
    """The largest P(accepted >= i) of any lossless verifier, i = 1 .. K, as float64 [K].

    Accepting i drafts makes the first i output tokens equal the first i drafts. The output is target-distributed and
    the drafts are draft-distributed, so no coupling of the two makes them agree more often than
    sum over x_1..x_i of min(target(x_1..x_i), draft(x_1..x_i)): one minus the total variation distance of the prefixes.
    Prefixes form a tree, on which one coupling reaches all K bounds at once, so their sum is the optimal transport
    value with the common prefix length as gain. It may need to see the probabilities of blocks that were not drafted;
    block verification is the best that does not (Sun et al. 2024, Theorem 2).
    """
    blocks = enumerate_blocks(target, draft, width)
    num_drafts = blocks.tokens.shape[1]
    vocab_size = blocks.target.shape[-1]
    index = blocks.tokens.unsqueeze(-1)
    draft_prefix = blocks.draft.gather(-1, index).squeeze(-1).cumprod(dim=-1)  # [B, K]
    target_prefix = blocks.target[:, :-1].gather(-1, index).squeeze(-1).cumprod(dim=-1)
    agree = draft_prefix.minimum(target_prefix)
    # Every prefix of i tokens stands V**(K-i) times in the enumeration, with the same numbers each time.
    repeats = [float(vocab_size ** (num_drafts - i)) for i in range(1, num_drafts + 1)]
    return agree.sum(dim=0) / agree.new_tensor(repeats)


def transport_bound(target: Distribution, draft: Distribution, *, width: int | None = None) -> float:
    """The largest E[accepted drafts] of any lossless verifier (see `transport_survival`)."""
    return float(transport_survival(target, draft, width=width).sum())
