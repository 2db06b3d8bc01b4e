"""Arms, their order, switching a live server, commands of their own, resuming and auditing."""

import json
import re
import shutil
import sys
import tomllib
from pathlib import Path

import pytest

from dflash_verify.bench.bracket import Arm, Config, command_env, load_config, order_of, plan_visits
from dflash_verify.bench.errors import BenchError
from dflash_verify.bench.example import EXAMPLE
from dflash_verify.bench.records import line_of, read_records
from dflash_verify.bench.workloads import presets


def live(**change):
    arms = (
        {"name": "A1", "width": 7},
        {"name": "B", "width": 3},
        {"name": "C", "width": "auto"},
        {"name": "A2", "width": 7},
    )
    return Config.model_validate({"control_file": "c.json", "arm": arms, **change})


def test_the_example_is_a_valid_config_with_a_bracketed_baseline(tmp_path):
    path = tmp_path / "b.toml"
    path.write_text(EXAMPLE)
    config = load_config(path)
    assert [arm.label for arm in config.arm] == ["A1 7/7", "B 7/3", "C 3/3", "A2 7/7"]
    assert config.baseline_names == ("A1", "A2")
    assert config.max_num_seqs == (2, 4)
    visits = plan_visits(config, (presets()["code"],))
    assert len(visits) == 2 * 2 * 4


def with_every_arm(example):
    """The example with its arms on request, and the line that they need, switched on; live arms are left out."""
    return re.sub(r"(?m)^# (?=\[\[|\w+ = )", "", example.partition("# Live arms instead")[0])


def test_start_sh_takes_the_env_of_every_arm_in_the_example(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3]))
    from launcher.settings import DEFAULTS, validate

    config = Config.model_validate(tomllib.loads(with_every_arm(EXAMPLE)))
    assert [arm.name for arm in config.arm] == ["A1", "B", "C", "A2", "auto", "off"]
    for arm in config.arm:
        # Whatever width .env serves with, the arm decides.
        settings = validate(DEFAULTS | {"DFLASH_VERIFY_TOKENS": "3"} | arm.env)
        assert settings.draft_tokens == arm.draft
        assert settings.widths_asked == ("" if arm.name == "off" else str(arm.verify))
    assert {name for arm in config.arm for name in arm.env} <= set(config.differs_in)


def test_every_second_pass_reverses_the_arms_between_the_baselines():
    assert [a.name for a in order_of(live(), 0)] == ["A1", "B", "C", "A2"]
    assert [a.name for a in order_of(live(), 1)] == ["A1", "C", "B", "A2"]


def test_one_baseline_is_enough_if_there_is_no_second():
    config = live(arm=({"name": "A", "width": 7}, {"name": "B", "width": 3}))
    assert config.baseline_names == ("A",)
    assert [a.name for a in order_of(config, 1)] == ["B", "A"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arm": ({"name": "A"}, {"name": "B", "width": 3})}, "exactly one of width, restart and start"),
        ({"arm": ({"name": "A", "width": 7}, {"name": "A", "width": 3})}, "arm names must differ"),
        ({"control_file": None}, "need control_file"),
        ({"max_num_seqs": (2, 4)}, "cannot change on a live server"),
        ({"baselines": ("X",)}, "are no arms"),
        ({"arm": ({"name": "A", "width": 7, "env": {"A": "1"}}, {"name": "B", "width": 3})}, "env has no effect"),
        ({"colour": 1}, "Extra inputs"),
        ({"arm": ({"name": "A", "width": 9, "draft": 7}, {"name": "B", "width": 3})}, "wider than its draft width 7"),
        ({"arm": ({"name": "A", "width": -1}, {"name": "B", "width": 3})}, "greater than or equal to 0"),
    ],
)
def test_a_config_that_cannot_work_is_refused_with_its_reason(change, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        live(**change)


def test_a_broken_toml_is_refused_in_one_sentence(tmp_path):
    path = tmp_path / "b.toml"
    path.write_text("url = ")
    with pytest.raises(BenchError, match="is not TOML"):
        load_config(path)
    path.write_text('[[arm]]\nname = "A"\nwidth = "wide"\n')
    with pytest.raises(BenchError, match="--example"):
        load_config(path)


def test_arms_with_other_graphs_have_compile_caches_of_their_own(tmp_path):
    config = Config.model_validate(tomllib.loads(EXAMPLE))
    a1, b, c, a2 = (command_env(config, arm, 2, tmp_path) for arm in config.arm)
    assert a1["VLLM_CACHE_ROOT"] == a2["VLLM_CACHE_ROOT"]
    assert len({e["VLLM_CACHE_ROOT"] for e in (a1, b, c)}) == 3
    assert command_env(config, config.arm[0], 4, tmp_path)["VLLM_CACHE_ROOT"] != a1["VLLM_CACHE_ROOT"]
    assert a1["MAX_NUM_SEQS"] == "2"
    assert c["DFLASH_TOKENS"] == "3"


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """One live bracket over 7, 3 and auto, made with the command line."""
    import bench_fake_server
    from click.testing import CliRunner

    from dflash_verify.cli import main

    folder = tmp_path_factory.mktemp("bracket")
    control, out = folder / "control.json", folder / "run"
    with bench_fake_server.FakeServer(control_file=control, step_s=0.002) as server:
        result = CliRunner().invoke(
            main,
            [
                *("bracket", "--url", server.url, "--control-file", str(control), "--auto", "--out", str(out)),
                *(
                    "-w",
                    "code",
                    "-c",
                    "1",
                    "--repeats",
                    "3",
                    "--passes",
                    "2",
                    "--max-tokens",
                    "60",
                    "--sample-s",
                    "0.1",
                ),
            ],
            catch_exceptions=False,
        )
    assert result.exit_code == 0, result.output
    return out, result


@pytest.fixture
def copied(measured, tmp_path):
    return shutil.copytree(measured[0], tmp_path / "run")


def test_a_live_bracket_gives_each_arm_its_width_and_states_drift_and_hashes(measured):
    out, result = measured
    summary = json.loads((out / "summary.json").read_text())
    widths = {row["arm"]: row["mean_width"] for row in summary["rows"]}
    assert widths["A1"] == widths["A2"] == 7.0
    assert widths["B"] == 3.0
    assert 3.0 < widths["auto"] < 7.0
    assert summary["max_drift"] is not None
    assert {c["texts"] for c in summary["comparisons"]} == {"equal"}
    assert "drifted by at most" in result.output
    assert "At temperature 0 every arm wrote the same texts." in result.output
    assert (out / "report.html").exists()
    assert (out / "report.png").read_bytes().startswith(b"\x89PNG")


def test_the_arms_were_asked_exactly_the_same(measured):
    by_arm = {}
    for r in read_records(measured[0]):
        if r["kind"] == "request":
            arm = r["run"].split(".")[1]
            by_arm.setdefault(arm, []).append((r["seed"], r["prompt_sha256"], r["body_sha256"]))
    assert len(by_arm) == 4
    assert len({tuple(sorted(asked)) for asked in by_arm.values()}) == 1


def test_the_audit_of_what_was_measured_passes(measured, cli):
    result = cli("report", "--audit", measured[0])
    assert result.exit_code == 0
    assert "passed" in result.output


EDITS = {
    "tokens of a request": lambda r: r["kind"] == "request" and r.update(completion_tokens=r["completion_tokens"] + 1),
    "time of a chunk": lambda r: r["kind"] == "request" and r["events"].__setitem__(-1, [9e4, r["events"][-1][1]]),
    "text of a request": lambda r: r["kind"] == "request" and r.update(text="?" + r["text"][1:]),
    "seed of a request": lambda r: r["kind"] == "request" and r.update(seed=1),
    "counter of a run": lambda r: r["kind"] == "run" and r["after"]["steps"].update({"7": 1e6}),
    "the pause before a run": lambda r: r["kind"] == "run" and r.update(paused_s=1.0),
    "a field of a request": lambda r: r["kind"] == "request" and r.pop("events") and None,
    "arm of a visit": lambda r: r["kind"] == "visit" and r.update(arm="A2"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_the_audit_fails_on_one_edited_record(copied, cli, edit):
    path = copied / "records.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert any(EDITS[edit](r) is not False for r in records[2:])  # any() stops at the first that is edited
    path.write_text("".join(line_of(r) + "\n" for r in records))
    result = cli("report", "--audit", copied)
    assert result.exit_code == 1
    assert "FINDING" in result.output


def rewritten(directory, change):
    """All records after `change`, with links and summary made anew, as a forger with this code would write them."""
    from dflash_verify.bench.records import chain_of, read_manifest, write_summary
    from dflash_verify.bench.summary import summarise

    records, previous, lines = [], "", []
    for r in read_records(directory):
        r.pop("chain")
        change(r)
        previous = chain_of(previous, r)
        records.append(r)
        lines.append(line_of({**r, "chain": previous}) + "\n")
    (directory / "records.jsonl").write_text("".join(lines))
    write_summary(directory, summarise(read_manifest(directory), records).as_json())


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        (lambda r: r["kind"] == "request" and r.update(seed=r["seed"] + 1), "seed"),
        (lambda r: r["kind"] == "request" and r.update(text_sha256="0" * 64), "does not have the hash"),
        (lambda r: r["kind"] == "request" and r.update(body_sha256="0" * 64), "another request body"),
        (lambda r: r["kind"] == "visit" and r["arm"] == "B" and r["server"].update(version="0.1"), "different servers"),
        (lambda r: r["kind"] == "run" and r["after"].update(identity=5.0), "restarted"),
        (
            lambda r: (
                r["kind"] == "run"
                and r["cell"]["arm"] == "B"
                and r["after"]["steps"].update({"7": 99.0 + r["after"]["steps"]["7"]})
            ),
            "the arm says 3",
        ),
        (
            lambda r: r["kind"] == "run" and r["after"].update(generation_tokens=r["after"]["generation_tokens"] + 1),
            "the server generated 61",
        ),
    ],
)
def test_the_audit_checks_the_plan_and_not_only_the_hashes(copied, cli, change, finding):
    rewritten(copied, change)
    result = cli("report", "--audit", copied)
    assert result.exit_code == 1
    assert finding in result.output


def test_the_audit_counts_missing_runs(copied, cli):
    path = copied / "records.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-2]))
    rewritten(copied, lambda r: None)
    result = cli("report", "--audit", copied)
    assert result.exit_code == 1
    assert "1 of 24 planned runs are missing" in result.output


def test_the_audit_refuses_arms_that_differ_in_something_else(copied, cli):
    path = copied / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["arms"][1]["env"] = {"VLLM_ATTENTION_BACKEND": "X"}
    path.write_text(json.dumps(manifest))
    assert "differ in VLLM_ATTENTION_BACKEND" in cli("report", "--audit", copied).output


def test_a_bracket_goes_on_where_it_was_lost(serve, cli, quick, tmp_path):
    control, out = tmp_path / "control.json", tmp_path / "run"
    server = serve(control_file=control)
    arguments = (
        "bracket",
        "--control-file",
        control,
        "-w",
        "code",
        "-c",
        "1",
        "--repeats",
        1,
        "--passes",
        1,
        *quick,
        "--out",
        out,
    )

    class CutLate(list):
        def append(self, body):
            super().append(body)
            server.behaviour.cut_after_tokens = 10 if len(self) >= 7 else None  # in the second arm

    server.behaviour.requests = CutLate()
    result = cli(*arguments, "--url", server.url)
    assert result.exit_code == 1
    assert f"with --out {out} resumes" in result.output
    done = sum(r["kind"] == "run" and not r["problems"] for r in read_records(out))
    assert done == 1
    server.behaviour.requests = []
    server.behaviour.cut_after_tokens = None
    result = cli(*arguments, "--url", server.url)
    assert result.exit_code == 0, result.output
    assert sum(r["kind"] == "run" and not r["problems"] for r in read_records(out)) == 3
    assert cli("report", "--audit", out).exit_code == 0
    # Nothing is left to do, so nothing is asked.
    server.behaviour.requests.clear()
    assert cli(*arguments, "--url", server.url).exit_code == 0
    assert server.behaviour.requests == []


def test_a_server_that_does_not_follow_the_control_file_is_not_measured(serve, cli, quick, tmp_path, monkeypatch):
    from dflash_verify.bench import bracket

    real = bracket.switch_live
    monkeypatch.setattr(bracket, "switch_live", lambda *args: real(*args, timeout_s=0.3))
    server = serve(control_file=None, width=7)
    arguments = ("bracket", "--url", server.url, "--control-file", tmp_path / "c.json", "-w", "code", "-c", "1", *quick)
    result = cli(*arguments, "--repeats", 1, "--passes", 1, "--out", tmp_path / "run")
    assert result.exit_code == 1
    assert "does not follow" in result.output
    assert "asked for width 3, its steps were {7:" in result.output


def test_a_live_bracket_needs_the_plugin(serve, cli, quick, tmp_path):
    server = serve(plugin=False)
    result = cli(
        "bracket", "--url", server.url, "--control-file", tmp_path / "c.json", *quick, "--out", tmp_path / "run"
    )
    assert result.exit_code == 1
    assert "exports no dflash_verify_* counters" in result.output


def test_a_live_bracket_without_a_server_says_so_at_once_and_leaves_nothing(cli, quick, tmp_path):
    out = tmp_path / "run"
    result = cli(
        *("bracket", "--url", "http://127.0.0.1:1", "--control-file", tmp_path / "c.json", "-w", "code", *quick),
        *("--out", out),
    )
    assert result.exit_code == 1
    assert "No server answers at http://127.0.0.1:1" in result.output
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--narrow", 9), "--narrow 9 is wider than --draft 7"),
        (("--narrow", 0), "0 is not in the range x>=1"),
        (("--draft", -1), "-1 is not in the range x>=1"),
    ],
)
def test_widths_that_cannot_be_are_refused_before_the_server_is_asked(cli, tmp_path, arguments, message):
    out = tmp_path / "run"
    result = cli(
        *("bracket", "--url", "http://127.0.0.1:1", "--control-file", tmp_path / "c.json", *arguments, "--out", out)
    )
    assert result.exit_code
    assert message in result.output
    assert not out.exists()


def test_a_control_file_in_a_missing_directory_is_refused_before_the_server_is_asked(cli, tmp_path):
    out = tmp_path / "run"
    control = tmp_path / "none" / "c.json"
    result = cli("bracket", "--url", "http://127.0.0.1:1", "--control-file", control, "--out", out)
    assert result.exit_code == 1
    assert f"There is no directory {tmp_path / 'none'} for the control file" in result.output
    assert not out.exists()
    assert not control.parent.exists()


def test_waiting_for_a_server_that_restarts_is_said(cli, quick, tmp_path, monkeypatch):
    from dflash_verify.bench import bracket

    monkeypatch.setattr(bracket, "STILL_WAITING_S", 0.0)
    config = tmp_path / "b.toml"
    config.write_text(
        'url = "http://127.0.0.1:1"\nready_timeout_s = 1.2\n'
        '[[arm]]\nname = "A"\nverify = 7\nrestart = "true"\n[[arm]]\nname = "B"\nverify = 3\nrestart = "true"\n'
    )
    result = cli("bracket", "--config", config, "-w", "code", *quick, "--out", tmp_path / "run")
    assert result.exit_code == 1
    assert "A 7: waiting up to 1.2 s for http://127.0.0.1:1" in result.output
    assert "A 7: still waiting after " in result.output
    assert "No server answers at http://127.0.0.1:1" in result.output


def test_a_bracket_without_arms_says_how_to_get_some(cli, tmp_path):
    result = cli("bracket", "--out", tmp_path / "run")
    assert result.exit_code == 1
    assert "--control-file" in result.output
    assert "--example" in result.output
    assert cli("bracket", "--example").output == EXAMPLE


def test_the_example_is_printed_without_the_extra():
    """In a process of its own: here every package has been imported already."""
    import subprocess

    code = (
        "import sys\n"
        "for name in ('httpx', 'prometheus_client', 'jsonschema', 'jinja2', 'matplotlib'): sys.modules[name] = None\n"
        "from dflash_verify.cli import main\n"
        "main(['bracket', '--example'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, EXAMPLE), done.stderr


def test_texts_that_differ_at_temperature_0_are_said(serve, cli, quick, tmp_path):
    control, out = tmp_path / "control.json", tmp_path / "run"
    server = serve(control_file=control, text_depends_on_width=True)
    result = cli(
        *("bracket", "--url", server.url, "--control-file", control, "-w", "code", "-c", "1", "--repeats", 1),
        *("--passes", 1, *quick, "--out", out),
    )
    assert (
        "At temperature 0 texts differ from the baseline's: B 7/3 on code at 1 stream (1 of 1 differ)." in result.output
    )
    assert "1 of 1 differ" in (out / "report.html").read_text()


SERVER_COMMAND = """
import os, sys, threading
sys.path.insert(0, {folder!r})
from fake_server import FakeServer
server = FakeServer(width=int(os.environ["DFLASH_VERIFY_TOKENS"]), identity=float(os.getpid()), port={port})
print("cache", os.environ["VLLM_CACHE_ROOT"], os.environ["MAX_NUM_SEQS"], flush=True)
with server:
    threading.Event().wait()
"""


@pytest.fixture
def started_arms(tmp_path):
    """A config whose arms start the fake server as their own process."""
    import socket
    from pathlib import Path

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = tmp_path / "server.py"
    script.write_text(SERVER_COMMAND.format(folder=str(Path(__file__).parent), port=port))
    arms = "".join(
        f'[[arm]]\nname = "{name}"\nverify = {width}\ndraft = 7\nstart = "{sys.executable} {script}"\n'
        f'env = {{ DFLASH_VERIFY_TOKENS = "{width}" }}\n'
        for name, width in (("A1", 7), ("B", 3), ("A2", 7))
    )
    config = tmp_path / "b.toml"
    config.write_text(
        f'url = "http://127.0.0.1:{port}"\nworkloads = ["code"]\nconcurrency = [1]\npasses = 1\nrepeats = 1\n'
        f"max_num_seqs = [2, 4]\nready_timeout_s = 30\n{arms}"
    )
    return config


def test_arms_with_commands_start_and_stop_their_own_server(started_arms, cli, quick, tmp_path):
    out = tmp_path / "run"
    result = cli("bracket", "--config", started_arms, *quick, "--no-report", "--out", out)
    assert result.exit_code == 0, result.output
    rows = json.loads((out / "summary.json").read_text())["rows"]
    assert {(r["arm"], r["max_num_seqs"]): r["mean_width"] for r in rows} == {
        (arm, seqs): width for arm, width in (("A1", 7.0), ("B", 3.0), ("A2", 7.0)) for seqs in (2, 4)
    }
    caches = {line for name in ("A1", "B") for line in (out / f"server-{name}.log").read_text().splitlines()}
    assert len(caches) == 4  # width x slots, A1 and A2 share
    identities = {r["identity"] for r in read_records(out) if r["kind"] == "visit"}
    assert len(identities) == 6
    assert cli("report", "--audit", out).exit_code == 0


def test_an_arm_whose_server_ends_at_once_is_reported_with_its_log(started_arms, cli, quick, tmp_path):
    text = started_arms.read_text().replace('DFLASH_VERIFY_TOKENS = "3"', 'DFLASH_VERIFY_TOKENS = "x"')
    started_arms.write_text(text)
    result = cli("bracket", "--config", started_arms, *quick, "--out", tmp_path / "run")
    assert result.exit_code == 1
    assert "The server of arm B ended with 1 before it was ready; see" in result.output


def test_a_restart_command_that_fails_is_quoted(cli, quick, tmp_path):
    config = tmp_path / "b.toml"
    config.write_text(
        'url = "http://127.0.0.1:9"\n[[arm]]\nname = "A"\nrestart = "echo no such machine >&2; exit 7"\n'
        '[[arm]]\nname = "B"\nrestart = "true"\n'
    )
    result = cli("bracket", "--config", config, "-w", "code", *quick, "--out", tmp_path / "run")
    assert result.exit_code == 1
    assert "ended with 7: no such machine" in result.output


def test_labels_are_written_as_the_field_does():
    assert Arm(name="B", draft=7, verify=3, start="x").label == "B 7/3"
    assert Arm(name="B", width="auto").label == "B auto"
    assert Arm(name="B", width="stock").claimed_width is None
