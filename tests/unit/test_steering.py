"""One engine's width, step by step, without vLLM."""

import json
import logging
from pathlib import Path

import numpy as np
import pytest

from dflash_verify.settings import VerifyTokens
from dflash_verify.simulate.generate import SURVIVAL
from dflash_verify.steering import CONTROL_PERIOD_S, Control, ControlError, Steering, Step
from dflash_verify.width.controller import WidthController
from dflash_verify.width.cost import CostTable

WIDTHS = (1, 3, 7)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def steering(text: str, widths: tuple[int, ...] = WIDTHS, **kwargs: object) -> tuple[Steering, Clock]:
    clock = Clock()
    made = Steering(
        VerifyTokens.parse(text),
        7,
        widths,
        lambda: WidthController(widths, 7),
        clock=clock,
        **kwargs,  # type: ignore[arg-type]
    )
    return made, clock


def step(width: int = 3, at: float = 100.0, uniform: bool = True) -> Step:
    return Step(width, at, batch=2, uniform=uniform, decodes=2)


def test_a_static_width_is_published_from_the_first_step_on_and_builds_no_controller() -> None:
    made, _ = steering("3", (3,))
    assert made.published == 3
    assert made.decide(["a", "b"]) == 3
    assert made.controller is None


def test_auto_starts_at_full_width() -> None:
    made, _ = steering("auto")
    assert made.published == 7
    assert made.decide(["a"]) == 7  # no evidence yet


def test_auto_narrows_when_nothing_is_accepted_and_recovers_when_everything_is() -> None:
    made, clock = steering("auto")
    seen = []
    for accepted in [0] * 60 + [7] * 60:
        width = made.published
        made.decide(["a", "b"])
        current = step(width, clock.now)
        clock.now += 0.010 + 0.004 * width
        made.arrived(current)
        for request in ("a", "b"):
            current.observe(request, min(accepted, width), width)
        made.finished(current, busy=True)
        seen.append(width)
    assert seen[59] == 1
    assert seen[-1] == 7


def test_a_step_lasts_from_the_end_of_the_one_before_while_the_engine_is_busy() -> None:
    made, clock = steering("3", (3,))
    first, second, third = step(at=100.0), step(at=100.2), step(at=109.0)
    clock.now = 101.0
    made.arrived(first)
    assert first.step_ms == pytest.approx(1000.0)
    made.finished(first, busy=True)
    clock.now = 101.5
    made.arrived(second)
    assert second.step_ms == pytest.approx(500.0)  # not from its scheduling, which was ahead of time
    made.finished(second, busy=False)
    clock.now = 109.25
    made.arrived(third)
    assert third.step_ms == pytest.approx(250.0)  # eight idle seconds are not the step's


def test_a_step_with_prefill_or_other_widths_has_no_comparable_time() -> None:
    made, clock = steering("3", (3,))
    mixed = step(uniform=False)
    clock.now = 101.0
    made.arrived(mixed)
    assert mixed.step_ms is None


def test_a_step_whose_output_waited_for_the_launch_of_a_prefill_teaches_no_cost() -> None:
    """10 ms steps, some with a prefill launched behind them: those that the launch delayed to 200 ms are left out, those
    that it did not are as good as any other."""
    table = CostTable(7, WIDTHS, {1: (10.0, 10.0, 10.0), 8: (10.0, 10.0, 10.0)})
    made, clock = steering("auto")
    made.controller = controller = WidthController(WIDTHS, 7, table)
    for number in range(40):
        current, behind = step(7, clock.now), step(7, uniform=number % 2 == 0)
        clock.now += 0.2 if number % 4 == 1 else 0.01
        made.arrived(current, following=behind)
        made.finished(current, busy=True)
    assert controller.cost.observed_steps == 30
    assert controller.cost.row(2)[0][2] == pytest.approx(10.0, rel=0.02)


class Engine:
    """Waves of 32 requests on an engine that launches a step before it looks at the output of the one before, as
    asynchronous scheduling does. Steps take what the table says, give or take 1 %; a launch takes 8 ms, 14 more where
    (batch, width) runs for the first time, and 200 for a prefill, whose kernels are launched one by one."""

    table = CostTable(
        7,
        (1, 3, 5, 7),
        {
            1: (9.1, 9.7, 9.9, 10.0),
            8: (12.9, 13.3, 13.5, 14.2),
            16: (14.4, 15.1, 15.5, 15.7),
            32: (16.3, 17.3, 18.7, 20.5),
        },
    )

    def __init__(self, seed: int) -> None:
        self.steering, self.clock = steering("auto", self.table.widths)
        self.steering.controller = WidthController(self.table.widths, 7, self.table)
        self.rng = np.random.default_rng(seed)
        self.ran = {(batch, width) for batch in self.table.cells for width in self.table.widths}
        self.steering._warm |= self.ran  # the measurement at start ran these
        self.gpu_free = self.clock.now

    def wave(self, kind: str, tokens: int) -> None:
        left = {f"{kind}-{self.clock.now}-{i}": tokens for i in range(32)}
        running: list[str] = []
        flight: list[tuple[Step, list[str], float]] = []
        while left or flight:
            if left:
                decoding = [request for request in running if request in left]
                prefill = not running
                running = list(left) if prefill else decoding
                batch, width = len(running), self.steering.published
                current = Step(width, self.clock.now, batch, not prefill, len(decoding))
                self.steering.decide(running)
                self.steering.scheduled(current)
                first = (batch, width) not in self.ran and not prefill
                self.ran.add((batch, width))
                self.clock.now += 0.2 if prefill else 0.022 if first else 0.008
                ms = 0.5 if prefill else self.table.step_ms(batch, width) * (1 + 0.01 * self.rng.standard_normal())
                self.gpu_free = max(self.gpu_free, self.clock.now) + ms / 1e3
                flight.append((current, decoding, self.gpu_free))
            if len(flight) == 2 or not left:
                current, decoding, end = flight.pop(0)
                self.clock.now = max(self.clock.now, end)
                self.steering.arrived(current, flight[0][0] if flight else None)
                drawn = self.rng.random((len(decoding), 1)) < SURVIVAL[kind][: current.width]
                for request, accepted in zip(decoding, drawn.sum(axis=1).tolist(), strict=True):
                    current.observe(request, accepted, current.width)
                    left[request] = left.get(request, 0) - accepted - 1
                    if left[request] <= 0:
                        del left[request]
                        self.steering.ended(request)
                self.steering.finished(current, busy=bool(left or flight))
        self.clock.now += 0.05


@pytest.mark.parametrize("seed", range(6))
def test_slow_launches_do_not_cost_a_right_table_the_trust(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    """Seen on a hybrid model: after waves of 32 requests the measured table was distrusted, and 128 requests of structured
    text were then served at width 5, 6 % slower than at 7."""
    engine = Engine(seed)
    for kind in ("structured", "prose") * 6:
        engine.wave(kind, 300)
    assert engine.steering.controller is not None
    cost = engine.steering.controller.cost
    assert cost.observed_steps > 500
    assert cost.trusted
    assert cost.row(32)[0] == pytest.approx(engine.table.row(32), rel=0.02)
    assert not caplog.records


def test_a_table_that_loses_the_trust_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(0)
    cells = {b: (a, c, e * 1.4, g) for b, (a, c, e, g) in engine.table.cells.items()}
    engine.steering.controller = WidthController((1, 3, 5, 7), 7, CostTable(7, (1, 3, 5, 7), cells))
    for number in range(60):
        width = (5, 7)[number // 5 % 2]
        current = Step(width, engine.clock.now, 32, True, 32)
        engine.clock.now += engine.table.step_ms(32, width) / 1e3
        engine.steering.arrived(current)
        engine.steering.finished(current, busy=True)
    assert not engine.steering.controller.cost.trusted
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert (
        "at about 32 requests width 7 takes 1.40 times what the cost table says, compared with width 5"
        in record.getMessage()
    )
    assert "dflash-verify profile --again" in record.getMessage()


def test_steps_that_start_or_stop_the_drafter_teach_no_cost(caplog: pytest.LogCaptureFixture) -> None:
    """A step at width 0 leaves out the drafter's pass, 6 of 32 ms here: the last one before a wider step runs it all the same, and
    the last wider one does not."""
    target, drafter = {0: 8.0, 1: 9.0, 3: 14.0, 7: 26.0}, 6.0
    row = tuple(ms + drafter * (width > 0) for width, ms in target.items())
    table = CostTable(7, tuple(target), {1: row, 128: row})
    made, clock = steering("auto", table.widths)
    made.controller = controller = WidthController(table.widths, 7, table)
    rng = np.random.default_rng(0)
    running = [str(i) for i in range(128)]
    for kind in ("hard", "structured", "hard"):
        for _ in range(400):
            width = made.published
            made.decide(running)
            current = Step(width, clock.now, 128, True, 128, next_width=made.published)
            if not width:
                current.ids = list(running)
            made.scheduled(current)
            clock.now += (target[width] + drafter * (made.published > 0)) / 1e3
            made.arrived(current)
            for request, accepted in zip(
                running, (rng.random((128, 1)) < SURVIVAL[kind][:width]).sum(axis=1).tolist(), strict=True
            ):
                if width:
                    current.observe(request, accepted, width)
            made.finished(current, busy=True)
        assert max(controller.steps, key=controller.steps.__getitem__) == (0 if kind == "hard" else 7)
        controller.steps = dict.fromkeys(controller.steps, 0)
    assert controller.probes > 5
    assert controller.cost.row(128)[0] == pytest.approx(row, rel=0.02)
    assert not caplog.records


def serve(made: Steering, clock: Clock, launches: str, *, ahead: bool, ms: float = 10.0) -> int:
    """Steps of one width with 2 requests each; p: with a prefill, n: the first of its batch, u: any other. ahead: each is scheduled
    before the output of the one before is looked at. Returns how many taught the cost model."""
    made.controller = controller = WidthController(WIDTHS, 7, CostTable(7, WIDTHS, {1: (ms,) * 3, 99: (ms,) * 3}))
    made._warm.add((2, 7))
    made.arrived(step(7, clock.now - 1.0))
    made.finished(step(7), busy=True)
    steps = []
    for kind in launches:
        batch = 1 if kind == "n" else 2
        steps.append(Step(7, 0.0, batch, uniform=kind != "p", decodes=batch))
    for number, current in enumerate(steps):
        if not ahead or number == 0:
            current.scheduled_s = clock.now
            made.scheduled(current)
        following = steps[number + 1] if ahead and number + 1 < len(steps) else None
        if following is not None:
            following.scheduled_s = clock.now
            made.scheduled(following)
        clock.now += ms / 1e3
        made.arrived(current, following)
        made.finished(current, busy=True)
    return controller.cost.observed_steps


@pytest.mark.parametrize(
    ("launches", "asynchronous", "synchronous"),
    [
        ("uuuu", 4, 4),
        ("uunu", 2, 3),  # the first launch of a graph lengthens the step before it, and shortens its own
        ("upuu", 2, 3),  # what follows a prefill seems shorter
        ("upupupup", 1, 4),
    ],
)
def test_steps_beside_slow_launches_teach_no_cost(launches: str, asynchronous: int, synchronous: int) -> None:
    made, clock = steering("auto")
    assert serve(made, clock, launches, ahead=True) == asynchronous
    made, clock = steering("auto")
    assert serve(made, clock, launches, ahead=False) == synchronous


@pytest.mark.parametrize(
    ("batches", "ms", "taught"),
    [
        ((128, 128, 128, 128), 30.0, 4),
        ((202, 77, 77, 20), 30.0, 2),  # 125 and 57 requests left
        ((128, 127, 125, 120), 30.0, 4),  # up to 0.3 ms of 30
        ((128, 113, 113, 113), 30.0, 3),  # 0.9 ms of 30
        ((8, 7, 6, 4), 7.0, 4),
        ((128, 119, 119, 119), 7.0, 3),  # 0.5 ms of 7
        ((20, 77, 77, 77), 30.0, 4),  # what joins has been a step with a prompt before
    ],
)
def test_a_step_before_which_many_requests_left_teaches_no_cost(
    batches: tuple[int, ...], ms: float, taught: int
) -> None:
    made, clock = steering("auto")
    made.controller = controller = WidthController(WIDTHS, 7, CostTable(7, WIDTHS, {1: (ms,) * 3, 256: (ms,) * 3}))
    made._warm |= {(batch, 7) for batch in batches}
    made.arrived(step(7, clock.now - 1.0))
    made.finished(step(7), busy=True)
    for batch in batches:
        current = Step(7, clock.now, batch, uniform=True, decodes=batch)
        made.scheduled(current)
        clock.now += ms / 1e3
        made.arrived(current)
        made.finished(current, busy=True)
    assert controller.cost.observed_steps == taught


def test_requests_that_left_are_held_against_what_a_step_should_take_not_what_it_took() -> None:
    """Else the short ones of equal steps would be left out, and the long ones learned. At width 0 they hardly matter: 254 requests
    of which 127 left took 7.28 ms where the table said 7.2."""
    for width, table_ms, left, taught in ((7, 9.3, 3, 20), (7, 9.3, 4, 0), (0, 9.3, 100, 20)):
        widths = (0, 3, 7)
        made, clock = steering("auto:0,3", widths)
        table = CostTable(7, widths, {1: (table_ms,) * 3, 256: (table_ms,) * 3})
        made.controller = controller = WidthController(widths, 7, table)
        made._warm |= {(batch, width) for batch in range(256)}
        made.arrived(step(7, clock.now - 1.0))
        made.finished(step(7), busy=True)
        for number in range(20):
            made._last_batch = 100 + left
            current = Step(width, clock.now, 100, uniform=True, decodes=100)
            made.scheduled(current)
            clock.now += (0.0098, 0.0088)[number % 2]
            made.arrived(current)
            made.finished(current, busy=True)
        assert controller.cost.observed_steps == taught


def test_requests_that_left_before_a_step_with_a_prompt_do_not_burden_the_next() -> None:
    made, clock = steering("auto")
    made.controller = controller = WidthController(WIDTHS, 7, CostTable(7, WIDTHS, {1: (30.0,) * 3, 256: (30.0,) * 3}))
    made._warm |= {(batch, 7) for batch in (202, 77)}
    made.arrived(step(7, clock.now - 1.0))
    made.finished(step(7), busy=True)
    for batch, uniform in ((202, True), (77, False), (77, True)):
        current = Step(7, clock.now, batch, uniform=uniform, decodes=batch)
        made.scheduled(current)
        clock.now += 0.03
        made.arrived(current)
        made.finished(current, busy=True)
    assert controller.cost.observed_steps == 2


def test_widths_on_either_side_of_a_prompt_are_not_compared() -> None:
    """Each request at one width, and slower the wider it is: no contradiction, since a prompt and another context are between them."""
    for prompt in (True, False):
        made, clock = steering("auto")
        made.controller = controller = WidthController(
            WIDTHS, 7, CostTable(7, WIDTHS, {1: (20.0,) * 3, 8: (20.0,) * 3})
        )
        made._warm |= {(2, width) for width in WIDTHS}
        made.arrived(step(7, clock.now - 1.0))
        made.finished(step(7), busy=True)
        for request in range(12):
            width = (3, 7)[request % 2]
            for number in range(20):
                current = step(width, clock.now, uniform=not prompt or number > 0)
                made.scheduled(current)
                clock.now += 0.02 if width == 3 else 0.03
                made.arrived(current)
                made.finished(current, busy=True)
        assert controller.cost.trusted == prompt


def test_a_server_with_some_clean_steps_learns_from_these_alone() -> None:
    made, clock = steering("auto")
    made.arrived(step(7, clock.now - 1.0))
    assert made.controller is not None
    for number in range(400):
        clean = number % 4 == 0
        current = step(7, clock.now - 0.01)
        clock.now += 0.02 if clean else 0.1
        made.arrived(current, step(7, uniform=clean))
        made.finished(current, busy=True)
    assert made.controller.cost.observed_steps == 100
    assert made.controller.cost.row(2)[0][2] == pytest.approx(20.0, rel=0.02)


def test_a_server_that_always_prefills_learns_from_what_there_is() -> None:
    """Every second step has a prefill, so none is ever clean: a right table needs none, but without one no width would be known."""
    for table, fewest, most in ((None, 60, 70), ("trusted", 0, 1)):
        made, clock = steering("auto")
        if table is not None:
            made.controller = WidthController(WIDTHS, 7, CostTable(7, WIDTHS, {1: (10.0,) * 3, 8: (10.0,) * 3}))
        made.arrived(step(7, clock.now - 1.0))
        assert made.controller is not None
        for number in range(200):
            current, behind = step(7, clock.now - 0.01, number % 2 == 1), step(7, uniform=number % 2 == 0)
            clock.now += 0.02
            made.arrived(current, behind)
            made.finished(current, busy=True)
        assert fewest <= made.controller.cost.observed_steps <= most


def test_an_ended_request_leaves_no_state_even_if_its_last_result_comes_later() -> None:
    made, _ = steering("auto")
    made.decide(["a", "b"])
    last = step(7)
    made.ended("a")
    last.observe("a", 3, 7)
    last.observe("b", 3, 7)
    made.finished(last, busy=True)
    assert made.controller is not None
    assert made.controller.snapshot()["requests"] == 1


@pytest.fixture
def control_file(tmp_path: Path) -> Path:
    return tmp_path / "control.json"


def test_the_control_file_switches_between_steps_and_back(control_file: Path) -> None:
    made, clock = steering("auto", control_file=control_file)
    assert made.policy_active
    for text, expected in [('{"width": 3}', 3), ('{"width": "stock"}', 7), ('{"width": 1}', 1)]:
        control_file.write_text(text)
        clock.now += 2 * CONTROL_PERIOD_S
        assert made.decide(["a"]) == expected
        assert not made.policy_active
    control_file.unlink()
    clock.now += 2 * CONTROL_PERIOD_S
    made.decide(["a"])
    assert made.policy_active


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not JSON"),
        ('{"width": 3', "not JSON"),
        ("[]", "expected one key"),
        ("3", "expected one key"),
        ('{"width": 3, "conc": "model"}', "expected one key"),
        ('{"width": 2}', "captured are 1, 3, 7"),
        ('{"width": true}', "captured are 1, 3, 7"),
        ('{"width": 3.0}', "captured are 1, 3, 7"),
        ('{"width": null}', "captured are 1, 3, 7"),
        ("\xff\xfe", "ignored"),
    ],
)
def test_garbage_in_the_control_file_is_refused_loudly_and_changes_nothing(
    control_file: Path, caplog: pytest.LogCaptureFixture, text: str, said: str
) -> None:
    made, clock = steering("auto", control_file=control_file)
    control_file.write_text('{"width": 3}')
    clock.now += 2 * CONTROL_PERIOD_S
    assert made.decide(["a"]) == 3
    control_file.write_bytes(text.encode("latin-1"))
    for _ in range(3):
        clock.now += 2 * CONTROL_PERIOD_S
        assert made.decide(["a"]) == 3
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1  # said once, not per step
    assert said in errors[0].getMessage()


def test_a_static_server_refuses_what_it_has_no_graphs_for(control_file: Path) -> None:
    control = Control(control_file, 7, (3,), logging.getLogger("test"))
    with pytest.raises(ControlError, match="'stock' has no graphs here; captured are 3"):
        control._parse('{"width": "stock"}')


def test_the_trace_has_one_json_line_per_step(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    made, _ = steering("3", (3,), trace_file=path)
    for _ in range(3):
        made.finished(step(), busy=True)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["width"] for record in records] == [3, 3, 3]
    assert not any(record["taught"] for record in records), "a fixed width learns nothing"


def test_the_trace_says_which_steps_taught_the_cost_model(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    made, clock = steering("auto", trace_file=path)
    for uniform in (True, True, False, True):
        current = step(7, clock.now, uniform)
        made.scheduled(current)
        clock.now += 0.01
        made.arrived(current)
        made.finished(current, busy=True)
    taught = [json.loads(line)["taught"] for line in path.read_text().splitlines()]
    assert taught == [False, True, False, True], "the first has a cold graph, the third a prompt"
