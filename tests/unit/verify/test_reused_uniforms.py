"""Why block verification is refused on releases that decide a position twice with the same random number.

Block verification looks at the uniforms of positions after the accepted prefix; token-wise stops before them. vLLM 0.28 to
0.32 key the uniform of a position by (request seed, position) alone, so a position after the accepted prefix meets the
same number again at the next step, when that number is known to be one that rejected.
"""

import itertools

import torch

from dflash_verify.verify.reference import rule_of

TARGET = torch.tensor([0.3, 0.7], dtype=torch.float64)
DRAFT = torch.tensor([0.8, 0.2], dtype=torch.float64)
BLOCKS = list(itertools.product(range(2), repeat=2))


def second_token_after_a_rejected_block(reused: bool) -> torch.Tensor:
    """P(second output token | the first step accepted nothing), two drafts a step, the same p and q at every position.

    The first step ended before position 1, so its second uniform is known to be at least h_2 of its block. The second
    step decides position 2 with that same uniform (reused) or a new one.
    """
    tokens = torch.tensor(BLOCKS)
    rule = rule_of("block", TARGET.expand(4, 3, 2), DRAFT.expand(4, 2, 2), tokens)
    weight = DRAFT[tokens].prod(-1)
    h = rule.thresholds
    rejected = weight * (1 - h).prod(-1)
    mass = torch.zeros(2, dtype=torch.float64)
    for first in range(4):
        if float(rejected[first]) == 0.0:
            continue
        floor = float(h[first, 1]) if reused else 0.0  # the uniform of position 2 lies in [floor, 1)
        for second in range(4):
            fails_first = 1.0 - max(0.0, float(h[second, 0]) - floor) / (1.0 - floor)
            nothing = fails_first * (1.0 - float(h[second, 1]))
            here = float(rejected[first] * weight[second])
            mass[BLOCKS[second][0]] += here * (1.0 - nothing)
            mass += here * nothing * rule.next_probs[second, 0]
    return mass / rejected.sum()


def test_new_uniforms_at_every_step_give_the_target() -> None:
    found = second_token_after_a_rejected_block(reused=False)
    assert float((found - TARGET).abs().max()) < 1e-12


def test_a_uniform_used_twice_does_not() -> None:
    off = float((second_token_after_a_rejected_block(reused=True) - TARGET).abs().max())
    assert off > 0.01, f"probability of a token off by {off:.4f}"
