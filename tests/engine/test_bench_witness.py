"""What bench/gpu/witness.py does to the engines that it measures: only what it says."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_verify.cpu.engine import open_engine
from dflash_verify.cpu.models import Models

BENCH = Path(__file__).resolve().parents[2] / "bench" / "gpu"


@pytest.fixture
def witness(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from vllm.model_executor.model_loader import dummy_loader
    from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

    # Remembered before the import replaces them, so that they are put back afterwards.
    for owner, name in [(dummy_loader, "initialize_single_dummy_weight"), (DFlashSpeculator, "propose")]:
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.delitem(sys.modules, "witness", raising=False)
    import witness

    return witness


def test_dummy_weights_differ_from_tensor_to_tensor_and_not_from_rank_to_rank(witness: Any) -> None:
    from vllm.model_executor.model_loader import dummy_loader

    first, second = torch.empty(64, 8), torch.empty(64, 8)
    dummy_loader.initialize_single_dummy_weight(first)
    dummy_loader.initialize_single_dummy_weight(second, name="gate")
    assert not torch.equal(first, second)
    assert first.abs().max() <= 1e-3
    assert first.std() > 4e-4
    again = torch.empty(64, 8)
    dummy_loader.initialize_single_dummy_weight(again, seed=1234)
    assert torch.equal(again, first), "another process counts from the same seed"


def test_drafts_are_random_tokens_and_the_text_is_the_target_s_own(witness: Any, models: Models) -> None:
    prompts = [[3, 5, 7, 11], [13, 17, 19]]
    with open_engine(models, drafter="dflash2") as engine:
        speculator = engine.model_runner.speculator
        propose, drafted = speculator.propose, []

        def watched(*args: Any, **kwargs: Any) -> Any:
            drafts = propose(*args, **kwargs)
            drafted.append(drafts.clone())
            return drafts

        speculator.propose = watched
        texts = engine.generate(prompts, max_tokens=24)
        vocabulary = speculator.vocab_size
    tokens = torch.cat([drafts.flatten() for drafts in drafted])
    assert len(tokens) > 200
    assert len(tokens.unique()) > 0.5 * min(vocabulary, len(tokens))
    assert tokens.min() >= 0
    assert tokens.max() < vocabulary
    with open_engine(models, drafter=None) as engine:
        assert engine.generate(prompts, max_tokens=24) == texts
