"""With DFLASH_VERIFY_TOKENS unset, blank or 0, vLLM is as it is where dflash-verify is not installed.

Processes that have served a request are compared: every attribute of every vllm module, the log, statistics settings.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dflash_verify.cpu.environment import child_environment
from dflash_verify.cpu.models import Models

PROGRAM = Path(__file__).with_name("served_state.py")
VARIANTS: Mapping[str, Mapping[str, str]] = {
    "not installed": {"HIDE_PLUGIN": "1"},
    "unset": {},
    "0": {"DFLASH_VERIFY_TOKENS": "0"},
    "blank": {"DFLASH_VERIFY_TOKENS": ""},
}


@pytest.fixture(scope="module")
def served(models: Models) -> dict[str, tuple[dict[str, Any], list[str]]]:
    """What the program said, and its log without what differs from run to run, for each variant."""

    def run(variant: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
        env = child_environment(
            extra={"VLLM_LOGGING_LEVEL": "INFO", "VLLM_LOGGING_STREAM": "ext://sys.stderr", **variant}
        )
        done = subprocess.run(
            [sys.executable, str(PROGRAM), str(models.root)],
            env=env,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1]), log_lines(done.stderr)

    with ThreadPoolExecutor(max_workers=max(1, min(2, os.cpu_count() or 1))) as pool:
        return dict(zip(VARIANTS, pool.map(run, VARIANTS.values()), strict=True))


def log_lines(text: str) -> list[str]:
    """vLLM's lines without times, process ids, ports, durations and random names: no word with a digit in it."""
    return [
        re.sub(r"\w*\d[\w.]*", "#", line) for line in text.splitlines() if re.search(r"(INFO|WARNING|ERROR) \d", line)
    ]


@pytest.mark.parametrize("variant", ["unset", "0", "blank"])
class TestStock:
    def test_every_attribute_of_every_vllm_module_is_that_of_an_install_without_us(
        self, served: dict[str, Any], variant: str
    ) -> None:
        stock, _ = served["not installed"]
        found, _ = served[variant]
        assert len(stock["modules"]) > 500  # a served request loads that much
        assert found["modules"].keys() == stock["modules"].keys()
        different = [
            f"{module}.{name}"
            for module, attributes in stock["modules"].items()
            for name in attributes.keys() | found["modules"][module].keys()
            if attributes.get(name) != found["modules"][module].get(name)
        ]
        assert different == []

    def test_nothing_of_ours_is_loaded_but_the_entry_point(self, served: dict[str, Any], variant: str) -> None:
        assert served[variant][0]["ours"] == ["dflash_verify", "dflash_verify.plugin"]

    def test_log_lines_are_those_of_an_install_without_us(self, served: dict[str, Any], variant: str) -> None:
        assert len(served[variant][1]) > 10
        assert served[variant][1] == served["not installed"][1]

    @pytest.mark.parametrize("what", ["statistics", "classes", "config", "environment", "text"])
    def test_settings_are_those_of_an_install_without_us(self, served: dict[str, Any], variant: str, what: str) -> None:
        assert served[variant][0][what] == served["not installed"][0][what]


def test_the_comparison_sees_a_width(models: Models) -> None:
    """The same program under a width: what is compared above is able to differ."""
    env = child_environment(extra={"DFLASH_VERIFY_TOKENS": "3", "VLLM_LOGGING_LEVEL": "INFO"})
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(models.root)],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    method = found["modules"]["vllm.engine.arg_utils"]["EngineArgs"][3]["create_speculative_config"]
    assert method[1] != "EngineArgs.create_speculative_config" or method[3]
    assert "dflash_verify.overlays" in found["ours"]
    assert "dflash-verify" in done.stderr + done.stdout
