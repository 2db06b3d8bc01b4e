"""Stands in for `vllm serve`: says its plan digest, meets its other rank over TCP, then answers health, metrics and
completions. $STANDIN/behaviour.json can make it misbehave."""

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ARGUMENTS = sys.argv[1:]
BEHAVIOUR_FILE = Path(os.environ["STANDIN"]) / "behaviour.json"
BEHAVIOUR = json.loads(BEHAVIOUR_FILE.read_text()) if BEHAVIOUR_FILE.exists() else {}
WIDTHS = os.environ.get("DFLASH_VERIFY_TOKENS", "")
steps: dict[int, int] = {}


def option(name: str, default: str = "") -> str:
    return ARGUMENTS[ARGUMENTS.index(name) + 1] if name in ARGUMENTS else default


def width() -> int:
    """What the control file says, else what a server starts with."""
    path = Path(os.environ.get("DFLASH_CONTROL_FILE", "/nowhere"))
    if path.exists() and BEHAVIOUR.get("control") != "ignored":
        return int(json.loads(path.read_text())["width"])
    return 7 if WIDTHS.startswith("auto") else 3


def say_plan(rank: int) -> None:
    # The same on every rank with the same settings, as the plugin's digest is.
    agreed = {name: os.environ.get(name) for name in ("DFLASH_VERIFY_TOKENS", "DFLASH_TOKENS", "DFLASH_BLOCK_VERIFY")}
    digest = hashlib.sha256(json.dumps([agreed, option("--max-num-seqs")], sort_keys=True).encode()).hexdigest()[:12]
    digest = BEHAVIOUR.get("digest", digest)
    if digest:
        print(f"INFO dflash-verify: plan digest={digest} mode={WIDTHS} widths=[3] rank={rank}", flush=True)


class Api(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/metrics":
            lines = [f'dflash_verify_steps_total{{model_name="m",width="{w}"}} {n}.0' for w, n in steps.items()]
            self.answer("\n".join(["# TYPE dflash_verify_steps_total counter", *lines, ""]))
        else:
            self.answer("")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if BEHAVIOUR.get("completions") == "fail":
            self.answer("out of memory", 500)
            return
        if WIDTHS and BEHAVIOUR.get("completions") != "uncounted":
            steps[width()] = steps.get(width(), 0) + 8
        self.answer(json.dumps({"choices": [{"text": "x"}], "usage": {"completion_tokens": body["max_tokens"]}}))

    def answer(self, text: str, status: int = 200) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        return None


def main() -> None:
    print("starting", json.dumps(ARGUMENTS), flush=True)
    if BEHAVIOUR.get("term") == "ignore":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # An engine core that outlives a careless stop.
    subprocess.Popen(
        [sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"]
    )
    if code := BEHAVIOUR.get("exit"):
        print("ValueError: this model does not fit", flush=True)
        sys.exit(int(code))
    rank = int(option("--node-rank", "0"))
    if WIDTHS:
        say_plan(rank)
    meeting = (option("--master-addr"), int(option("--master-port", "0")))
    if rank:
        connect(meeting)
        threading.Event().wait()
    if option("--nnodes") == "2":
        with socket.create_server(meeting) as listener:
            listener.accept()
    if BEHAVIOUR.get("health") == "never":
        threading.Event().wait()
    print("serving", flush=True)
    ThreadingHTTPServer((option("--host"), int(option("--port"))), Api).serve_forever()


def connect(meeting: tuple[str, int]) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(meeting, timeout=5)
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


main()
