"""Stops everything when a rank ends: half of a tensor-parallel model answers nothing and holds the other half's memory.

A small process of its own, begun by `start`, ended by `stop`. It keeps one waiting connection per host and asks nothing
in between. A host that is out of reach is not a rank that has ended: it keeps trying.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

from launcher import state
from launcher.hosts import Host, end
from launcher.runtimes import runtime

ASK_S = 20
POLL_S = 0.5
RETRY_S = 5
WORD = "watch-ranks"


def begin(root: Path) -> int:
    """Start the watch; its process id."""
    with open(state.folder() / "watch.log", "a", encoding="utf-8") as log:
        process = subprocess.Popen(
            [str(root / "start.sh"), WORD],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    return process.pid


def alive(pid: int) -> bool:
    """Whether that process is a watch, and not another one with a number used again."""
    try:
        return WORD in Path(f"/proc/{pid}/cmdline").read_text(errors="replace") if pid > 0 else False
    except OSError:
        return False


def stop(pid: int) -> None:
    """End the watch, with its connections."""
    if pid != os.getpid() and alive(pid):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGTERM)


def run() -> int:
    """Wait until a rank ends, then stop all of them."""
    from launcher import serve

    started = state.read()
    if started is None:
        return 0
    kind = runtime(started.runtime)
    names = {role: name for role, _, name in started.containers}
    hosts = serve.hosts_of(started)
    waiters: dict[Host, subprocess.Popen[str]] = {}
    lost: set[Host] = set()
    try:
        while True:
            for host in hosts:
                process = waiters.get(host)
                if process is None:
                    text = kind.wait(names[host.role])
                    waiters[host] = host.begin(text, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                    continue
                if process.poll() is None:
                    continue
                del waiters[host]
                found = host.run(kind.inspect(names[host.role]), ASK_S)
                if not found.ok:
                    # A host that does not answer is not a rank that has ended.
                    if host not in lost:
                        _say(f"{host.name} is out of reach; trying again every {RETRY_S} s.")
                    lost.add(host)
                    time.sleep(RETRY_S)
                elif found.out.startswith(("running", "restarting")):
                    lost.discard(host)
                else:
                    return _stop_all(started, host, names[host.role])
            time.sleep(POLL_S)
    finally:
        for process in waiters.values():
            end(process)


def _stop_all(started: state.Started, host: Host, name: str) -> int:
    from launcher import serve

    if state.read() is None:
        return 0  # stopped by hand
    _say(f"{host.name}: {name} has ended; stopping the other ranks and keeping its last lines.")
    serve.keep_logs(started)
    return serve.stop_started(started, quiet=True)


def _say(text: str) -> None:
    print(f"{datetime.now().isoformat(timespec='seconds')} {text}", file=sys.stderr, flush=True)
