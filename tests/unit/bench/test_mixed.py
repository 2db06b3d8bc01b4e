"""The mixed probe: overlap is proved or the probe fails."""

import json

import pytest

from dflash_verify.bench.endpoint import Stream
from dflash_verify.bench.mixed import overlaps

BASE = ("mixed", "--repeats", 1, "--max-tokens", 200, "--min-overlap-s", 100)


def stream(sent_s, *events):
    return Stream(sent_s, tuple(events), events[-1][1], 9, "length", "", "", None)


def test_overlap_is_counted_between_first_and_last_tokens_of_both():
    main = stream(100.0, (1000.0, 1), (9000.0, 90))  # decodes from 101 to 109
    cases = [
        stream(99.0, (3000.0, 1), (5000.0, 9)),  # 102 to 104: inside
        stream(107.0, (500.0, 1), (4000.0, 9)),  # 107.5 to 111: cut at 109
        stream(90.0, (1000.0, 1), (9000.0, 9)),  # 91 to 99: before
        stream(105.0, (20000.0, 1), (21000.0, 9)),  # sent during, decodes after
    ]
    assert overlaps(main, cases) == [(102.0, 104.0), (107.5, 109.0)]


def test_ordinary_and_guided_requests_decode_together(serve, cli, tmp_path):
    server = serve(width=3, step_s=0.003)
    result = cli(*BASE, "--url", server.url, "--min-overlap-steps", 20, "--lead-tokens", 8, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "mixed.json").read_text())
    guided = next(p for p in found["phases"] if p["phase"] == "guided companion")
    assert guided["overlap_steps"] >= 20
    assert guided["json_valid"] >= 1
    assert guided["json_invalid"] == []
    assert found["grammar"]["verdict"] == "too few runs"  # one repeat
    record = next(r for r in found["records"] if r["phase"] == "guided companion")
    main = record["ordinary"]
    led = next(ms for ms, tokens in main["events"] if tokens >= 8)
    for companion in record["companions"]:
        assert companion["sent_unix_s"] >= main["sent_unix_s"] + led / 1000
    assert "decoded together for at least" in result.output


def test_the_probe_fails_closed_when_the_overlap_is_not_reached(serve, cli, tmp_path):
    server = serve(step_s=0.003)
    result = cli(*BASE, "--url", server.url, "--min-overlap-steps", 1000, "--out", tmp_path)
    assert result.exit_code == 1
    assert "The probe failed" in result.output
    assert "needed 100 s or 1000 steps" in result.output


@pytest.mark.parametrize(
    ("text", "finding"),
    [('{"name": "nail"}', "guided answers are invalid"), ('{"name"' * 60, "no guided answer was complete")],
)
def test_the_probe_fails_when_no_answer_is_valid_json(serve, cli, tmp_path, text, finding):
    server = serve(step_s=0.003, json_text=text)
    result = cli(*BASE, "--url", server.url, "--min-overlap-steps", 5, "--out", tmp_path)
    assert result.exit_code == 1
    assert finding in result.output


def test_a_request_that_fails_is_named(serve, cli, tmp_path):
    server = serve(step_s=0.003, cut_after_tokens=30)
    result = cli(*BASE, "--url", server.url, "--out", tmp_path)
    assert result.exit_code == 1
    assert "request of phase 'guided companion' failed" in result.output


def test_a_workload_without_schema_cannot_be_the_guided_one(serve, cli, tmp_path):
    server = serve()
    result = cli(*BASE, "--url", server.url, "--guided", "code", "--out", tmp_path)
    assert result.exit_code == 1
    assert "has no schema" in result.output
