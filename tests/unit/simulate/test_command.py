"""`dflash-verify simulate`: the interface that stays, and one sentence for every bad input."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from dflash_verify.simulate.command import simulate

SCENARIOS = Path(__file__).parents[2] / "data" / "scenarios"
NAME = "spark_b1_structured"
COST = {"draft_width": 7, "widths": [1, 7], "step_ms": {"1": {"1": 10.0, "7": 20.0}}}
REQUEST = {"id": "a", "arrive_ms": 0, "tokens": 4, "guided": False, "accepts": [7, 7, 7, 7]}
TRACE = {"draft_width": 7, "max_num_seqs": 1, "requests": [REQUEST]}


def run(*arguments, cost=None, trace=None):
    return CliRunner().invoke(
        simulate,
        [
            "--cost",
            str(cost or SCENARIOS / f"{NAME}.cost.json"),
            "--trace",
            str(trace or SCENARIOS / f"{NAME}.trace.json"),
            *arguments,
        ],
    )


def write(path, data):
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def test_json_has_tokens_time_rate_steps_per_width_and_rate_per_request():
    result = run("--policy", "static:7", "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.output)
    reference = json.loads((SCENARIOS / "reference.json").read_text())[NAME]
    assert data["tokens"] == reference["tokens"]
    assert data["tok_s"] == pytest.approx(reference["static"]["7"], rel=1e-5)
    assert data["tok_s"] == pytest.approx(1000.0 * data["tokens"] / data["ms"], rel=1e-4)
    assert data["steps"] == {"1": 0, "2": 0, "3": 0, "4": 0, "5": 0, "7": sum(data["steps"].values())}
    assert set(data["requests"]) == {"r0", "r1", "r2"}


def test_auto_is_the_default_and_its_text_shows_where_it_went():
    result = run()
    assert result.exit_code == 0
    assert result.output.startswith("auto: ")
    assert "width 7: 419 steps (100.0 %)" in result.output


def test_widths_restrict_every_policy():
    for policy in ("auto", "ema-min", "oracle"):
        result = run("--policy", policy, "--widths", "1,3,7", "--json")
        assert set(json.loads(result.output)["steps"]) == {"1", "3", "7"}


def test_the_same_seed_repeats_and_another_one_differs(tmp_path):
    name = "spark_b4_prose"
    files = {"cost": SCENARIOS / f"{name}.cost.json", "trace": SCENARIOS / f"{name}.trace.json"}
    runs = [run("--belief", "none", "--noise", "10", "--seed", s, "--json", **files).output for s in ("1", "1", "2")]
    assert runs[0] == runs[1] != runs[2]


def test_a_belief_is_where_auto_starts_and_the_clock_stays_true(tmp_path):
    """A table that prices width 1 at nothing makes auto try it; the true table then shows what that cost."""
    belief = write(tmp_path / "belief.json", {**COST, "step_ms": {"1": {"1": 1.0, "7": 20.0}}})
    options = ("--widths", "1,7", "--json")
    told, true = (
        json.loads(run(*extra, *options).output) for extra in (("--belief", str(belief)), ("--policy", "static:7"))
    )
    assert told["steps"]["1"] > 0
    assert told["tok_s"] < true["tok_s"]
    assert told["tok_s"] > 0.95 * true["tok_s"]


@pytest.mark.parametrize("delay", ["0", "3", "x"])
def test_only_the_two_delays_exist(delay):
    assert run("--delay", delay).exit_code != 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--policy", "best"), "auto, static:K, ema-min or oracle"),
        (("--policy", "static:6"), "width 6"),
        (("--policy", "static:x"), "static:x"),
        (("--widths", "1,3"), "draft width 7"),
        (("--widths", "1,6,7"), "width 6"),
        (("--widths", "a"), "integers"),
        (("--widths", ""), "integers"),
        (("--belief", "absent.json"), "absent.json"),
        (("--noise", "-1"), "percentages"),
        (("--noise", "10", "--spikes", "101"), "percentages"),
        (("--plot", "absent/folder/x.png"), "--plot"),
        (("--plot", ""), "--plot"),
        (("--plot", "."), "--plot"),
        (("--seed", "-1"), "--seed is -1"),
        (("--noise", "10", "--seed", "-1"), "--seed is -1"),
        (("--noise", "nan"), "percentages"),
    ],
)
def test_bad_arguments_are_one_sentence_and_a_failure(arguments, says):
    result = run(*arguments)
    assert result.exit_code != 0
    assert says in result.output
    assert result.output.startswith("Error: ")
    assert result.output.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("{", "not JSON"),
        ([], "no JSON object"),
        ({"max_num_seqs": 1}, "lacks draft_width, requests"),
        ({**TRACE, "draft_width": 5}, "draft width 5"),
        ({**TRACE, "max_num_seqs": 0}, "max_num_seqs 0"),
        ({**TRACE, "requests": []}, "no requests"),
        ({**TRACE, "requests": [REQUEST, REQUEST]}, "twice"),
        ({**TRACE, "requests": [3]}, "number 0"),
        ({**TRACE, "requests": [{"id": "a"}]}, "'a' lacks arrive_ms, tokens, accepts"),
        ({**TRACE, "requests": [{**REQUEST, "tokens": 0}]}, "'a' has tokens 0"),
        ({**TRACE, "requests": [{**REQUEST, "tokens": True}]}, "'a' has tokens True"),
        ({**TRACE, "requests": [{**REQUEST, "arrive_ms": -1}]}, "'a' has arrive_ms -1"),
        ({**TRACE, "requests": [{**REQUEST, "arrive_ms": 1e300}]}, "'a' has arrive_ms 1e+300"),
        ({**TRACE, "requests": [{**REQUEST, "arrive_ms": 10**400}]}, "'a' has arrive_ms 1"),
        ({**TRACE, "requests": [{**REQUEST, "tokens": 10**400}]}, "'a' has 4 accepts"),
        ("[" * 100_000, "not JSON"),
        ({**TRACE, "requests": [{**REQUEST, "guided": "no"}]}, "'a' has guided"),
        ({**TRACE, "requests": [{**REQUEST, "accepts": [8]}]}, "'a' has accepts"),
        ({**TRACE, "requests": [{**REQUEST, "accepts": [0, 1.5]}]}, "'a' has accepts"),
        ({**TRACE, "requests": [{**REQUEST, "tokens": 99}]}, "'a' has 4 accepts"),
        ({**TRACE, "requests": [{**REQUEST, "accepts": []}]}, "'a' has 0 accepts"),
    ],
)
def test_a_bad_trace_is_one_sentence_and_a_failure(tmp_path, change, says):
    cost, trace = write(tmp_path / "cost.json", COST), write(tmp_path / "trace.json", change)
    result = run(cost=cost, trace=trace)
    assert result.exit_code == 1
    assert says in result.output
    assert result.output.startswith("Error: ")
    assert result.output.count("\n") == 1


def test_a_bad_cost_table_is_one_sentence_and_a_failure(tmp_path):
    result = run(cost=write(tmp_path / "cost.json", {**COST, "step_ms": {"1": {"1": 10.0}}}))
    assert result.exit_code == 1
    assert "batch 1, width 7" in result.output
    assert run(cost=tmp_path / "absent.json").exit_code == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 100_000, "not JSON"),
        ("9" * 5000, "not JSON"),
        (json.dumps({**COST, "step_ms": {"1": {"1": 1e308, "7": 1e308}}}), "1e+308 ms"),
        (json.dumps({**COST, "step_ms": {"1": COST["step_ms"]["1"], "01": COST["step_ms"]["1"]}}), "batch 1 twice"),
    ],
)
def test_a_cost_table_that_cannot_be_meant_is_one_sentence(tmp_path, text, says):
    path = write(tmp_path / "cost.json", text)
    result = run(cost=path)
    assert result.exit_code == 1
    assert says in result.output
    assert result.output.startswith(f"Error: {path}: ")
    assert result.output.count("\n") == 1


def test_a_step_too_short_for_the_clock_is_one_sentence(tmp_path):
    """At the latest arrival a float64 clock moves in steps of 0.0001 ms."""
    cost = write(tmp_path / "cost.json", {**COST, "step_ms": {"1": {"1": 1e-9, "7": 1e-9}}})
    trace = write(tmp_path / "trace.json", {**TRACE, "requests": [{**REQUEST, "arrive_ms": 1e12}]})
    result = run(cost=cost, trace=trace)
    assert result.exit_code == 1
    assert "request 'a' ran at 1e+12 ms" in result.output
    assert "too short for the clock" in result.output
    assert result.output.count("\n") == 1


def test_the_plot_is_a_png(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "widths.png"
    name = "sparkdense_b4_mixed"
    result = run("--plot", str(path), cost=SCENARIOS / f"{name}.cost.json", trace=SCENARIOS / f"{name}.trace.json")
    assert result.exit_code == 0, result.output
    assert path.read_bytes().startswith(b"\x89PNG")
