"""What importing bench/gpu/witness.py changes: the values of dummy weights, and the drafts. Nothing of the text."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_verify.cpu.engine import open_engine
from dflash_verify.cpu.models import Models

BENCH = Path(__file__).resolve().parents[2] / "bench" / "gpu"


@contextmanager
def witness() -> Iterator[None]:
    """Imported as a worker imports it; what the import replaces is put back."""
    from vllm.model_executor.model_loader import dummy_loader
    from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in [(dummy_loader, "initialize_single_dummy_weight"), (DFlashSpeculator, "propose")]:
            patch.setattr(owner, name, getattr(owner, name))
        patch.syspath_prepend(str(BENCH))
        patch.delitem(sys.modules, "witness", raising=False)
        import witness  # noqa: F401

        yield


class Serving:
    """Four sampled or greedy requests: their texts, what was drafted in each step, and the target's weights."""

    def __init__(self, models: Models, load_format: str = "auto", temperature: float = 0.0) -> None:
        with open_engine(models, drafter="dflash2", load_format=load_format) as engine:
            speculator = engine.model_runner.speculator
            propose, self.drafts = speculator.propose, []
            self.vocabulary: int = speculator.vocab_size

            def watched(*args: Any, **kwargs: Any) -> Any:
                drafts = propose(*args, **kwargs)
                self.drafts.append(drafts.clone())
                return drafts

            speculator.propose = watched
            rng = random.Random(0)
            prompts = [[rng.randrange(self.vocabulary) for _ in range(8)] for _ in range(4)]
            self.texts = engine.generate(prompts, max_tokens=24, temperature=temperature)
            weights = [p.clone() for p in engine.model_runner.model.parameters() if p.ndim == 2]
        self.alike = sum(torch.equal(a, b) for i, a in enumerate(weights) for b in weights[:i] if a.shape == b.shape)
        self.tokens = torch.cat([drafts.flatten() for drafts in self.drafts])


def test_vllm_s_dummy_weights_draft_one_token_and_are_alike(models: Models) -> None:
    # The reason for all this: should it change, witness.py need not spread experts any more.
    stock = Serving(models, "dummy", temperature=1.0)
    assert len(stock.tokens.unique()) == 1
    assert stock.alike > 0


def test_with_the_witness_every_tensor_has_values_of_its_own_and_every_process_the_same_drafts(models: Models) -> None:
    with witness():
        first = Serving(models, "dummy", temperature=1.0)
    with witness():
        second = Serving(models, "dummy", temperature=1.0)
    assert first.alike == 0
    assert len(first.tokens) > 200
    assert len(first.tokens.unique()) > 0.4 * first.vocabulary
    assert first.tokens.min() < 0.05 * first.vocabulary
    assert 0.95 * first.vocabulary < first.tokens.max() < first.vocabulary
    assert all(map(torch.equal, first.drafts, second.drafts)), "ranks are processes of their own"


def test_the_text_stays_the_target_s_own(models: Models) -> None:
    stock = Serving(models)
    with witness():
        watched = Serving(models)
    assert watched.texts == stock.texts
    assert len(watched.tokens.unique()) > len(stock.tokens.unique())
