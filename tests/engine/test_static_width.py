"""A static width on the real engine: exactly that many drafts are verified, and the text does not change.

For stock vLLM and for widths 1, 3 and 7, with vLLM's asynchronous and its synchronous scheduler.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from dflash_verify.cpu.engine import DRAFT_WIDTH, Engine, Request, open_engine
from dflash_verify.cpu.models import Models
from dflash_verify.cpu.trace import Step, draft_counts, shortened

LONG = "it is said that the old house on the hill had more rooms than anyone had ever counted, and that "
PROMPTS = ("Hello world", "Once upon a time there was", LONG, "a")
MAX_TOKENS = 28

# 48 tokens a step: LONG takes three steps to prefill while others decode.
ENGINE: dict[str, Any] = {"max_num_batched_tokens": 48}


@dataclass(frozen=True)
class Arm:
    """verify_tokens: DFLASH_VERIFY_TOKENS, None for unset (stock vLLM)."""

    verify_tokens: str | None
    asynchronous: bool

    @property
    def width(self) -> int:
        return int(self.verify_tokens or DRAFT_WIDTH)

    def engine_args(self) -> dict[str, Any]:
        environ = {} if self.verify_tokens is None else {"DFLASH_VERIFY_TOKENS": self.verify_tokens}
        return {"environ": environ, "async_scheduling": self.asynchronous}

    def __str__(self) -> str:
        return f"{self.verify_tokens or 'stock'}-{'async' if self.asynchronous else 'sync'}"


ARMS = [Arm(tokens, asynchronous) for tokens in (None, "1", "3", "7") for asynchronous in (True, False)]


class Plain:
    """Greedy tokens without speculation, each prompt alone: the beginning of one long answer, asked for once."""

    def __init__(self, engine: Engine, prompts: Sequence[str], max_tokens: int) -> None:
        self._answers = {prompt: engine.generate([prompt], max_tokens)[0] for prompt in prompts}

    def __call__(self, prompt: str | Sequence[int], max_tokens: int) -> list[int]:
        answer = self._answers[str(prompt)]
        assert len(answer) >= max_tokens
        return answer[:max_tokens]


@pytest.fixture(scope="module")
def plain(models: Models) -> Plain:
    with open_engine(models) as engine:
        prompts = (*PROMPTS, *(prompt for prompt, _ in (*SHARED_PREFIX, *NEAR_THE_END, *CROWD)))
        return Plain(engine, prompts, max_tokens=32)


SHARED_PREFIX = [(LONG + tail, 10) for tail in ("cats", "dogs", "cats")]
NEAR_THE_END = [(LONG[:52], 12), (LONG[:53], 11), (LONG[:45], 19)]  # all end at 64 tokens
CROWD = [(LONG[i : i + 20], 32) for i in range(4)]


@pytest.fixture(scope="module", params=ARMS, ids=str)
def arm(request: pytest.FixtureRequest) -> Arm:
    chosen: Arm = request.param
    return chosen


@pytest.fixture(scope="module")
def engine(models: Models, plain: Plain, arm: Arm) -> Iterator[Engine]:
    with open_engine(models, "dflash2", **arm.engine_args(), **ENGINE) as engine:
        yield engine


@pytest.fixture
def steps(engine: Engine) -> list[Step]:
    """The steps of this test alone."""
    engine.steps.clear()
    return engine.steps


def emitted(steps: Sequence[Step]) -> Counter[int]:
    """How often a verified request emitted how many tokens."""
    return Counter(row.emitted for step in steps for row in step.requests if row.drafts)


def assert_nothing_is_left(engine: Engine) -> None:
    scheduler = engine.scheduler
    assert not scheduler.requests
    assert not scheduler.running
    assert not scheduler.waiting
    assert scheduler.kv_cache_manager.usage == 0


def test_greedy_text_is_that_of_no_speculation_and_every_step_has_the_width(
    arm: Arm, engine: Engine, plain: Plain, steps: list[Step]
) -> None:
    before = engine.counters()
    tokens = engine.generate(PROMPTS, MAX_TOKENS)
    after = engine.counters()
    assert tokens == [plain(prompt, MAX_TOKENS) for prompt in PROMPTS]
    # The text cannot show a drafter that is always wrong, nor a verifier that accepts nothing: what came out can.
    counts = emitted(steps)
    assert set(counts) <= set(range(1, arm.width + 2))
    assert counts[1] > 0
    assert counts[arm.width + 1] > 0
    drafts = after.drafts - before.drafts
    assert after.draft_tokens - before.draft_tokens == drafts * arm.width
    assert 1.3 <= 1 + (after.accepted_tokens - before.accepted_tokens) / drafts <= arm.width + 0.9
    # LONG is prefilled in three steps beside decoding requests; nothing here has a reason to be shortened.
    assert shortened(steps, arm.width) == Counter()
    assert set(draft_counts(steps)) == {arm.width}
    assert_nothing_is_left(engine)


def test_a_chunked_prefill_beside_decoding_requests_changes_neither_width_nor_text(
    arm: Arm, engine: Engine, plain: Plain, steps: list[Step]
) -> None:
    requests = [Request("Hello world", 24), Request(LONG, 10, arrive_step=2), Request(LONG, 10, arrive_step=4)]
    tokens = engine.play(requests)
    assert tokens == [plain(r.prompt, r.max_tokens) for r in requests]
    mixed = [s for s in steps if any(r.prefill for r in s.requests) and any(r.drafts for r in s.requests)]
    assert len(mixed) >= 2
    assert shortened(steps, arm.width) == Counter()


def test_staggered_arrivals_change_neither_width_nor_text(
    arm: Arm, engine: Engine, plain: Plain, steps: list[Step]
) -> None:
    # Six requests for four places: the last two wait for one to end.
    requests = [Request(PROMPTS[i % 4], 16, arrive_step=2 * i) for i in range(6)]
    tokens = engine.play(requests)
    assert tokens == [plain(r.prompt, r.max_tokens) for r in requests]
    assert {len(step.requests) for step in steps} >= {1, 2, 3, 4}
    assert shortened(steps, arm.width) == Counter()
    assert_nothing_is_left(engine)


def test_an_abort_in_the_middle_leaves_the_others_and_the_engine_as_they_were(
    arm: Arm, engine: Engine, plain: Plain, steps: list[Step]
) -> None:
    requests = [
        Request("Hello world", 20),
        Request("Once upon a time there was", 20, abort_after=6),
        Request(LONG, 20, abort_after=1),  # while its first drafts are in flight
        Request("a", 20, arrive_step=6),
    ]
    tokens = engine.play(requests)
    for request, shown in zip(requests, tokens, strict=True):
        whole = plain(request.prompt, 20)
        assert shown == whole[: len(shown)]
        assert (len(shown) == 20) == (request.abort_after is None)
    assert shortened(steps, arm.width) == Counter()
    assert_nothing_is_left(engine)
    # and what runs next meets no trace of them
    assert engine.generate(["Hello world"], 8) == [plain("Hello world", 8)]


def test_preemption_for_want_of_cache_blocks_changes_no_text(models: Models, plain: Plain, arm: Arm) -> None:
    with open_engine(models, "dflash2", **arm.engine_args(), num_gpu_blocks_override=10, max_model_len=96) as engine:
        tokens = engine.play([Request(prompt, max_tokens) for prompt, max_tokens in CROWD])
        preempted = [request for step in engine.steps for request in step.preempted]
        reasons = shortened(engine.steps, arm.width)
        assert_nothing_is_left(engine)
    assert tokens == [plain(*request) for request in CROWD]
    assert preempted  # or the cache was not small enough
    assert set(reasons) <= {"not in the step before", "first after prefill"}
    # At most once per comeback: whoever decodes on has the width.
    assert reasons.total() <= len(preempted)


def test_prefix_caching_changes_no_text(models: Models, plain: Plain, arm: Arm) -> None:
    with open_engine(models, "dflash2", **arm.engine_args(), enable_prefix_caching=True) as engine:
        tokens = [engine.generate([prompt], max_tokens)[0] for prompt, max_tokens in SHARED_PREFIX]
        hits = {metric.name: getattr(metric, "value", 0) for metric in engine.llm.get_metrics()}[
            "vllm:prefix_cache_hits"
        ]
        reasons = shortened(engine.steps, arm.width)
    assert tokens == [plain(*request) for request in SHARED_PREFIX]
    assert hits >= 2 * 16 * (len(LONG) // 16 - 1)  # all whole blocks of the second and the third, but perhaps the last
    assert set(reasons) <= {"first after prefill"}
    assert reasons.total() <= 2


def test_requests_that_end_at_max_model_len_change_no_text(models: Models, plain: Plain, arm: Arm) -> None:
    with open_engine(models, "dflash2", **arm.engine_args(), max_model_len=64) as engine:
        tokens = engine.play([Request(prompt, max_tokens) for prompt, max_tokens in NEAR_THE_END])
        reasons = shortened(engine.steps, arm.width)
        assert_nothing_is_left(engine)
    assert tokens == [plain(*request) for request in NEAR_THE_END]
    assert set(reasons) <= {"end of context"}
    # A request is short of room for its last `width` tokens, of which each step yields one at least; the asynchronous
    # scheduler has one more step on the way.
    assert reasons.total() <= (arm.width + arm.asynchronous) * len(NEAR_THE_END)
