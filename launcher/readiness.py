"""READY means that completions come back at every concurrency, not that a port is open.

First requests can hang or compile (two boots of eight in one kit's notes), so they are sent here, before anybody else's:
every number of streams that has graphs of its own, at every captured width.
"""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from launcher.errors import LaunchError

DENSE_STREAMS = 32  # up to here every request count is a graph of its own
STREAM_STEP = 32
TOKENS = 16
FOLLOW_S = 20
SETTLE_S = 5
REQUEST_S = 600  # the first one may compile kernels
STEPS = re.compile(r'^dflash_verify_steps_total\{(?:[^}]*,)?width="(\d+)"[^}]*\} ([0-9.e+]+)', re.MULTILINE)
# From easy to hard to draft, so that a policy has reason to try more than one width.
PROMPTS = (
    "Count from 1 to 100, separated by commas: 1, 2, 3, 4, 5,",
    "Write a Python function that reverses a list. def reverse(items):",
    "An unlikely story about a lighthouse keeper and a comet begins so:",
)


@dataclass(frozen=True)
class Server:
    """Where the server listens and what it calls its model."""

    url: str
    model: str
    api_key: str = field(default="", repr=False)

    def get(self, path: str, timeout_s: float) -> str:
        """Body of a GET; OSError when there is none."""
        return self._fetch(urllib.request.Request(self.url + path), timeout_s)

    def healthy(self) -> bool:
        try:
            self.get("/health", 3)
        except (OSError, ValueError):
            return False
        return True

    def widths(self) -> dict[int, float]:
        """Steps per verify width so far, from the plugin's counter."""
        try:
            return {int(width): float(steps) for width, steps in STEPS.findall(self.get("/metrics", 10))}
        except (OSError, ValueError):
            return {}

    def complete(self, prompt: str) -> int:
        """Tokens of one completion; LaunchError when there are none."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            self.url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            return int(json.loads(self._fetch(request, REQUEST_S))["usage"]["completion_tokens"])
        except urllib.error.HTTPError as error:
            said = error.read(300).decode(errors="replace")
            raise LaunchError(f"a warm-up completion got HTTP {error.code} ({said}): see ./start.sh logs.") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LaunchError(f"a warm-up completion failed ({error}): see ./start.sh logs.") from None

    def _fetch(self, request: urllib.request.Request, timeout_s: float) -> str:
        if self.api_key:
            request.add_header("Authorization", f"Bearer {self.api_key}")
        # No proxy: the server is on this host, whatever http_proxy says.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=timeout_s) as response:
            return str(response.read().decode(errors="replace"))


def concurrencies(max_num_seqs: int) -> list[int]:
    """Numbers of streams to warm: each of the first 32, then every 32nd, and the last."""
    sparse = range(DENSE_STREAMS + STREAM_STEP, max_num_seqs, STREAM_STEP)
    return sorted({*range(1, min(max_num_seqs, DENSE_STREAMS) + 1), *sparse, max_num_seqs})


def warm_up(
    server: Server, max_num_seqs: int, widths: Sequence[int], switch: Callable[[int | None], None] | None = None
) -> list[int]:
    """Completions at every concurrency, at every captured width.

    widths: the captured ones, empty for stock. switch: sets the width of the running server, None returns it to its
    own choice; without it requests reach what the server chooses.

    Returns the captured widths that no step used; with `switch`, or with one width, there are none. LaunchError when a
    completion fails, or when the plugin counts no step where it should.
    """
    rounds: list[int | None] = list(widths) if switch else [None]
    for width in rounds:
        if switch and width is not None:
            switch(width)
            _follow(server, width)
        for streams in concurrencies(max_num_seqs):
            _complete_together(server, streams)
    if switch:
        switch(None)
    if not widths:
        return []
    used = {width for width, steps in _settled_widths(server).items() if steps > 0}
    if not used & set(widths):
        raise LaunchError(
            f"the warm-up ran, but /metrics counts no step at a width of {', '.join(map(str, widths))} "
            f"(found {sorted(used) or 'none'}): the plugin is not in charge, run ./start.sh check."
        )
    return sorted(set(widths) - used)


def _complete_together(server: Server, streams: int) -> None:
    with ThreadPoolExecutor(max_workers=streams) as pool:
        counts = list(pool.map(server.complete, [PROMPTS[(streams + i) % len(PROMPTS)] for i in range(streams)]))
    if min(counts) < 1:
        raise LaunchError(f"a warm-up completion at {streams} streams came back empty: see ./start.sh logs.")


def _follow(server: Server, width: int) -> None:
    """Completions until the server uses the width that it was switched to; it looks at the switch now and then."""
    deadline = time.monotonic() + FOLLOW_S
    before = server.widths().get(width, 0)
    while time.monotonic() < deadline:
        _complete_together(server, 1)
        if server.widths().get(width, 0) > before:
            return
    raise LaunchError(
        f"width {width} is captured and the server did not use it within {FOLLOW_S} s when it was switched to it: "
        "see ./start.sh logs for what it says about its control file."
    )


def _settled_widths(server: Server) -> dict[int, float]:
    """The plugin's counters, which vLLM may publish some time after the last step."""
    deadline = time.monotonic() + SETTLE_S
    while not (widths := server.widths()) and time.monotonic() < deadline:
        time.sleep(0.5)
    return widths
