"""Over HTTP: a real server at width 3 streams, counts, keeps the width beside guided requests, and ends when told to."""

import json
import signal
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dflash_verify.cpu.models import Models
from dflash_verify.cpu.server import MODEL_NAME, Server, open_server
from dflash_verify.cpu.trace import Step, shortened

WIDTH = 3
PROMPT = "The quick brown fox"

NUMBERS = list(range(1, 41))
EXACTLY_THE_NUMBERS = {
    "type": "array",
    "prefixItems": [{"const": n} for n in NUMBERS],
    "items": False,
    "minItems": len(NUMBERS),
    "maxItems": len(NUMBERS),
}
CITIES = ["Paris", "Oslo", "Lima"]
GET_WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": CITIES},
                "days": {"type": "integer", "minimum": 1, "maximum": 7},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


def completion(max_tokens: int, **fields: Any) -> dict[str, Any]:
    return {
        "model": MODEL_NAME,
        "prompt": PROMPT,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        **fields,
    }


def chat(content: str, max_tokens: int, **fields: Any) -> dict[str, Any]:
    message = {"role": "user", "content": content}
    return {"model": MODEL_NAME, "messages": [message], "max_tokens": max_tokens, "temperature": 0, **fields}


def new_steps(server: Server, act: Callable[[], None]) -> list[Step]:
    """The engine's steps during `act`."""
    before = len(server.steps())
    act()
    return server.steps()[before:]


def test_a_streamed_completion_is_the_same_text_in_more_than_one_piece(server: Server) -> None:
    events = list(server.stream("/v1/completions", completion(48, stream_options={"include_usage": True})))
    pieces = [event["choices"][0]["text"] for event in events if event["choices"]]
    # One event per step at most, and a step emits up to width + 1 tokens.
    assert len(pieces) >= 48 / (WIDTH + 1)
    assert events[-1]["usage"]["completion_tokens"] == 48
    whole = server.post("/v1/completions", completion(48))
    assert "".join(pieces) == whole["choices"][0]["text"]


def test_ordinary_traffic_verifies_three_drafts_per_draft_by_vllms_own_counters(server: Server) -> None:
    before = server.metrics()

    def traffic() -> None:
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda n: server.post("/v1/completions", completion(n, prompt=f"prompt {n}")), (24, 32, 40)))

    steps = new_steps(server, traffic)
    after = server.metrics()
    drafts, tokens, accepted = (
        after[name] - before.get(name, 0.0)
        for name in (
            "vllm:spec_decode_num_drafts_total",
            "vllm:spec_decode_num_draft_tokens_total",
            "vllm:spec_decode_num_accepted_tokens_total",
        )
    )
    assert drafts > 0
    assert tokens == WIDTH * drafts
    assert 1.3 <= 1 + accepted / drafts <= WIDTH + 0.9
    assert shortened(steps, WIDTH) == Counter()


def test_our_counters_reach_the_metrics_endpoint(server: Server) -> None:
    server.post("/v1/completions", completion(16))
    metrics = server.metrics()
    assert metrics["dflash_verify_steps_total"] > 0
    assert metrics["dflash_verify_policy_active"] == 1


def test_guided_requests_beside_an_ordinary_one_have_its_width_and_are_valid(server: Server) -> None:
    """W2: one guided request never changes what the rest of the batch pays, nor the other way round."""
    alone = server.post("/v1/completions", completion(400))["choices"][0]["text"]
    answers: dict[str, Future[Any]] = {}

    def traffic() -> None:
        streaming = threading.Event()

        def ordinary() -> str:
            text = ""
            for event in server.stream("/v1/completions", completion(400)):
                text += event["choices"][0]["text"]
                streaming.set()
            return text

        with ThreadPoolExecutor(3) as pool:
            answers["ordinary"] = pool.submit(ordinary)
            assert streaming.wait(60)
            schema = {"name": "numbers", "schema": EXACTLY_THE_NUMBERS, "strict": True}
            answers["numbers"] = pool.submit(
                server.post,
                "/v1/chat/completions",
                chat("count", 200, response_format={"type": "json_schema", "json_schema": schema}),
            )
            answers["tool"] = pool.submit(
                server.post,
                "/v1/chat/completions",
                chat(
                    "weather?",
                    200,
                    tools=[GET_WEATHER],
                    tool_choice="required",
                    parallel_tool_calls=False,
                ),
            )

    steps = new_steps(server, traffic)

    numbers = answers["numbers"].result()["choices"][0]
    assert json.loads(numbers["message"]["content"]) == NUMBERS
    (call,) = answers["tool"].result()["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    arguments = json.loads(call["function"]["arguments"])
    assert set(arguments) == {"city", "days"}
    assert arguments["city"] in CITIES
    assert arguments["days"] in range(1, 8)
    assert answers["ordinary"].result() == alone

    together = [
        step
        for step in steps
        if any(row.guided and not row.prefill for row in step.requests)
        and any(not row.guided and not row.prefill for row in step.requests)
    ]
    assert len(together) >= len(NUMBERS)
    assert {row.drafts for step in together for row in step.requests if not row.prefill} == {WIDTH}
    assert shortened(steps, WIDTH) == Counter()
    # The grammar did shorten what was verified, with its padding inside the same rows.
    assert any(row.invalid for step in together for row in step.requests if row.guided)
    log = server.log.read_text(errors="replace")
    complaints = [
        line for line in log.splitlines() if "grammar" in line.lower() and ("ERROR" in line or "WARN" in line)
    ]
    assert complaints == []
    assert "Traceback" not in log


def test_sigterm_while_decoding_ends_the_whole_process_tree_cleanly(models: Models, tmp_path: Path) -> None:
    with open_server(models, tmp_path, environ={"DFLASH_VERIFY_TOKENS": str(WIDTH)}) as server:
        decoding = threading.Event()

        def client() -> None:
            try:
                for _ in server.stream("/v1/completions", completion(900)):
                    decoding.set()
            except OSError:
                pass  # cut off, as it may be

        with ThreadPoolExecutor(1) as pool:
            ended = pool.submit(client)
            assert decoding.wait(60)
            # The cleanup grace of 10 s (environment.py) and as much again.
            assert server.stop(timeout_s=20) in (0, -signal.SIGTERM)
            ended.result(timeout=10)
        assert not server.group_is_alive()
        log = server.log.read_text(errors="replace")
    assert "DFLASH_VERIFY_TOKENS=3" in log or "dflash-verify" in log  # it was a server under a width
    # The API server may notice that its engine has ended before it is told to end itself; vLLM then logs its own
    # EngineDeadError for the request that was cut off. Nothing else may have failed, and nothing of the plugin's.
    assert log.count("Traceback") == log.count("EngineDeadError: ")
    assert "/dflash_verify/" not in "".join(part for part in log.splitlines(keepends=True) if 'File "' in part)


def test_a_width_that_cannot_be_honoured_stops_the_server_with_one_sentence(models: Models, tmp_path: Path) -> None:
    from dflash_verify.cpu.server import ServerError

    with (
        pytest.raises(ServerError, match="before it served"),
        open_server(models, tmp_path, environ={"DFLASH_VERIFY_TOKENS": "9"}),
    ):
        raise AssertionError("it served")
    log = (tmp_path / "server.log").read_text(errors="replace")
    assert "DFLASH_VERIFY_TOKENS=9" in log
    assert "Loading safetensors" not in log  # before weights
