"""The automatic width on the real engine: it moves, every step has one width, and the text does not change."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from dflash_verify.cpu.engine import ENGINE_ARGS, Request, open_engine, plugin_environment, speculative_config
from dflash_verify.cpu.models import Models
from dflash_verify.cpu.trace import Step
from dflash_verify.profile import cost_key
from dflash_verify.width.cost import CostTable

WIDTHS = (1, 3, 5, 7)
LONG = "it is said that the old house on the hill had more rooms than anyone had ever counted, and that "


MOVING = [
    Request("Hello world", 100),
    Request("There was once a house", 60, arrive_step=14),
    Request(LONG, 40, arrive_step=16, abort_after=11),
    Request("a", 30, arrive_step=18),
]
CROWD = [Request(LONG[i : i + 20], 60) for i in range(4)]
STORY = Request("Once upon a time there was", 80)
DIGITS = ("Hello", 24, "[0-9]{20}")  # prompt, tokens, grammar


def digits(**fields: Any) -> Request:
    from vllm.sampling_params import StructuredOutputsParams

    prompt, max_tokens, pattern = DIGITS
    sampling = {"structured_outputs": StructuredOutputsParams(regex=pattern), "ignore_eos": False}
    return Request(prompt, max_tokens, sampling=sampling, **fields)


@pytest.fixture(scope="module")
def plain(models: Models) -> dict[Any, list[int]]:
    """Greedy tokens without speculation, each request alone. One engine a process: it is closed before others start."""
    with open_engine(models) as engine:
        texts = {r.prompt: engine.generate([r.prompt], r.max_tokens)[0] for r in (*MOVING, STORY, *CROWD)}
        texts["digits"] = engine.play([digits()])[0]
    return texts


@pytest.fixture
def cost_table(models: Models, tmp_path: Path) -> Path:
    """Flat for one request and steep for more, so that the best width follows the batch."""
    from vllm.engine.arg_utils import EngineArgs

    args = {**ENGINE_ARGS, "speculative_config": speculative_config(models, "dflash2")}
    with plugin_environment({"DFLASH_VERIFY_TOKENS": "auto"}):
        key = cost_key(EngineArgs(model=str(models.target), **args).create_engine_config())
    cells = {1: (50.0, 51.0, 52.0, 53.0), 2: (50.0, 90.0, 150.0, 220.0), 4: (60.0, 150.0, 300.0, 500.0)}
    path = tmp_path / "cost.json"
    CostTable(7, WIDTHS, cells, (), key).save(path)
    return path


def widths_of(steps: list[Step]) -> list[int]:
    """The width of every step that verified; it must be one."""
    found = []
    for step in steps:
        widths = {r.drafts for r in step.requests if r.drafts and r.room > 8}
        assert len(widths) <= 1, step
        found += widths
    return found


@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
def test_widths_move_with_the_batch_and_the_text_is_that_of_no_speculation(
    models: Models, plain: dict[Any, list[int]], cost_table: Path, asynchronous: bool
) -> None:
    environ = {"DFLASH_VERIFY_TOKENS": "auto", "DFLASH_COST_TABLE": str(cost_table)}
    with open_engine(models, "dflash2", environ, async_scheduling=asynchronous) as engine:
        tokens = engine.play(MOVING)
        widths = widths_of(engine.steps)
        left = engine.scheduler.steering.controller.snapshot()["requests"]
    for request, shown in zip(MOVING, tokens, strict=True):
        assert shown == plain[request.prompt][: len(shown)]
        assert (len(shown) == request.max_tokens) == (request.abort_after is None)
    assert set(widths) <= set(WIDTHS)
    assert widths[0] == 7  # no evidence yet
    assert len(set(widths)) >= 2
    assert min(widths) < 7
    assert left == 0


def test_a_guided_request_is_an_ordinary_one(models: Models, plain: dict[Any, list[int]], cost_table: Path) -> None:
    environ = {"DFLASH_VERIFY_TOKENS": "auto", "DFLASH_COST_TABLE": str(cost_table)}
    with open_engine(models, "dflash2", environ) as engine:
        tokens = engine.play([STORY, digits(arrive_step=4)])
        steps = engine.steps
        widths_of(steps)  # one width for both kinds of request
        controller = engine.scheduler.steering.controller
        assert controller.snapshot()["requests"] == 0
    assert tokens == [plain[STORY.prompt], plain["digits"]]
    shared = [step for step in steps if {r.guided for r in step.requests} == {True, False}]
    assert len(shared) >= 5
    assert any(r.invalid for step in shared for r in step.requests)  # or the grammar refused nothing


def test_preemption_forgets_and_changes_no_text(models: Models, plain: dict[Any, list[int]]) -> None:
    with open_engine(
        models, "dflash2", {"DFLASH_VERIFY_TOKENS": "auto"}, num_gpu_blocks_override=15, max_model_len=128
    ) as engine:
        tokens = engine.play(CROWD)
        preempted = [request for step in engine.steps for request in step.preempted]
        assert engine.scheduler.steering.controller.snapshot()["requests"] == 0
    assert preempted
    assert tokens == [plain[request.prompt] for request in CROWD]


def test_results_are_still_seen_after_the_engine_was_idle(models: Models) -> None:
    # An empty step's output comes back after the next real step was scheduled; it once took that step's record with it,
    # and with it every later one: auto stayed at full width, silently.
    with open_engine(models, "dflash2", {"DFLASH_VERIFY_TOKENS": "auto"}) as engine:
        for _ in range(3):
            before = engine.scheduler.steering.controller._seen
            engine.generate(["Hello world"], 24)
            assert engine.scheduler.steering.controller._seen > before
        assert len(engine.scheduler._steps) <= 2
        steering = engine.scheduler.steering
        assert (1, 7) in steering._warm  # launched steps are known: the first of a batch and width teaches no cost
        assert 0 < steering.controller.cost.observed_steps < len(engine.steps)


def test_the_control_file_switches_a_running_engine(models: Models, tmp_path: Path) -> None:
    control, trace = tmp_path / "control.json", tmp_path / "trace.jsonl"
    environ = {
        "DFLASH_VERIFY_TOKENS": "auto:1,3",
        "DFLASH_CONTROL_FILE": str(control),
        "DFLASH_TRACE_FILE": str(trace),
    }
    with open_engine(models, "dflash2", environ) as engine:
        for setting, width in [(1, 1), ("stock", 7), (3, 3)]:
            control.write_text(json.dumps({"width": setting}))
            engine.scheduler.steering._control._next_look_s = 0.0  # the file is looked at five times a second
            engine.steps.clear()
            engine.generate(["Hello world"], 24)
            assert set(widths_of(engine.steps)[1:]) == {width}
    assert {json.loads(line)["width"] for line in trace.read_text().splitlines()} == {1, 3, 7}


def test_at_width_0_no_draft_is_made_and_time_passes_for_what_is_believed(models: Models, tmp_path: Path) -> None:
    control = tmp_path / "control.json"
    control.write_text('{"width": 0}')
    environ = {"DFLASH_VERIFY_TOKENS": "auto:0,3", "DFLASH_CONTROL_FILE": str(control)}
    with open_engine(models, "dflash2", environ) as engine:
        speculator, steering = engine.model_runner.speculator, engine.scheduler.steering
        estimator = steering.controller._acceptance
        generate, pass_step = speculator._generate_draft, estimator.pass_step
        drafted, passed = [], []
        speculator._generate_draft = lambda *args, **kwargs: (drafted.append(1), generate(*args, **kwargs))[1]
        estimator.pass_step = lambda rows: (passed.append(len(rows)), pass_step(rows))[1]
        finished, plain = steering.finished, []
        steering.finished = lambda step, busy: (
            plain.append(step.batch) if step.uniform and step.width == 0 else None,
            finished(step, busy=busy),
        )
        engine.generate(["Hello world", "abc"], 24)
        assert steering.published == 0
    assert len(drafted) <= 1  # after the first step, which was published at full width
    assert passed == plain
    assert plain.count(2) > 12  # of 24 tokens of two requests


@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
def test_each_step_knows_what_it_publishes_for_the_next(models: Models, asynchronous: bool) -> None:
    """The step times of the two at a change between width 0 and another are no width's, nor is that of a step whose requests
    all get their last token, for which vLLM 0.33 makes no drafts."""
    with open_engine(models, "dflash2", {"DFLASH_VERIFY_TOKENS": "auto:0,3"}, async_scheduling=asynchronous) as engine:
        scheduler, steering = engine.scheduler, engine.scheduler.steering
        widths, steps = itertools.cycle([3, 3, 3, 0, 0, 0, 0]), []
        steering.decide = lambda running: setattr(steering, "published", next(widths)) or steering.published
        step_of = scheduler._step_of

        def watched(output: Any, width: int, now_s: float) -> Any:
            made = step_of(output, width, now_s)
            published = 0 if output.skip_drafts else output.num_spec_tokens_to_schedule
            steps.append((made, published, output.skip_drafts))
            return made

        scheduler._step_of = watched
        for length in range(10, 20):
            engine.generate(["Hello world", "abc"], length)
    assert [made.next_width for made, _, _ in steps] == [published for _, published, _ in steps]
    assert {made.steady for made, _, _ in steps} == {True, False}
    assert any(skipped for _, _, skipped in steps)
    assert not any(made.steady for made, _, skipped in steps if skipped and made.width)


def test_after_plain_decoding_the_drafter_is_as_good_as_if_it_had_never_paused(
    models: Models, plain: dict[Any, list[int]]
) -> None:
    # Without the tokens of width 0 in its context K/V, a drafter's acceptance collapses for the rest of the request.
    def run(paused_until: int) -> dict[int, int]:
        """Tokens emitted by the step that began at each position of the text."""
        with open_engine(models, "dflash2", {"DFLASH_VERIFY_TOKENS": "auto:0"}) as engine:
            steering = engine.scheduler.steering
            steering.forced = steering.published = 0 if paused_until else 7

            def resume(step: Any) -> None:
                if sum(r.emitted for s in engine.steps for r in s.requests) >= paused_until:
                    steering.forced = 7

            steering.on_step = resume
            tokens = engine.generate(["Hello world"], 100)
            assert tokens == [plain["Hello world"]]
            found, position = {}, 0
            for step in engine.steps:
                for r in step.requests:
                    if r.drafts == 7:
                        found[position] = r.emitted
                    position += r.emitted
        return found

    paused, never = run(40), run(0)
    assert min(paused) >= 40
    shared = paused.keys() & never.keys()
    assert len(shared) >= 5  # both runs verify from these positions on
    assert {position: paused[position] for position in shared} == {position: never[position] for position in shared}
