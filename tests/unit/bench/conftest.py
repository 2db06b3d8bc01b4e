"""A fake server for the measuring tools, and the command line as a user runs it."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dflash_verify.cli import main

# The tests are collected with --import-mode=importlib, so a module beside them is loaded by its path.
_spec = importlib.util.spec_from_file_location("bench_fake_server", Path(__file__).with_name("fake_server.py"))
fake_server = importlib.util.module_from_spec(_spec)
sys.modules["bench_fake_server"] = fake_server
_spec.loader.exec_module(fake_server)


@pytest.fixture
def serve():
    """Start fake servers with a behaviour; all are stopped at the end of the test."""
    started = []

    def start(**behaviour: Any):
        server = fake_server.FakeServer(**behaviour)
        server.__enter__()
        started.append(server)
        return server

    yield start
    for server in started:
        server.__exit__()


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    def run(*arguments: Any) -> Result:
        return CliRunner().invoke(main, [str(a) for a in arguments], catch_exceptions=False)

    return run


QUICK = ("--max-tokens", 60, "--sample-s", 0.1)


@pytest.fixture
def quick() -> tuple[Any, ...]:
    """Options that make a run short."""
    return QUICK
