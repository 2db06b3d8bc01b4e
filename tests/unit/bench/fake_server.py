"""A tiny stand-in for a vLLM server with the plugin: streams, counters, control file, and the ways in which they fail.

One engine "step" gives every running request 1 to K+1 tokens; how many drafts are accepted is drawn from a seed that
depends on prompt and position only, so that the text is the same for every width.
"""

import json
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

DRAFT = 7
SURVIVAL = (0.8, 0.6, 0.45, 0.3, 0.2, 0.15, 0.1)


@dataclass
class Behaviour:
    """What the server does; tests change it while it runs."""

    width: int | str = DRAFT
    control_file: Path | None = None
    plugin: bool = True
    api_key: str | None = None
    step_s: float = 0.001
    step_s_per_width: float = 0.0001
    first_token_s: float = 0.0
    stall_after_tokens: int | None = None
    cut_after_tokens: int | None = None
    eos_after_tokens: int | None = None
    foreign_tokens: int = 0
    text_depends_on_width: bool = False
    json_text: str = '{"name":"nail","colour":"grey","stock":3}'
    metrics_status: int = 200
    identity: float = 1000.0
    requests: list[dict[str, Any]] = field(default_factory=list)


class FakeServer:
    """Context manager; `url` while inside."""

    def __init__(self, port: int = 0, **behaviour: Any) -> None:
        self.behaviour = Behaviour(**behaviour)
        self.lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.steps: Counter[int] = Counter()
        self.seconds: Counter[int] = Counter()
        self.verified: Counter[int] = Counter()
        self.accepted: Counter[int] = Counter()
        self.running = 0
        handler = type("Handler", (_Handler,), {"fake": self})
        self.http = ThreadingHTTPServer(("127.0.0.1", port), handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"

    def __enter__(self) -> "FakeServer":
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.http.shutdown()
        self.http.server_close()

    def current_width(self) -> int | str:
        path = self.behaviour.control_file
        if path is not None and path.exists():
            return json.loads(path.read_text())["width"]
        return self.behaviour.width

    def metrics(self) -> str:
        b = self.behaviour
        with self.lock:
            lines = [
                f"process_start_time_seconds {b.identity}",
                f'vllm:num_requests_running{{engine="0"}} {self.running}',
                'vllm:num_requests_waiting{engine="0"} 0',
                f'vllm:generation_tokens_total{{engine="0"}} {self.counts["tokens"]}',
                'vllm:num_preemptions_total{engine="0"} 0',
                'vllm:prefix_cache_hits_total{engine="0"} 0',
                f'vllm:spec_decode_num_drafts_total{{engine="0"}} {self.counts["drafts"]}',
                f'vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {self.counts["draft_tokens"]}',
                f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {self.counts["accepted"]}',
                *(
                    f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="{p}"}} {self.accepted[p]}'
                    for p in range(DRAFT)
                ),
            ]
            if b.plugin:
                lines += [
                    'dflash_verify_info{mode="auto",overlays="plan,metrics",release="0.33.0"} 1',
                    f"dflash_verify_policy_active {int(self.current_width() == 'auto')}",
                    "dflash_verify_nonuniform_steps_total 0",
                    'dflash_verify_last_decision_info{reason="3: 2.7 tok / 9 ms beats 7"} 1',
                    *(f'dflash_verify_steps_total{{width="{w}"}} {n}' for w, n in self.steps.items()),
                    *(f'dflash_verify_timed_steps_total{{width="{w}"}} {n}' for w, n in self.steps.items()),
                    *(f'dflash_verify_step_seconds_total{{width="{w}"}} {s}' for w, s in self.seconds.items()),
                    *(
                        f'dflash_verify_verified_tokens_total{{position="{p}"}} {self.verified[p]}'
                        for p in range(DRAFT)
                    ),
                    *(
                        f'dflash_verify_accepted_tokens_total{{position="{p}"}} {self.accepted[p]}'
                        for p in range(DRAFT)
                    ),
                ]
        return "\n".join(lines) + "\n"

    def step(self, draw: random.Random, index: int) -> tuple[int, int]:
        """One decoding step of one request: (width, tokens). The draws do not depend on the width."""
        chosen = self.current_width()
        width = {"stock": DRAFT, "auto": 7 if index % 2 else 3}.get(chosen, chosen)
        assert isinstance(width, int)
        u = draw.random()
        accepted = sum(u < s for s in SURVIVAL[:width])
        duration_s = self.behaviour.step_s + width * self.behaviour.step_s_per_width
        time.sleep(duration_s)
        with self.lock:
            self.steps[width] += 1
            self.seconds[width] += duration_s
            self.counts["drafts"] += bool(width)
            self.counts["draft_tokens"] += width
            self.counts["accepted"] += accepted
            for p in range(width):
                self.verified[p] += 1
                self.accepted[p] += p < accepted
        return width, accepted + 1


class _Handler(BaseHTTPRequestHandler):
    fake: FakeServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *args: Any) -> None:
        pass

    def _answer(self, status: int, body: str, kind: str = "application/json") -> None:
        data = body.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _authorised(self) -> bool:
        key = self.fake.behaviour.api_key
        if key is None or self.headers.get("Authorization") == f"Bearer {key}":
            return True
        self._answer(401, '{"error":"Unauthorized"}')
        return False

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self._answer(self.fake.behaviour.metrics_status, self.fake.metrics(), "text/plain")
        elif self.path == "/version":
            self._answer(200, '{"version":"0.33.0"}')
        elif self.path == "/v1/models" and self._authorised():
            self._answer(200, json.dumps({"data": [{"id": "tiny", "root": "models/tiny", "max_model_len": 512}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._authorised():
            return
        fake, b = self.fake, self.fake.behaviour
        with fake.lock:
            b.requests.append(body)
            fake.running += 1
        try:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            self._stream(body)
        except (BrokenPipeError, ConnectionResetError):
            pass
        finally:
            with fake.lock:
                fake.running -= 1
            self.close_connection = True

    def _stream(self, body: dict[str, Any]) -> None:
        fake, b = self.fake, self.fake.behaviour
        prompt = body["messages"][0]["content"]
        sampled = body.get("temperature", 0) > 0
        draw = random.Random(f"{prompt}{body.get('seed') if sampled else ''}")
        letters = random.Random(f"text {prompt}{body.get('seed') if sampled else ''}")
        guided = "response_format" in body
        limit = body["max_tokens"]
        finish = "length"
        if b.eos_after_tokens is not None and not guided:
            limit, finish = min(limit, b.eos_after_tokens), "stop"
        whole = b.json_text if guided else "".join(letters.choice("etaoin shrdlu") for _ in range(limit))
        if guided:
            limit, finish = min(limit, len(whole)), "stop" if len(whole) <= limit else "length"
        time.sleep(b.first_token_s)
        done = index = 0
        while done < limit:
            width, tokens = fake.step(draw, index)
            tokens = min(tokens, limit - done)
            text = whole[done : done + tokens]
            if b.text_depends_on_width and width != DRAFT:
                text = text.upper()
            done, index = done + tokens, index + 1
            with fake.lock:
                fake.counts["tokens"] += tokens
            self._send(
                {
                    "choices": [{"delta": {"content": text}, "finish_reason": finish if done == limit else None}],
                    "usage": {"prompt_tokens": 9, "completion_tokens": done},
                }
            )
            if b.stall_after_tokens is not None and done >= b.stall_after_tokens:
                threading.Event().wait(1)  # longer than any stall limit a test sets
                return
            if b.cut_after_tokens is not None and done >= b.cut_after_tokens:
                self.connection.close()
                return
        with fake.lock:
            fake.counts["tokens"] += b.foreign_tokens
        self._send({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": done}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _send(self, chunk: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        self.wfile.flush()
