"""The series of a width on `/metrics` of real servers: one API server, two of them, and statistics switched off."""

import re
import time
import urllib.request
from pathlib import Path

import pytest

from dflash_verify.bench.endpoint import Snapshot, parse_metrics
from dflash_verify.cpu.models import Models
from dflash_verify.cpu.server import MODEL_NAME, Server, open_server

CHAT = {
    "model": MODEL_NAME,
    "messages": [{"role": "user", "content": "Count from 1 to 200."}],
    "max_tokens": 40,
    "temperature": 0,
    "ignore_eos": True,
}


def page(server: Server) -> str:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as response:
        text: str = response.read().decode()
    return text


def settled(server: Server, tokens: int) -> Snapshot:
    """The counters follow the answer by an instant."""
    deadline = time.monotonic() + 10
    while True:
        found = parse_metrics(page(server))
        if found.generation_tokens >= tokens or time.monotonic() > deadline:
            return found


def test_a_static_width_counts_steps_and_positions(server: Server) -> None:
    before = parse_metrics(page(server))
    server.post("/v1/chat/completions", CHAT)
    after = settled(server, int(before.generation_tokens) + 40)
    steps = after.steps["3"] - before.steps.get("3", 0)
    assert set(after.steps) == {"3"}
    verified = [a - b for a, b in zip(after.verified, before.verified or (0,) * 7, strict=True)]
    accepted = [a - b for a, b in zip(after.accepted, before.accepted or (0,) * 7, strict=True)]
    # One request: every step verified each of the three positions once and gave 1 + accepted tokens; the first token
    # came from the prefill, and the last step may have been cut at 40.
    assert verified[:3] == [steps] * 3
    assert verified[3:] == [0] * 4
    assert 40 <= 1 + steps + sum(accepted) <= 43
    assert after.info is not None
    assert after.info["mode"] == "3"
    assert after.policy_active == 1
    # Without a control file there is no label that changes with every decision.
    assert "last_decision_info" not in page(server)


@pytest.mark.full
def test_two_api_servers_count_every_step_once(models: Models, tmp_path: Path) -> None:
    environ = {"DFLASH_VERIFY_TOKENS": "3"}
    with open_server(models, tmp_path, environ=environ, flags=("--api-server-count", "2")) as server:
        requests = 6
        for _ in range(requests):
            server.post("/v1/chat/completions", CHAT)
        found = settled(server, 40 * requests)
        steps = found.steps["3"]
        assert found.verified[0] == steps  # one request at a time
        assert 40 * requests <= requests + steps + sum(found.accepted) <= 43 * requests
        assert found.policy_active == 1
        assert len(re.findall(r"^dflash_verify_info\{", page(server), re.M)) == 1


@pytest.mark.full
def test_statistics_that_are_off_stay_off(models: Models, tmp_path: Path) -> None:
    environ = {"DFLASH_VERIFY_TOKENS": "3"}
    with open_server(models, tmp_path, environ=environ, flags=("--disable-log-stats",)) as server:
        server.post("/v1/chat/completions", CHAT)
        text = page(server)
        # vLLM keeps counters of its tool parser whatever the switch says.
        assert "vllm:generation_tokens" not in text
        assert "dflash_verify_" not in text
