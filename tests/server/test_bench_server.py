"""The measuring tools over HTTP against real servers: one that switches live and asks for a key, and a stock one."""

import json
import os
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dflash_verify.bench.records import line_of, read_records
from dflash_verify.cli import main
from dflash_verify.cpu.models import Models
from dflash_verify.cpu.server import Server, open_server

KEY = "a-key"
QUICK = ("--sample-s", "0.5")


def cli(*arguments: Any) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments], catch_exceptions=False)


@pytest.fixture(scope="module")
def live(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    """A server with an automatic width, a control file and a key."""
    folder = tmp_path_factory.mktemp("live")
    control = folder / "control.json"
    environ = {"DFLASH_VERIFY_TOKENS": "auto:3,7", "DFLASH_CONTROL_FILE": str(control)}
    with open_server(models, folder, environ=environ, flags=("--api-key", KEY)) as server:
        yield server, control


@pytest.fixture(scope="module")
def stock(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server on which no width is active."""
    with open_server(models, tmp_path_factory.mktemp("stock")) as server:
        yield server


@pytest.fixture(scope="module")
def bracket(live: tuple[Server, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    server, control = live
    out = tmp_path_factory.mktemp("bracket") / "run"
    result = cli(
        *("bracket", "--url", server.url, "--api-key", KEY, "--control-file", control, "--auto", "--out", out),
        *(
            "-w",
            "structured",
            "-c",
            "2",
            "--repeats",
            2,
            "--passes",
            1,
            "--max-tokens",
            120,
            "--warmups",
            0,
            "--sample-s",
            0.2,
        ),
    )
    return out, result


def test_a_bracket_over_7_3_and_auto_proves_its_widths_and_passes_its_audit(bracket: tuple[Path, Result]) -> None:
    out, result = bracket
    assert result.exit_code == 0, result.output
    summary = json.loads((out / "summary.json").read_text())
    widths = {row["arm"]: row["mean_width"] for row in summary["rows"]}
    assert widths["A1"] == widths["A2"] == 7.0
    assert widths["B"] == 3.0
    # Which of its widths pays depends on this machine; that the controller chose is in its reasons, checked below.
    assert 3.0 <= widths["auto"] <= 7.0
    assert set(next(row["steps"] for row in summary["rows"] if row["arm"] == "auto")) <= {"3", "7"}
    assert {row["width_source"] for row in summary["rows"]} == {"plugin"}
    assert {c["texts"] for c in summary["comparisons"]} == {"equal"}
    assert "drifted by at most" in result.output
    assert "At temperature 0 every arm wrote the same texts." in result.output
    assert (out / "report.html").exists()
    audit = cli("report", "--audit", out)
    assert audit.exit_code == 0, audit.output


def test_only_the_automatic_arm_was_decided_by_the_controller(bracket: tuple[Path, Result]) -> None:
    reasons: dict[str, set[str]] = {}
    for r in read_records(bracket[0]):
        if r["kind"] == "run":
            reasons.setdefault(r["cell"]["arm"], set()).update(s["reason"] for s in r["timeline"])
    assert reasons["A1"] == {"7: control file"}
    assert reasons["B"] == {"3: control file"}
    assert reasons["auto"]
    assert not any("control file" in reason for reason in reasons["auto"])


def test_the_audit_fails_on_one_edited_record(bracket: tuple[Path, Result], tmp_path: Path) -> None:
    edited = shutil.copytree(bracket[0], tmp_path / "run")
    path = edited / "records.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    first = next(r for r in records if r["kind"] == "request")
    first["events"][-1][0] -= 1.0  # one millisecond faster
    path.write_text("".join(line_of(r) + "\n" for r in records))
    assert cli("report", "--audit", edited).exit_code == 1


def test_static_widths_verify_no_position_beyond_them(bracket: tuple[Path, Result]) -> None:
    for row in json.loads((bracket[0] / "summary.json").read_text())["rows"]:
        verified = row["verified"]
        assert len(verified) == 7
        if row["arm"] == "B":
            assert verified[2] > 0
            assert verified[3:] == [0, 0, 0, 0]
        elif row["arm"] == "A1":
            assert min(verified) > 0
        assert all(a <= v for a, v in zip(row["accepted"], verified, strict=True))


def test_guided_and_ordinary_requests_decode_together_and_the_json_is_valid(
    live: tuple[Server, Path], tmp_path: Path
) -> None:
    server, control = live
    control.write_text('{"width": 3}')
    result = cli(
        *("mixed", "--url", server.url, "--api-key", KEY, "--repeats", 1, "--max-tokens", 220, "--out", tmp_path)
    )
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "mixed.json").read_text())
    guided = next(p for p in found["phases"] if p["phase"] == "guided companion")
    assert guided["overlap_s"] >= 5.0 or guided["overlap_steps"] >= 50
    assert guided["json_valid"] >= 1
    # One guided request does not widen the batch.
    assert set(guided["widths"]) == {"3"}


def test_without_the_key_nothing_is_measured(live: tuple[Server, Path], tmp_path: Path) -> None:
    result = cli("bench", "--url", live[0].url, "-w", "code", "--out", tmp_path / "run")
    assert result.exit_code == 1
    assert "refused the key (HTTP 401); pass --api-key" in result.output
    assert not (tmp_path / "run").exists()


BENCH = ("-w", "structured", "--warmups", 0, "--max-tokens", 40, *QUICK)


def test_a_server_without_an_active_width_is_measured_from_vllms_counters(stock: Server, tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = cli("bench", "--url", stock.url, *BENCH, "--repeats", 1, "--out", out)
    assert result.exit_code == 0, result.output
    row = json.loads((out / "summary.json").read_text())["rows"][0]
    assert row["mean_width"] == 7.0
    assert row["width_source"] == "vLLM's draft counters"
    assert cli("report", "--audit", out).exit_code == 0
    refused = cli("bracket", "--url", stock.url, "--control-file", tmp_path / "c.json", *BENCH, "--out", tmp_path / "b")
    assert refused.exit_code == 1
    assert "exports no dflash_verify_* counters" in refused.output


class Proxy:
    """Forwards TCP to a server; `gate(answered bytes)` is asked before every piece of an answer to a POST."""

    def __init__(self, port: int, gate: Callable[[int], None]) -> None:
        self._port, self._gate = port, gate
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> "Proxy":
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            upstream = socket.create_connection(("127.0.0.1", self._port))
            posts: list[bool] = []
            threading.Thread(target=self._pump, args=(client, upstream, posts, False), daemon=True).start()
            threading.Thread(target=self._pump, args=(upstream, client, posts, True), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, posts: list[bool], answer: bool) -> None:
        answered = 0
        try:
            while data := source.recv(65536):
                if not answer:
                    posts[:] = [data.startswith(b"POST")] if data[:4] in (b"POST", b"GET ") else posts
                elif posts == [True]:
                    self._gate(answered)
                    answered += len(data)
                target.sendall(data)
        except OSError:
            pass
        finally:
            for end in (source, target):
                end.close()


def test_a_slow_server_is_measured_as_slow(stock: Server, tmp_path: Path) -> None:
    delay_s = 0.8
    out = tmp_path / "run"

    def late(answered: int) -> None:
        if answered == 0:
            threading.Event().wait(delay_s)

    with Proxy(stock.port, late) as proxy:
        result = cli("bench", "--url", proxy.url, *BENCH, "--repeats", 1, "--out", out)
    assert result.exit_code == 0, result.output
    row = json.loads((out / "summary.json").read_text())["rows"][0]
    assert row["ttft_ms"]["median"] >= 1000 * delay_s


def test_a_server_that_stalls_ends_the_run_with_its_records(stock: Server, tmp_path: Path) -> None:
    out, stop = tmp_path / "run", threading.Event()

    def stuck(answered: int) -> None:
        if answered > 6000:
            stop.wait(60)

    with Proxy(stock.port, stuck) as proxy:
        # The first request, which asks whether the server is ready, is shorter than that; this one is longer.
        result = cli(
            *("bench", "--url", proxy.url, *BENCH, "--max-tokens", 300, "--repeats", 1, "--stall-s", 3, "--out", out)
        )
    stop.set()
    assert result.exit_code == 1
    assert "no chunk for 3 s" in result.output
    kept = [r for r in read_records(out) if r["kind"] == "request"]
    assert len(kept) == 1
    assert 0 < kept[0]["completion_tokens"] < 300


def test_a_server_killed_in_the_middle_loses_nothing_that_was_measured(stock: Server, tmp_path: Path) -> None:
    """The last test of the stock server. A bench of three runs; the process tree is killed in the second."""
    out = tmp_path / "run"

    def kill_in_the_second_run() -> None:
        records = out / "records.jsonl"
        poll = threading.Event()
        while not poll.wait(0.02):
            if records.exists() and '"kind":"run"' in records.read_text():
                os.killpg(stock.process.pid, signal.SIGKILL)
                return

    threading.Thread(target=kill_in_the_second_run, daemon=True).start()
    result = cli("bench", "--url", stock.url, *BENCH, "--repeats", 3, "--out", out)
    assert result.exit_code == 1
    runs = [r for r in read_records(out) if r["kind"] == "run"]
    assert not runs[0]["problems"]
    assert [r["run"] for r in runs if not r["problems"]] == ["p0.server.structured.c1.q0.r0"]
    summary = json.loads((out / "summary.json").read_text())
    assert summary["rows"][0]["runs"] == 1
    audit = cli("report", "--audit", out)
    assert audit.exit_code == 1
    assert "2 of 3 planned runs are missing" in audit.output
    assert audit.output.count("FINDING") == 1


@pytest.mark.full
def test_a_run_is_resumed_after_the_server_was_killed_and_started_again(models: Models, tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = ("bench", *BENCH, "--repeats", 2, "--out", out)
    with open_server(models, tmp_path / "first") as server:
        records = out / "records.jsonl"

        def kill_after_one_run() -> None:
            poll = threading.Event()
            while not poll.wait(0.02):
                if records.exists() and '"kind":"run"' in records.read_text():
                    os.killpg(server.process.pid, signal.SIGKILL)
                    return

        threading.Thread(target=kill_after_one_run, daemon=True).start()
        assert cli(*arguments, "--url", server.url).exit_code == 1
    with open_server(models, tmp_path / "second") as server:
        result = cli(*arguments, "--url", server.url)
    assert result.exit_code == 0, result.output
    complete = [r["run"] for r in read_records(out) if r["kind"] == "run" and not r["problems"]]
    assert complete == ["p0.server.structured.c1.q0.r0", "p0.server.structured.c1.q0.r1"]
    assert cli("report", "--audit", out).exit_code == 0
