"""DFLASH_BLOCK_VERIFY=1 on the real engine: blocks are verified as blocks, at every width, and greedy requests do not notice."""

from typing import Any

import pytest

from dflash_verify.cpu.engine import Request, open_engine
from dflash_verify.cpu.models import Drafter, Models

PROMPTS = ("the moon and", "letters in", "a third one")
GREEDY_TOKENS = 16


@pytest.fixture(scope="module")
def plain_text(models: Models) -> list[list[int]]:
    """What the target says without speculation at temperature 0."""
    with open_engine(models) as engine:
        return engine.generate(PROMPTS, max_tokens=GREEDY_TOKENS)


def requests(sampled: int) -> list[Request]:
    """Three greedy requests and `sampled` at temperature 1 that decode beside them."""
    warm = [
        Request(PROMPTS[i % 3], GREEDY_TOKENS, sampling={"temperature": 1.0, "seed": 40 + i}) for i in range(sampled)
    ]
    return [Request(prompt, GREEDY_TOKENS) for prompt in PROMPTS] + warm


@pytest.mark.parametrize("width", ["3", "auto"])
def test_greedy_requests_beside_sampled_ones_say_what_the_target_says(
    models: Models, plain_text: list[list[int]], width: str
) -> None:
    environ = {"DFLASH_VERIFY_TOKENS": width, "DFLASH_BLOCK_VERIFY": "1"}
    with open_engine(models, drafter="dflash2", environ=environ, max_num_seqs=8) as engine:
        assert engine.model_runner.rejection_sampler.use_block_verification
        assert engine.model_runner.speculator.draft_logits is not None, "drafts are sampled"
        texts = engine.play(requests(sampled=3))
        again = engine.play(requests(sampled=3))
    assert texts[:3] == plain_text
    assert [len(text) for text in texts] == [GREEDY_TOKENS] * 6
    # Random numbers belong to a step as well as to a position, and under auto the steps depend on what was learned: there
    # a seed fixes the distribution, not the text.
    if width != "auto":
        assert texts == again, "seeded requests repeat"
    assert again[:3] == plain_text
    assert engine.steps
    assert any(request.emitted > 1 for step in engine.steps for request in step.requests), "drafts were accepted"


@pytest.mark.parametrize("drafter", ["dflash", "dspark"])
def test_every_drafter_of_the_family_takes_it_without_a_width(
    models: Models, plain_text: list[list[int]], drafter: Drafter
) -> None:
    with open_engine(models, drafter=drafter, environ={"DFLASH_BLOCK_VERIFY": "1"}) as engine:
        assert engine.model_runner.rejection_sampler.use_block_verification
        assert engine.model_runner.speculator.draft_logits is not None
        assert engine.generate(PROMPTS, max_tokens=GREEDY_TOKENS) == plain_text


@pytest.mark.parametrize(
    "speculative",
    [
        {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3},
        {"method": "ngram_gpu", "num_speculative_tokens": 3, "prompt_lookup_max": 3},
    ],
    ids=["ngram", "ngram_gpu"],
)
def test_other_methods_stop_with_one_sentence_before_weights_load(models: Models, speculative: dict[str, Any]) -> None:
    with (
        pytest.raises(Exception) as stopped,
        open_engine(models, environ={"DFLASH_BLOCK_VERIFY": "1"}, speculative_config=speculative),
    ):
        pass
    sentence = str(stopped.value)
    assert sentence.startswith("DFLASH_BLOCK_VERIFY=1 ")
    assert f"the speculative method is {speculative['method']}" in sentence
    assert "\n" not in sentence
