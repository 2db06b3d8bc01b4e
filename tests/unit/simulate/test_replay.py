"""The replay: whose tokens count, what time passes, and what a policy may see when."""

import numpy as np
import pytest

from dflash_verify.simulate import generate
from dflash_verify.simulate.compare import compare, static_tok_s
from dflash_verify.simulate.policies import Auto, EmaMin, Oracle, Static
from dflash_verify.simulate.replay import StepNoise, replay
from dflash_verify.simulate.trace import Request, Trace, TraceError
from dflash_verify.width.controller import WidthController
from dflash_verify.width.cost import CostTable

COST = CostTable(7, (1, 3, 7), {1: (10.0, 12.0, 20.0), 2: (11.0, 14.0, 30.0)})


def request(name, tokens, accepts, arrive_ms=0.0, guided=False):
    return Request(name, arrive_ms, tokens, guided, np.array(accepts, dtype=np.intp))


def trace(*requests, max_num_seqs=2):
    return Trace(7, max_num_seqs, requests)


class Recorder:
    """Plays the widths it is given and writes down what it saw, in order."""

    ahead = True

    def __init__(self, widths):
        self.widths, self.seen, self.step = list(widths), [], 0

    def decide(self, request_ids, guided, accepts):
        self.step += 1
        self.seen.append(("decide", self.step, tuple(request_ids)))
        return self.widths.pop(0)

    def observe(self, request_ids, width, accepted, step_ms):
        self.seen.append(("observe", tuple(request_ids), width, tuple(accepted), step_ms))

    def forget(self, request_ids):
        self.seen.append(("forget", tuple(request_ids)))


def test_a_request_by_hand():
    """Width 3: 0 + 1, 3 + 1, 2 + 1 tokens are 8, of which 6 were wanted; three steps of 12 ms."""
    result = replay(trace(request("a", 6, [0, 7, 2, 7])), COST, Static(3))
    assert (result.tokens, result.ms, result.widths) == (6, 36.0, [3, 3, 3])
    assert result.tok_s == pytest.approx(6 / 0.036)
    assert result.request_tok_s == {"a": pytest.approx(6 / 0.036)}


def test_requests_wait_for_a_slot_and_for_their_arrival():
    """b waits for the slot of a; then the server idles until c arrives at 100 ms."""
    work = trace(request("a", 1, [0]), request("b", 2, [0, 0]), request("c", 1, [0], arrive_ms=100.0), max_num_seqs=1)
    result = replay(work, COST, Static(1))
    assert result.batches == [1, 1, 1, 1]
    assert result.starts_ms == [0.0, 10.0, 20.0, 100.0]
    assert (result.ms, result.idle_ms) == (110.0, 70.0)


def test_step_time_is_that_of_the_running_batch():
    work = trace(request("a", 1, [0]), request("b", 2, [0, 0]))
    assert replay(work, COST, Static(7)).ms == 30.0 + 20.0


def test_a_width_decided_at_one_step_serves_the_next_and_the_first_is_full():
    recorder = Recorder([1, 3, 1, 1])
    result = replay(trace(request("a", 12, [7, 7, 7, 7])), COST, recorder)
    assert result.widths == [7, 1, 3]


@pytest.mark.parametrize("delay", [1, 2])
def test_a_policy_sees_only_what_was_verified_delay_steps_ago(delay):
    recorder = Recorder([1] * 8)
    replay(trace(request("a", 16, [7, 5, 0, 7, 7, 7, 7])), COST, recorder, delay=delay)
    kinds = [event[0] for event in recorder.seen]
    assert kinds[: delay + 2] == ["decide"] * delay + ["observe", "decide"]
    observed = [event for event in recorder.seen if event[0] == "observe"]
    assert observed[0][1:] == (("a",), 7, (7,), 20.0)
    assert observed[1][1:] == (("a",), 1, (1,), 10.0)
    assert observed[2][1:] == (("a",), 1, (0,), 10.0)


def test_with_delay_2_the_last_step_of_a_request_is_seen_after_it_was_forgotten():
    recorder = Recorder([7] * 8)
    replay(trace(request("a", 8, [7]), request("b", 24, [7, 7, 7])), COST, recorder, delay=2)
    forgot = recorder.seen.index(("forget", ("a",)))
    observed = next(i for i, e in enumerate(recorder.seen) if e[0] == "observe" and "a" in e[1])
    assert forgot < observed


def test_an_acceptance_list_that_runs_out_names_the_request():
    with pytest.raises(TraceError, match="'b' has 2 accepts"):
        replay(trace(request("a", 4, [7]), request("b", 4, [0, 0])), COST, Static(3))
    with pytest.raises(TraceError, match="'b' has 2 accepts"):
        static_tok_s(trace(request("a", 4, [7]), request("b", 4, [0, 0])), COST, 3)


def test_noise_changes_what_is_seen_and_not_the_clock():
    work = trace(request("a", 20, [0] * 20))
    runs = []
    for seed in (1, 1, 2):
        recorder = Recorder([7] * 20)
        result = replay(work, COST, recorder, noise=StepNoise(10.0, seed=seed))
        assert result.ms == 20 * 20.0
        runs.append([event[4] for event in recorder.seen if event[0] == "observe"])
    assert runs[0] == runs[1] != runs[2]
    assert 0.02 < np.std(np.log(np.array(runs[0]) / 20.0)) < 0.3


def test_the_oracle_beats_every_static_width_step_by_step():
    """Greedy per step; on a single request that cannot lose to any fixed width by more than its last step."""
    rng = np.random.default_rng(1)
    work = trace(request("a", 400, rng.integers(0, 8, 400)), max_num_seqs=1)
    best = max(replay(work, COST, Static(width)).tok_s for width in COST.widths)
    assert replay(work, COST, Oracle(COST)).tok_s > best


def test_ema_min_follows_its_description():
    policy = EmaMin((1, 3, 5, 7), 7)
    ids, free = ["a", "b"], [False, False]
    for step in range(8):
        assert policy.decide(ids, free, []) == (7 if step < 4 else 5), step
        policy.observe(ids, 7, [7, 3], 1.0)
    # b: 7 -> 3 + 4 * 0.75^8 = 3.40, ceil(4.40) = 5. A guided or new request holds the batch at N.
    assert policy.decide(ids, [False, True], []) == 7
    assert policy.decide(["a", "b", "c"], [False] * 3, []) == 7
    policy.forget(["b", "c"])
    assert policy.decide(["a"], [False], []) == 7
    for _ in range(20):
        policy.observe(["a"], 1, [0], 1.0)
    assert policy.decide(["a"], [False], []) == 1
    policy.observe(["a"], 1, [1], 1.0)  # all that was verified counts as N: 0.02 * 0.75 + 7 / 4 = 1.77, ceil(2.77) = 3
    assert policy.decide(["a"], [False], []) == 3


@pytest.mark.parametrize("profile", ["prose", "staggered", "drift"])
@pytest.mark.parametrize("setting", [("spark", 4), ("h200-dense", 32)])
def test_the_shortcut_for_static_widths_is_the_replay(setting, profile):
    cost = generate.COSTS[setting[0]]
    work = generate.trace(profile, setting[1], steps=100, seed=1, cost=cost)
    for width in cost.widths:
        assert static_tok_s(work, cost, width) == pytest.approx(replay(work, cost, Static(width)).tok_s, rel=1e-9)


@pytest.mark.parametrize("profile", sorted(generate.PROFILES))
def test_generated_workloads_repeat_by_seed_and_last_for_every_width(profile):
    cost = generate.COSTS["spark"]
    one, same, other = (generate.trace(profile, 4, steps=100, seed=seed, cost=cost) for seed in (1, 1, 2))
    assert one.to_json() == same.to_json() != other.to_json()
    assert Trace.from_json(one.to_json()).to_json() == one.to_json()
    assert len(replay(one, cost, Static(7)).widths) >= 100
    for accepted in (np.concatenate([r.accepts for r in one.requests]),):
        assert accepted.min() >= 0
        assert accepted.max() <= 7
    assert all(len(r.accepts) >= r.tokens for r in one.requests)


@pytest.mark.parametrize("name", sorted(generate.SURVIVAL))
def test_generated_acceptance_has_the_survival_it_was_drawn_from(name):
    """20 000 draws: five standard errors of a share are 5 * sqrt(0.25 / 20 000) = 0.018."""
    work = generate.trace(name, 1, steps=4000, seed=3)
    accepts = np.concatenate([r.accepts for r in work.requests])[:20_000]
    survival = [(accepts >= i).mean() for i in range(1, 8)]
    assert survival == pytest.approx(generate.SURVIVAL[name], abs=5 * (0.25 / len(accepts)) ** 0.5)


def test_a_wrong_table_is_off_by_its_error_and_not_all_alike():
    for seed in range(10):
        wrong, right = generate.wrong_table(COST, seed), COST
        off = np.array(wrong.row(1)) / np.array(right.row(1))
        assert np.abs(off - 1.0) == pytest.approx(np.full(3, 0.3))
        assert len(set(np.round(off, 6))) == 2
        assert np.array(wrong.row(2)) / np.array(right.row(2)) == pytest.approx(off)


def test_auto_is_the_class_that_serves():
    run = compare("spark", 1, "prose", 0, steps=50)
    assert isinstance(Auto(WidthController((1, 7), 7)).controller, WidthController)
    assert run.auto["class"] > 0
    assert run.steps >= 50
