"""The width decision: what it may choose, what it must not forget, and how fast it follows the text."""

import random
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_verify.simulate.generate import COSTS, SURVIVAL
from dflash_verify.width.controller import WidthController
from dflash_verify.width.cost import CostModel, CostTable, CostTableError

N = 7
WIDTHS = (1, 3, 5, 7)
# Width 3 pays on prose (2.74 tokens), 7 on what accepts everything (8).
TABLE = CostTable(N, WIDTHS, {1: (80.0, 92.0, 115.0, 130.0), 8: (120.0, 150.0, 230.0, 300.0)})
PROSE = np.array(SURVIVAL["prose"])
COPY = np.ones(N)


def draw(rng, survival, count):
    return (rng.random((count, 1)) < survival).sum(axis=1).tolist()


def serve(controller, ids, steps, survival, rng, *, delay=1, width=N, pending=None):
    """Widths of `steps` steps; observations come back `delay` steps later."""
    pending = [] if pending is None else pending
    used = []
    for _ in range(steps):
        while len(pending) >= delay:
            controller.observe(*pending.pop(0))
        decided = controller.decide(ids).width
        accepted = [min(a, width) for a in draw(rng, survival, len(ids))]
        pending.append((ids, width, accepted))
        used.append(width)
        width = decided
    return used


def test_the_first_decisions_are_full_width():
    controller = WidthController(WIDTHS, N, TABLE)
    assert controller.decide(["a"]).width == N
    for step in range(controller.WARM_UP - 1):
        controller.observe(["a"], N, [0])
        decision = controller.decide(["a"])
        assert decision.width == N, step
        assert "full width" in decision.reason
    controller.observe(["a"], N, [0])
    assert controller.decide(["a"]).width < N


def test_without_a_cost_table_no_width_is_chosen_before_it_was_timed():
    """Rejections alone must not narrow: a narrower width may be tried, as a probe, and becomes the choice once timed."""
    controller = WidthController(WIDTHS, N, None)
    rng = np.random.default_rng(1)
    timed = set()
    for _ in range(200):
        decision = controller.decide(["a"])
        if decision.width != N and decision.width not in timed:
            assert decision.probe
        controller.observe(["a"], decision.width, [min(decision.width, a) for a in draw(rng, PROSE, 1)])
        controller.observe_step(1, decision.width, TABLE.step_ms(1, decision.width))
        timed.add(decision.width)
    assert controller.decide(["a"]).best[0] == 3
    silent = WidthController(WIDTHS, N, None)
    for _ in range(200):  # no step time ever comes back
        silent.observe(["a"], N, [0])
        decision = silent.decide(["a"])
        assert decision.width == N or decision.probe


def test_prose_is_served_narrow_and_code_wide():
    rng = np.random.default_rng(2)
    controller = WidthController(WIDTHS, N, TABLE)
    prose = serve(controller, ["a"], 200, PROSE, rng)
    assert statistics.median(prose[50:]) == 3
    code = serve(controller, ["a"], 100, COPY, rng)
    assert set(code[30:]) == {N}


def test_the_reason_names_both_widths_their_tokens_and_times():
    controller = WidthController((3,), N, CostTable(N, (3, 7), {1: (98.4, 121.0)}))
    serve(controller, ["a"], 100, PROSE, np.random.default_rng(3))
    decision = controller.decide(["a"])
    while decision.probe:
        decision = controller.decide(["a"])
    assert decision.width == 3
    tokens = f"{decision.expected_tokens:.2f}"
    assert decision.reason.startswith(f"3: {tokens} tok / 98.4 ms beats 7: ")
    assert decision.reason.endswith(" / 121.0")
    assert decision.step_ms == 98.4


def test_nothing_running_keeps_the_width_and_teaches_nothing():
    controller = WidthController(WIDTHS, N, TABLE)
    assert controller.decide([]).width == N
    controller.observe([], 3, [])
    assert controller.decide([]).expected_tokens == 0.0
    assert controller.snapshot()["requests"] == 0


def test_the_draft_width_is_always_among_the_widths():
    assert WidthController((1, 3), N, CostTable(N, (1, 3, 7), {1: (1.0, 2.0, 3.0)})).widths == (1, 3, 7)
    only = WidthController((), N, None)
    for _ in range(40):
        only.observe(["a"], N, [0])
        only.observe_step(1, N, 20.0)
        assert only.decide(["a"]).width == N


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="estimator 'ema'"):
        WidthController(WIDTHS, N, TABLE, estimator="ema")
    with pytest.raises(CostTableError, match="width 4"):
        WidthController((4,), N, TABLE)
    with pytest.raises(CostTableError, match="draft width 7"):
        WidthController((9,), N, None)
    with pytest.raises(ValueError, match="widths"):
        WidthController((1,), N, CostModel(WIDTHS, N, TABLE))


def test_one_request_that_accepts_nothing_does_not_narrow_a_batch_that_accepts_all():
    """The batch is weighed as a whole, not by its minimum."""
    controller = WidthController(WIDTHS, N, CostTable(N, WIDTHS, {8: (160.0, 210.0, 245.0, 265.0)}))
    ids = [f"r{i}" for i in range(8)]
    for _ in range(60):
        width = controller.decide(ids).width
        controller.observe(ids, width, [width] * 7 + [0])
    assert controller.decide(ids).width == N


def test_what_a_grammar_rejects_does_not_narrow_the_batch():
    """A guided request whose grammar leaves two valid drafts, both accepted, is not a request that accepts two."""
    shown, rejected = WidthController(WIDTHS, N, TABLE), WidthController(WIDTHS, N, TABLE)
    ids = ["free", "guided"]
    for _ in range(60):
        shown.decide(ids)
        shown.observe(ids, N, [7, 2], drafted=[7, 2])
        rejected.decide(ids)
        rejected.observe(ids, N, [7, 2])
    assert shown.decide(ids).expected_tokens > rejected.decide(ids).expected_tokens + 2.0


def test_width_zero_is_priced_probed_and_left_again():
    """Where plain decoding pays it is used; since it shows nothing, wider is tried at least every 64 steps, and text that
    accepts everything is found again."""
    table = CostTable(N, (0, 1, 7), {1: (10.0, 19.0, 40.0)})
    controller = WidthController((0, 1), N, table)
    rng = np.random.default_rng(4)
    hard = np.array(SURVIVAL["hard"]) * 0.5
    widths = serve(controller, ["a"], 400, hard, rng)
    assert widths[100:].count(0) > 200
    gaps, last = [], 100
    for at in range(100, 400):
        if widths[at] > 0:
            gaps.append(at - last)
            last = at
    assert max(gaps) <= controller.BLIND_STEPS + 1
    back = serve(controller, ["a"], 1500, COPY, rng)
    assert set(back[-50:]) == {N}


def test_from_width_zero_the_best_of_the_others_is_tried():
    """Width 1 shows one draft in 64 steps: on its word, 192 requests of prose stayed at width 0, 5 % slower than at 3."""
    table = CostTable(N, (0, 1, 3, 7), {1: (10.0, 36.0, 40.0, 70.0)})
    controller = WidthController((0, 1, 3), N, table)
    rng = np.random.default_rng(4)
    widths = serve(controller, ["a"], 1200, np.array(SURVIVAL["prose"]), rng)[400:]
    assert widths.count(0) > 700
    assert {width for width in widths if width} == {3}


def plain_decoding_pays() -> tuple[WidthController, np.random.Generator]:
    """A controller that serves 8 requests of prose at width 0."""
    controller = WidthController((0, 1, 3), N, CostTable(N, (0, 1, 3, 7), {8: (10.0, 30.0, 40.0, 52.0)}))
    rng = np.random.default_rng(4)
    widths = serve(controller, [f"first-{i}" for i in range(8)], 100, PROSE * 0.7, rng, delay=2)
    assert widths[-60:].count(0) >= 57
    controller.forget([f"first-{i}" for i in range(8)])
    return controller, rng


def test_a_batch_of_new_requests_is_looked_at_from_width_zero_at_once():
    """Waves of 128 requests on an H200: structured text after prose stayed at width 0 for 64 of the 120 steps that it needs there,
    and needs 17 at width 7."""
    controller, rng = plain_decoding_pays()
    widths = serve(controller, [f"second-{i}" for i in range(8)], 20, COPY, rng, delay=2, width=0)
    assert widths.index(N) <= 5, widths
    assert set(widths[8:]) == {N}


def waves(controller: WidthController, rng: np.random.Generator, text: np.ndarray, count: int, name: str) -> list[int]:
    """Eight new requests every 4 steps, from width 0."""
    widths: list[int] = []
    pending: list[tuple[list[str], int, list[int]]] = []
    for wave in range(count):
        ids = [f"{name}-{wave}-{i}" for i in range(8)]
        widths += serve(controller, ids, 4, text, rng, delay=2, width=widths[-1] if widths else 0, pending=pending)
        controller.forget(ids)
    return widths


def test_new_requests_are_looked_at_less_often_while_that_changes_nothing():
    """A look costs three steps here: every 16 steps it took 5 % from 256 short requests."""
    controller, rng = plain_decoding_pays()
    looks = [at for at, width in enumerate(waves(controller, rng, PROSE * 0.7, 100, "a")) if width]
    assert np.diff(looks)[:3].tolist() == [32, 64, 64]
    changed = waves(controller, rng, COPY, 40, "b")
    assert changed.index(N) <= 64 + 5
    back = waves(controller, rng, PROSE * 0.7, 60, "c")
    assert back[10:].count(0) > 220
    looks = [at for at, width in enumerate(back) if width]
    assert 32 in np.diff(looks), "after a look that changed something, the next ones come early again"


@pytest.mark.parametrize(("new", "looked"), [(3, False), (4, True)])
def test_new_requests_are_looked_at_once_they_are_half_of_the_batch(new, looked):
    controller, rng = plain_decoding_pays()
    old = [f"old-{i}" for i in range(8)]
    serve(controller, old, 40, PROSE * 0.7, rng, delay=2, width=0)
    controller._blind = controller._since = 0
    ids = [*old[new:], *(f"new-{i}" for i in range(new))]
    controller.forget(old[:new])
    widths = serve(controller, ids, 15, PROSE * 0.7, rng, delay=2, width=0)
    assert any(widths) == looked
    assert controller._unseen == (set() if looked else set(ids[-new:]))
    controller.forget(ids)
    assert not controller._unseen


def test_a_new_request_is_unseen_wherever_it_stands_in_the_batch():
    controller = WidthController((0, 3), N, CostTable(N, (0, 3, 7), {8: (10.0, 40.0, 52.0)}))
    controller.decide(["a", "b"])
    controller.observe(["a", "b"], 7, [1, 1])
    controller.decide(["c", "b"])  # a was preempted, say, and c took its place
    assert controller._unseen == {"c"}


def test_without_a_width_zero_nobody_asks_who_was_seen():
    controller = WidthController(WIDTHS, N, TABLE)
    controller.decide(["a", "b"])
    assert not controller._unseen


def test_probes_look_one_width_up_and_cost_at_most_their_budget():
    rng = np.random.default_rng(5)
    controller = WidthController(WIDTHS, N, TABLE)
    lost = total = 0.0
    last = None
    pending = []
    for step in range(4000):
        decision = controller.decide(["a"])
        width = decision.width
        if decision.why == "probe":
            assert WIDTHS.index(width) == WIDTHS.index(decision.best[0]) + 1
            assert last is None or step - last >= controller.PROBE_EVERY
            last = step
            rate = decision.best[1] / decision.best[2]
            lost += max(0.0, decision.step_ms - decision.expected_tokens / rate)
        total += decision.step_ms
        controller.observe(["a"], width, [min(a, width) for a in draw(rng, PROSE, 1)])
    assert not pending
    assert controller.probes > 20
    assert lost <= controller.PROBE_SHARE * total + controller.PROBE_CAP_STEPS * TABLE.step_ms(1, N)


# -- requests come and go ----------------------------------------------------------------------------------------------


def test_a_request_observed_after_it_was_forgotten_leaves_no_state():
    controller = WidthController(WIDTHS, N, TABLE)
    controller.decide(["a", "b"])
    controller.observe(["a", "b"], N, [0, 0])
    controller.forget(["a"])
    before = controller.snapshot()["survival"][0]
    for _ in range(5):
        controller.observe(["a"], N, [0])
    assert controller.snapshot()["requests"] == 1
    assert controller.snapshot()["survival"][0] < before


def test_a_resumed_request_starts_from_the_prior():
    controller = WidthController(WIDTHS, N, TABLE)
    for _ in range(30):
        controller.decide(["a", "b"])
        controller.observe(["a", "b"], N, [0, 7])
    low = controller.decide(["a"]).expected_tokens
    controller.forget(["a"])
    controller.forget(["a"])
    assert controller.decide(["a"]).expected_tokens > low + 0.3


def test_new_requests_start_informed():
    """After prose was served, a new request's first decision is narrow: nothing is forced to full width."""
    rng = np.random.default_rng(6)
    controller = WidthController(WIDTHS, N, TABLE)
    for i in range(10):
        serve(controller, [f"r{i}"], 60, PROSE, rng)
        controller.forget([f"r{i}"])
    decision = controller.decide(["new"])
    assert decision.best[0] in {3, 5}


def test_requests_the_caller_never_forgets_are_dropped():
    controller = WidthController(WIDTHS, N, TABLE)
    for i in range(5000):
        controller.decide([f"r{i}"])
        controller.observe([f"r{i}"], N, [1])
    assert controller.snapshot()["requests"] <= controller.KEEP_REQUESTS + 1
    assert controller._top <= controller.KEEP_REQUESTS + 2


steps = st.lists(
    st.tuples(st.lists(st.integers(0, 11), min_size=1, max_size=8, unique=True), st.integers(0, N), st.booleans()),
    min_size=1,
    max_size=30,
)


@settings(max_examples=60, deadline=None)
@given(steps, st.integers(0, 2**32 - 1), st.sampled_from([(1, 3, 5), (0, 2), ()]), st.sampled_from(["class", "hazard"]))
def test_the_width_is_always_a_captured_one(script, seed, widths, estimator):
    """Whatever is observed, late, of ended requests, at other widths, with or without times."""
    rng = random.Random(seed)
    controller = WidthController(widths, N, None, estimator=estimator)
    for batch, valid, ends in script:
        ids = [f"r{i}" for i in batch]
        decision = controller.decide(ids)
        assert decision.width in {*widths, N}
        assert 0.0 < decision.expected_tokens <= len(ids) * (decision.width + 1) + 1e-9
        assert decision.reason
        if ends:
            controller.forget(ids[:1])
        accepted = [rng.randint(0, decision.width) for _ in ids]
        drafted = [min(valid, decision.width)] * len(ids) if rng.random() < 0.5 else None
        controller.observe(ids, decision.width, accepted, drafted)
        if rng.random() < 0.5:
            controller.observe_step(len(ids), decision.width, rng.uniform(1.0, 100.0))
    assert set(controller.steps) == {*widths, N}
    assert sum(controller.steps.values()) == len(script)


@pytest.mark.parametrize("estimator", ["class", "hazard"])
@pytest.mark.parametrize("cost", ["measured", "none"])
def test_permuting_requests_changes_nothing(estimator, cost):
    """The same steps with the batch in another order every time: the same widths. Sums in another order differ by 1e-15,
    so two widths would have to tie to that precision for a flip."""
    chosen = []
    for shuffled in (False, True):
        order, rng = random.Random(7), np.random.default_rng(7)
        controller = WidthController(WIDTHS, N, TABLE if cost == "measured" else None, estimator=estimator)
        widths = []
        for step in range(250):
            ids = [f"r{i}" for i in range(step // 50, 8 + step // 50)]
            curves = [COPY if i % 4 == 0 else PROSE for i in range(8)]
            draws = {name: int((rng.random() < curve).sum()) for name, curve in zip(ids, curves, strict=True)}
            if shuffled:
                order.shuffle(ids)
            width = controller.decide(ids).width
            if shuffled:
                order.shuffle(ids)
            controller.observe(ids, width, [min(draws[name], width) for name in ids])
            controller.observe_step(8, width, TABLE.step_ms(8, width) * (1.0 + 0.01 * (step % 5)))
            widths.append(width)
            if step % 50 == 49:
                controller.forget([f"r{step // 50}"])
        chosen.append(widths)
    assert chosen[0] == chosen[1]
    assert len(set(chosen[0])) > 1


@pytest.mark.full
def test_state_stays_bounded_over_a_million_steps_and_a_hundred_thousand_requests():
    """Batches of 1 to 16 that turn over all the time; one request in ten is never forgotten by the caller."""
    rng = np.random.default_rng(8)
    controller = WidthController(WIDTHS, N, None)
    draws = draw(rng, PROSE, 100_000)
    ids, born, sizes = [], 0, set()
    for step in range(1_000_000):
        if step % 10 == 0:
            ids = [*ids, f"r{born}"]
            born += 1
            if len(ids) > 1 + (step // 5000) % 16:
                gone = ids[0]
                ids = ids[1:]
                if born % 10:
                    controller.forget([gone])
            while len(ids) > 1 + (step // 5000) % 16:
                controller.forget(ids[:1])
                ids = ids[1:]
        width = controller.decide(ids).width
        at = step % 99_000
        controller.observe(ids, width, [min(a, width) for a in draws[at : at + len(ids)]])
        controller.observe_step(len(ids), width, TABLE.step_ms(len(ids), width))
        if step % 100_000 == 99_999:
            acceptance, cost = controller._acceptance, controller.cost
            sizes.add(
                (
                    len(acceptance._posterior) <= 4 * controller.KEEP_REQUESTS,
                    len(controller._rows) <= controller.KEEP_REQUESTS + 20,
                    len(cost._mean) <= 16 * len(WIDTHS),
                    len(cost._cache) <= 16,
                    len(acceptance._averages) + len(controller._ones) <= 64,
                    len(acceptance._shape_steps) <= acceptance.REBUILD_LATE,
                )
            )
    assert born >= 100_000
    assert sizes == {(True,) * 6}


# -- recovery ----------------------------------------------------------------------------------------------------------


def recovery(cost, batch, to, seed, delay):
    """Steps after prose turned into `to` until the best width is used and stays for the rest of 60 steps."""
    rng = np.random.default_rng(seed)
    table = COSTS[cost]
    controller = WidthController(table.widths, N, table)
    ids = [f"r{i}" for i in range(batch)]
    pending = []
    before = serve(controller, ids, 150, PROSE, rng, delay=delay, pending=pending)
    survival = np.array(SURVIVAL[to])
    goodput = [(1 + survival[:k].sum()) / ms for k, ms in zip(table.widths, table.row(batch), strict=True)]
    best = table.widths[int(np.argmax(goodput))]
    assert best == N
    after = serve(controller, ids, 60, survival, rng, delay=delay, width=before[-1], pending=pending)
    wrong = [step for step, width in enumerate(after) if width != best]
    return (wrong[-1] + 1 if wrong else 0) + 1


@pytest.mark.parametrize("delay", [1, 2])
@pytest.mark.parametrize(
    ("cost", "batch", "to"),
    [
        ("spark", 4, "copy"),
        ("spark", 4, "structured"),
        ("h200-dense", 32, "copy"),
        ("h200-dense", 32, "structured"),
        ("padding-jump", 8, "copy"),
    ],
)
def test_code_after_prose_is_served_at_full_width_within_10_steps(cost, batch, to, delay):
    assert statistics.median(recovery(cost, batch, to, seed, delay) for seed in range(20)) <= 10


@pytest.mark.parametrize("delay", [1, 2])
@pytest.mark.parametrize("cost", ["spark", "spark-quantised"])
@pytest.mark.parametrize("to", ["copy", "structured"])
def test_code_after_prose_is_served_at_full_width_within_25_steps_at_batch_1(cost, to, delay):
    assert statistics.median(recovery(cost, 1, to, seed, delay) for seed in range(20)) <= 25
