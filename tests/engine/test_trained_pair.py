"""The pair that bench/block trains is what vLLM serves: same features, same drafts, token for token.

Weights are random here, every tensor of the drafter included, so that a part computed differently shows.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_verify.cpu.engine import open_engine
from dflash_verify.cpu.models import Models

BENCH = Path(__file__).resolve().parents[2] / "bench" / "block"


@pytest.fixture
def pair_module(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    import pair

    return pair


def test_vllm_drafts_what_the_training_code_drafts(pair_module: Any, tmp_path: Path) -> None:
    torch.manual_seed(5)
    shape = pair_module.Shape(
        hidden_size=64, intermediate_size=96, num_heads=2, num_kv_heads=1, selector_rank=16, selector_top_k=6
    )
    target, drafter = pair_module.new_target(shape).eval(), pair_module.Drafter(shape).eval()
    with torch.no_grad():
        for parameter in target.parameters():  # transformers starts near zero: all tokens alike
            parameter.mul_(4.0 if parameter.ndim > 1 else 1.0)
        for parameter in drafter.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(noise * parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 1.0 + 0.2 * noise)
    pair_module.save_pair(tmp_path, target, drafter, {})
    (tmp_path / "dflash2").symlink_to(tmp_path / "draft")
    target, drafter = pair_module.load_pair(tmp_path, "cpu")

    prompt = list(b"import os\n\ndef main():\n")
    drafted: list[list[int]] = []
    with open_engine(Models(tmp_path), drafter="dflash2") as engine:
        speculator = engine.model_runner.speculator
        original = speculator.propose

        def propose(*args: Any, **kwargs: Any) -> Any:
            tokens = original(*args, **kwargs)
            drafted.append(tokens[0].tolist())
            return tokens

        speculator.propose = propose
        (emitted,) = engine.generate([prompt], max_tokens=12)
    lengths = [request.emitted for step in engine.steps for request in step.requests if request.emitted]

    text = torch.tensor([prompt + emitted])
    assert emitted == [
        int(pair_module.run_target(target, text[:, : len(prompt) + i], shape).logits[0, -1].argmax()) for i in range(12)
    ]
    known = len(prompt)
    for step, length in enumerate(lengths[:-1]):
        known += length
        seen = pair_module.run_target(target, text[:, :known], shape)
        anchor = torch.tensor([known - 1])
        expected = pair_module.propose(
            drafter, target, seen.features, anchor, text[:, known - 1], 0.0, torch.Generator()
        )
        assert drafted[step] == expected.tokens[0].tolist(), f"step {step}"
    assert len({tuple(tokens) for tokens in drafted}) > 3, "drafts must depend on the text"
