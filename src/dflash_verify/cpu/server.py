"""A real `vllm serve` process tree on a CPU, with the tiny models: start, wait, ask, stop, and never leave one behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_verify.cpu import trace
from dflash_verify.cpu.engine import speculative_config
from dflash_verify.cpu.environment import child_environment
from dflash_verify.cpu.models import Drafter, Models

MODEL_NAME = "tiny"
POLL_S = 0.1

SERVE_FLAGS = (
    *("--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "4"),
    *("--max-num-batched-tokens", "512", "--block-size", "16", "--kv-cache-memory-bytes", str(16 << 20)),
    *("--no-enable-prefix-caching", "--seed", "0"),
    # A grammar that allows any white space lets a model with random weights write blanks until its tokens are used up.
    *("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}'),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
)


class ServerError(RuntimeError):
    """The server did not start, answer or stop; the message ends with the last lines of its log."""


@dataclass(frozen=True)
class Server:
    """A running server. Everything it started is in its process group, whose id is the process's."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path
    trace_file: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def steps(self) -> list[trace.Step]:
        """What its scheduler has done so far."""
        return list(trace.read(self.trace_file)) if self.trace_file.exists() else []

    def metrics(self) -> dict[str, float]:
        """Counters and gauges of /metrics by name, summed over their labels."""
        from prometheus_client.parser import text_string_to_metric_families

        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as response:
            text = response.read().decode()
        values: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                values[sample.name] = values.get(sample.name, 0.0) + sample.value
        return values

    def post(self, path: str, body: Mapping[str, Any], timeout_s: float = 120) -> Any:
        """The JSON answer to a JSON request. Raises ServerError with the server's words for an HTTP error."""
        with self._open(path, body, timeout_s) as response:
            return json.load(response)

    def stream(self, path: str, body: Mapping[str, Any], timeout_s: float = 120) -> Iterator[dict[str, Any]]:
        """The events of a streamed answer, one at a time."""
        with self._open(path, {**body, "stream": True}, timeout_s) as response:
            for line in response:
                data = line.decode().strip().removeprefix("data: ")
                if data and data != "[DONE]":
                    yield json.loads(data)

    def _open(self, path: str, body: Mapping[str, Any], timeout_s: float) -> Any:
        request = urllib.request.Request(
            self.url + path, json.dumps(dict(body)).encode(), {"Content-Type": "application/json"}
        )
        try:
            return urllib.request.urlopen(request, timeout=timeout_s)
        except urllib.error.HTTPError as error:
            raise ServerError(f"HTTP {error.code} for {path}: {error.read().decode()[:600]}") from None

    def tail(self, lines: int = 30) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def wait_until_ready(self, timeout_s: float) -> None:
        """Until /health answers. Raises ServerError when the server ends before, or does not answer in time."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise ServerError(f"vllm serve ended with {self.process.returncode} before it served:\n{self.tail()}")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except OSError:
                time.sleep(POLL_S)
        raise ServerError(f"vllm serve did not answer /health within {timeout_s:.0f} s:\n{self.tail()}")

    def group_is_alive(self) -> bool:
        """Whether any process of the tree is left: EngineCore survives a killed API server."""
        try:
            os.killpg(self.process.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def stop(self, timeout_s: float = 30) -> int:
        """SIGTERM to the API server, as a launcher sends it; returns its exit status when the whole tree is gone.

        Raises ServerError, after killing what is left, when that takes longer than `timeout_s`.
        """
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None and not self.group_is_alive():
                return self.process.returncode
            time.sleep(POLL_S)
        self.kill()
        raise ServerError(f"vllm serve had not ended {timeout_s:.0f} s after SIGTERM:\n{self.tail()}")

    def kill(self) -> None:
        """SIGKILL to all of it."""
        if self.group_is_alive():
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(timeout=30)


def free_port() -> int:
    """A TCP port of 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def open_server(
    models: Models,
    folder: Path,
    drafter: Drafter | None = "dflash2",
    speculative: Mapping[str, Any] | None = None,
    flags: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    ready_timeout_s: float = 300,
) -> Iterator[Server]:
    """A server that answers; log and trace are written to `folder`. It is killed on the way out unless stopped before.

    flags: on top of SERVE_FLAGS. environ: on top of this process's environment, for example DFLASH_VERIFY_TOKENS.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port, log, trace_file = free_port(), folder / "server.log", folder / "trace.jsonl"
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(models.target)),
        *("--served-model-name", MODEL_NAME, "--host", "127.0.0.1", "--port", str(port)),
        *SERVE_FLAGS,
    ]
    if drafter is not None:
        config = speculative_config(models, drafter, **(speculative or {}))
        command += ["--speculative-config", json.dumps(config)]
    env = child_environment(extra={trace.TRACE_VARIABLE: str(trace_file), **(environ or {})})
    env.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)  # `activate` sets it for in-process engines
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *flags], env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    server = Server(process, port, log, trace_file)
    try:
        server.wait_until_ready(ready_timeout_s)
        yield server
    finally:
        server.kill()
