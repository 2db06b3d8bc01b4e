"""Guided requests with sampled drafts: vLLM's placeholder changes the output distribution, overlay guided-residual restores it.

The two requests below differ in nothing but what happens to a draft that the grammar forbids. p = (0, 1/2, 1/2) is the
target under the grammar, q = (1/2, 1/2, 0) the drafter, and token 0 is forbidden.
"""

from types import SimpleNamespace
from typing import Any

import pytest

from dflash_verify.cpu import environment, interpreter
from dflash_verify.cpu.engine import Request, open_engine
from dflash_verify.cpu.models import Models

environment.activate()

import torch
from scipy import stats

interpreter.install()

from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

from dflash_verify.overlays import guided_residual
from dflash_verify.overlays.guided_residual import WRAPPERS, keep_first_forbidden

ROWS = 240
OFF = float("-inf")
METHODS = ("token", "block")


def first_tokens(method: str, overlay: bool) -> list[int]:
    """First output token of ROWS guided requests with two drafts each; forbidden ones are marked as vLLM marks them."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.tensor([[OFF, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]).repeat(ROWS, 1)
    draft_logits = torch.tensor([[0.0, 0.0, OFF], [0.0, 0.0, 0.0]]).expand(ROWS, 2, 3).contiguous()
    drafts = torch.multinomial(draft_logits.softmax(-1).flatten(0, 1), 1, generator=generator).view(ROWS, 2)
    token_ids = torch.cat((torch.zeros(ROWS, 1, dtype=torch.long), drafts), dim=1)
    invalid = torch.zeros(ROWS, 3, dtype=torch.bool)
    invalid[:, 1:] = (drafts[:, :1] == 0).expand(-1, 2)
    token_ids, invalid = token_ids.flatten(), invalid.flatten()
    if overlay:
        invalid = keep_first_forbidden(logits, token_ids, invalid, torch.ones_like(invalid))
    slots = torch.arange(ROWS, dtype=torch.int32)
    local = torch.arange(3, dtype=torch.int32).repeat(ROWS)
    sampled, _ = rejection_sample(
        logits,
        draft_logits,
        token_ids.masked_fill(invalid, -1),
        torch.arange(ROWS + 1, dtype=torch.int32) * 3,
        local.long() + 20,
        slots,
        slots.repeat_interleave(3),
        local,
        torch.ones(ROWS),
        torch.arange(ROWS) * 104729,
        2,
        use_block_verification=method == "block",
    )
    return sampled[:, 0].tolist()


@pytest.mark.parametrize("method", METHODS)
def test_a_placeholder_for_a_sampled_draft_is_not_lossless(method: str) -> None:
    """When this fails, vLLM has repaired it and the overlay can go."""
    tokens = first_tokens(method, overlay=False)
    assert stats.binomtest(tokens.count(1), ROWS, 0.5).pvalue < 1e-9, "p says one half"
    if method == "token":
        assert stats.binomtest(tokens.count(1), ROWS, 0.75).pvalue > 1e-4, "as computed by hand"


@pytest.mark.parametrize("method", METHODS)
def test_the_overlay_makes_guided_requests_lossless_again(method: str) -> None:
    tokens = first_tokens(method, overlay=True)
    assert set(tokens) <= {1, 2}
    assert stats.binomtest(tokens.count(1), ROWS, 0.5).pvalue > 1e-4


def test_only_the_first_forbidden_draft_of_each_request_is_kept() -> None:
    logits = torch.zeros(8, 4)
    token_ids = torch.tensor([0, 1, 2, 3, 0, 3, 2, 1])
    invalid = torch.tensor([False, False, True, True, False, True, True, True])
    drawn = torch.tensor([True] * 4 + [False] * 4)  # the second request's drafts were never drawn
    left = keep_first_forbidden(logits, token_ids, invalid, drawn)
    assert left.tolist() == [False, False, False, True, False, True, True, True]
    off = logits.isinf().nonzero().tolist()
    assert off == [[1, 2]], "the row that verifies the kept draft, and only its own token"


def test_greedy_drafts_and_unguided_batches_are_left_alone() -> None:
    seen: list[Any] = []
    wrapped = WRAPPERS["RejectionSampler.__call__"](lambda *args: seen.append(args), None)  # type: ignore[arg-type]
    mask, logits = torch.tensor([False, True]), torch.zeros(2, 3)
    wrapped(None, logits, None, None, mask)
    wrapped(None, logits, None, torch.zeros(1, 1, 3), None)
    assert seen[0][4] is mask
    assert seen[1][4] is None
    assert not logits.isinf().any()


def test_drafts_of_a_step_inside_the_prefill_stay_placeholders() -> None:
    seen: list[Any] = []
    wrapped = WRAPPERS["RejectionSampler.__call__"](lambda *args: seen.append(args), None)  # type: ignore[arg-type]
    sampler = SimpleNamespace(req_states=SimpleNamespace(prefill_len=SimpleNamespace(gpu=torch.tensor([9, 4]))))
    batch = SimpleNamespace(
        logits_indices=torch.arange(4),
        positions=torch.tensor([8, 9, 8, 9]),
        expanded_local_pos=torch.tensor([0, 1, 0, 1]),
        expanded_idx_mapping=torch.tensor([0, 0, 1, 1]),
        input_ids=torch.tensor([5, -1, 5, 2]),
    )
    mask = torch.tensor([False, True, False, True])
    logits = torch.zeros(4, 6)
    wrapped(SimpleNamespace(sampler=sampler), logits, batch, torch.zeros(2, 1, 6), mask)
    assert seen[0][4].tolist() == [False, True, False, False]
    assert logits.isinf().nonzero().tolist() == [[2, 2]]


def test_guided_requests_on_the_engine_obey_their_grammar_and_keep_their_first_forbidden_draft(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    marked: list[tuple[int, int]] = []

    def spy(logits: Any, token_ids: Any, invalid: Any, drawn: Any) -> Any:
        left = keep_first_forbidden(logits, token_ids, invalid, drawn)
        marked.append((int(invalid.sum()), int(left.sum())))
        return left

    monkeypatch.setattr(guided_residual, "keep_first_forbidden", spy)
    vowels = {"structured_outputs": StructuredOutputsParams(regex="[aeiou]{40}")}
    requests = [
        Request("the moon and", 14, sampling={"temperature": 1.0, "seed": 3, **vowels}),
        Request("letters in", 14, sampling={"temperature": 1.0, "seed": 4}),
        Request("letters in", 14, sampling=vowels),
    ]
    environ = {"DFLASH_BLOCK_VERIFY": "1", "DFLASH_VERIFY_TOKENS": "3"}
    with open_engine(models, "dflash2", environ) as engine:
        warm, free, cold = engine.play(requests)
    assert set(warm) | set(cold) <= set(b"aeiou")
    assert not set(free) <= set(b"aeiou"), "the drafter's letters are not vowels: drafts are forbidden all the time"
    assert len(marked) > 5
    assert all(left < before for before, left in marked)
