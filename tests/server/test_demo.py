"""`dflash-verify demo` shows what the README says it shows, and its exit status says when it did not."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dflash_verify.cpu import demo

TIMEOUT_S = 280  # README says 90 s; this is for a machine that runs other suites beside


def test_the_demo_shows_each_width_partly_right_drafts_and_the_same_text() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dflash_verify.cli", "demo", "--json"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    arms = json.loads(done.stdout)["arms"]
    assert [(a["arm"], a["mean_width"], a["equal"]) for a in arms] == [
        ("stock", 7.0, True),
        ("width 3", 3.0, True),
        ("width 1", 1.0, True),
    ]
    for arm in arms:
        assert 1.3 <= arm["acceptance_length"] <= arm["mean_width"] + 0.9
    # A narrower verification needs more steps for the same text.
    assert arms[0]["steps"] < arms[1]["steps"] < arms[2]["steps"]
    assert "done" in done.stderr  # progress, also where there is no terminal


def results(**width_3: Any) -> dict[str, dict[str, Any]]:
    def arm(width: int) -> dict[str, Any]:
        return {"tokens": [[1, 2]], "steps": 9, "mean_width": float(width), "acceptance_length": 1.5}

    return {
        "no speculation": arm(0),
        "stock": arm(7),
        "width 3": arm(3) | width_3,
        "width 1": arm(1),
    }


@pytest.mark.parametrize(
    ("what", "status"),
    [
        ({}, 0),
        ({"tokens": [[1, 3]]}, 1),
        ({"mean_width": 2.9}, 1),
        ({"acceptance_length": 1.0}, 1),
        ({"acceptance_length": 4.0}, 1),
    ],
)
def test_the_exit_status_is_1_for_another_text_width_or_acceptance(
    monkeypatch: pytest.MonkeyPatch, what: dict[str, Any], status: int
) -> None:
    monkeypatch.setattr(demo, "_run_all", lambda folder, console: results(**what))
    ran = CliRunner().invoke(demo.demo, [])
    assert ran.exit_code == status, ran.output
    assert "equal to no" in ran.output
    assert "Where to go next" in ran.output
    assert max(map(len, ran.output.splitlines())) <= 120


def test_an_engine_that_fails_is_named_with_its_last_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho the drafter is gone >&2\nexit 3\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    ran = CliRunner().invoke(demo.demo, [])
    assert ran.exit_code == 1
    assert "ended with 3; its last lines:\nthe drafter is gone" in ran.output
