"""`dflash-verify bench` against servers that behave and servers that do not."""

import json

import pytest

from dflash_verify.bench.records import read_records


def runs(directory):
    return [r for r in read_records(directory) if r["kind"] == "run"]


def test_one_arm_is_measured_and_every_request_kept(serve, cli, quick, tmp_path):
    server = serve(width=3)
    out = tmp_path / "run"
    result = cli(
        "bench", "--url", server.url, "-w", "code", "-c", "1,2", "--repeats", 2, *quick, "--out", out, "--json"
    )
    assert result.exit_code == 0, result.output
    rows = json.loads((out / "summary.json").read_text())["rows"]
    assert [(r["workload"], r["concurrency"], r["runs"], r["requests"]) for r in rows] == [
        ("code", 1, 2, 2),
        ("code", 2, 2, 4),
    ]
    for row in rows:
        assert row["mean_width"] == 3.0
        assert row["width_source"] == "plugin"
        assert row["tok_s"]["low"] <= row["tok_s"]["median"] <= row["tok_s"]["high"]
        assert row["length_hits"] == row["requests"]
        assert len(set(row["text_hashes"].values())) == 1
        assert row["verified"][2] > 0
        assert row["verified"][3:] == [0, 0, 0, 0]
    requests = [r for r in read_records(out) if r["kind"] == "request"]
    assert len(requests) == 6
    assert cli("report", "--audit", out).exit_code == 0


def test_tokens_per_step_and_acceptance_are_the_servers_own_counts(serve, cli, quick, tmp_path):
    server = serve(width=7)
    out = tmp_path / "run"
    counted = []

    class CountsBefore(list):
        def append(self, body):
            super().append(body)
            counted.append((dict(server.counts), dict(server.accepted), dict(server.verified)))

    server.behaviour.requests = CountsBefore()
    result = cli("bench", "--url", server.url, "-w", "code", "--repeats", 1, "--warmups", 0, *quick, "--out", out)
    assert result.exit_code == 0
    counts, accepted, verified = counted[-1]  # when the measured request came, after the one that asks if it is ready
    row = json.loads((out / "summary.json").read_text())["rows"][0]
    drafts = server.counts["drafts"] - counts["drafts"]
    assert row["tokens_per_step"]["median"] == 1 + (server.counts["accepted"] - counts["accepted"]) / drafts
    assert row["acceptance"] == [
        (server.accepted[p] - accepted.get(p, 0)) / (server.verified[p] - verified.get(p, 0)) for p in range(7)
    ]


def test_a_server_without_the_plugin_is_measured_from_vllms_own_counters(serve, cli, quick, tmp_path):
    server = serve(width=3, plugin=False)
    out = tmp_path / "run"
    result = cli("bench", "--url", server.url, "-w", "code", "--repeats", 1, *quick, "--out", out)
    assert result.exit_code == 0
    row = json.loads((out / "summary.json").read_text())["rows"][0]
    assert row["mean_width"] == 3.0
    assert row["width_source"] == "vLLM's draft counters"
    assert cli("report", "--audit", out).exit_code == 0


def test_a_slow_server_is_measured_as_slow(serve, cli, quick, tmp_path):
    server = serve(first_token_s=0.4)
    out = tmp_path / "run"
    assert (
        cli("bench", "--url", server.url, "-w", "code", "--repeats", 1, "--warmups", 0, *quick, "--out", out).exit_code
        == 0
    )
    row = json.loads((out / "summary.json").read_text())["rows"][0]
    assert row["ttft_ms"]["median"] >= 400
    assert row["stream_tok_s"]["median"] > row["tok_s"]["median"]


def test_a_stalled_server_ends_the_run_and_keeps_what_came(serve, cli, quick, tmp_path):
    server = serve()
    out = tmp_path / "run"
    arguments = ("bench", "--url", server.url, "-w", "code", "--repeats", 2, "--warmups", 0, *quick, "--stall-s", 0.3)
    server.behaviour.stall_after_tokens = 10
    result = cli(*arguments, "--out", out)
    assert result.exit_code == 1
    assert "no chunk for 0.3 s" in result.output
    assert [r["problems"] for r in runs(out)] == [["stream 0: no chunk for 0.3 s"]]
    kept = [r for r in read_records(out) if r["kind"] == "request"]
    assert kept[0]["completion_tokens"] >= 10
    assert cli("report", "--audit", out).exit_code == 1  # incomplete


def test_a_server_lost_in_the_middle_is_resumed_without_measuring_twice(serve, cli, quick, tmp_path):
    server = serve()
    out = tmp_path / "run"
    arguments = ("bench", "-w", "code", "--repeats", 3, "--warmups", 0, *quick, "--out", out)
    first = server.behaviour.requests

    class CutSecond(list):
        def append(self, body):
            super().append(body)
            server.behaviour.cut_after_tokens = 10 if len(self) == 3 else None  # wait_ready asks once

    server.behaviour.requests = CutSecond(first)
    result = cli(*arguments, "--url", server.url)
    assert result.exit_code == 1
    assert "does not count" in result.output
    complete = [r["run"] for r in runs(out) if not r["problems"]]
    assert complete == ["p0.server.code.c1.q0.r0"]

    again = serve(identity=2000.0)
    result = cli(*arguments, "--url", again.url)
    assert result.exit_code == 0, result.output
    assert [r["run"] for r in runs(out) if not r["problems"]] == [f"p0.server.code.c1.q0.r{i}" for i in range(3)]
    assert json.loads((out / "summary.json").read_text())["broken_attempts"] == 1
    assert cli("report", "--audit", out).exit_code == 0


def test_other_traffic_makes_a_run_not_count(serve, cli, quick, tmp_path):
    server = serve(foreign_tokens=5)
    result = cli(
        "bench", "--url", server.url, "-w", "code", "--repeats", 1, "--warmups", 0, *quick, "--out", tmp_path / "run"
    )
    assert result.exit_code == 1
    assert "generated 65 tokens but these requests received 60: other traffic was served" in result.output


def test_a_request_that_ends_early_makes_a_run_not_count(serve, cli, quick, tmp_path):
    server = serve(eos_after_tokens=20)
    result = cli(
        "bench", "--url", server.url, "-w", "code", "--repeats", 1, "--warmups", 0, *quick, "--out", tmp_path / "run"
    )
    assert result.exit_code == 1
    assert "ended with 'stop' after 20 tokens, expected 'length' at 60" in result.output


def test_a_restart_in_the_middle_makes_a_run_not_count(serve, cli, quick, tmp_path):
    server = serve()
    out = tmp_path / "run"

    class Restarts(list):
        def append(self, body):
            super().append(body)
            server.behaviour.identity += 1

    server.behaviour.requests = Restarts()
    result = cli("bench", "--url", server.url, "-w", "code", "--repeats", 1, "--warmups", 0, *quick, "--out", out)
    assert result.exit_code == 1
    assert "restarted during the run" in result.output


def test_an_unauthorised_run_measures_nothing_and_names_the_option(serve, cli, quick, tmp_path):
    server = serve(api_key="secret")
    out = tmp_path / "run"
    result = cli("bench", "--url", server.url, "-w", "code", *quick, "--out", out)
    assert result.exit_code == 1
    assert "--api-key" in result.output
    assert not out.exists()
    assert (
        cli(
            "bench", "--url", server.url, "--api-key", "secret", "-w", "code", "--repeats", 1, *quick, "--out", out
        ).exit_code
        == 0
    )


def test_every_request_has_a_cache_salt_of_its_own_unless_the_cache_is_wanted(serve, cli, quick, tmp_path):
    server = serve()
    common = ("bench", "--url", server.url, "-w", "code", "--repeats", 2, "-c", "2", *quick)
    cli(*common, "--out", tmp_path / "a")
    salts = [r.get("cache_salt") for r in server.behaviour.requests[1:]]
    assert len(set(salts)) == len(salts)
    assert None not in salts
    server.behaviour.requests.clear()
    cli(*common, "--out", tmp_path / "b", "--keep-prefix-cache")
    assert {r.get("cache_salt") for r in server.behaviour.requests} == {None}


def test_guided_answers_are_checked_against_their_schema(serve, cli, quick, tmp_path):
    server = serve()
    for text, valid in (
        ('{"name":"nail","colour":"grey","stock":3}', 2),
        ('{"name":"nail","stock":"three"}', 0),
        ("{", 0),
    ):
        server.behaviour.json_text = text
        out = tmp_path / f"run{len(text)}"
        assert cli("bench", "--url", server.url, "-w", "object", "--repeats", 2, *quick, "--out", out).exit_code == 0
        assert json.loads((out / "summary.json").read_text())["rows"][0]["json_valid"] == valid


def test_own_prompts_replace_the_presets(serve, cli, quick, tmp_path):
    server = serve()
    prompts = tmp_path / "p.txt"
    prompts.write_text("first\nsecond\n")
    out = tmp_path / "run"
    result = cli(
        "bench", "--url", server.url, "--prompts", prompts, "--repeats", 1, "--warmups", 0, *quick, "--out", out
    )
    assert result.exit_code == 0
    asked = {r["messages"][0]["content"] for r in server.behaviour.requests[1:]}
    assert asked == {"first", "second"}


@pytest.mark.parametrize("name", ["p.txt", "p.jsonl"])
def test_prompts_that_are_not_utf8_are_refused(cli, tmp_path, name):
    prompts = tmp_path / name
    prompts.write_bytes('{"prompt": "é"}\n'.encode("latin-1"))
    result = cli("bench", "--url", "http://127.0.0.1:1", "--prompts", prompts, "--out", tmp_path / "run")
    assert result.exit_code == 1
    assert f"{prompts} is not UTF-8" in result.output


@pytest.mark.parametrize("key", ["é", "a\nb"])
@pytest.mark.parametrize("command", ["bench", "bracket"])
def test_a_key_that_no_header_can_carry_is_refused_unprinted(cli, tmp_path, key, command):
    out = tmp_path / "run"
    arms = ("--control-file", tmp_path / "c.json") if command == "bracket" else ()
    result = cli(command, "--url", "http://127.0.0.1:1", "--api-key", key, *arms, "--out", out)
    assert result.exit_code == 1
    assert "The key of --api-key or OPENAI_API_KEY" in result.output
    assert "é" not in result.output
    assert not out.exists()


def test_a_list_of_numbers_is_checked(cli):
    result = cli("bench", "-c", "1,x")
    assert result.exit_code == 2
    assert "1,2,4" in result.output


def test_a_missing_package_names_the_extra(cli, monkeypatch):
    import sys

    monkeypatch.delitem(sys.modules, "dflash_verify.bench.endpoint", raising=False)
    monkeypatch.setitem(sys.modules, "httpx", None)
    result = cli("watch", "--once")
    assert result.exit_code == 1
    assert 'The package httpx is missing here; measuring needs: pip install "dflash-verify[bench]".' in result.output
