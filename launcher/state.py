"""What was started, in one small file, so that stop, status and logs need neither .env nor valid settings."""

import contextlib
import fcntl
import json
import os
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from launcher import dotenv
from launcher.errors import LaunchError
from launcher.settings import DEFAULTS

LET_GO_S = 6  # how long an interrupted start may clean up before stop does it itself


@dataclass(frozen=True)
class Started:
    """One server, as it was started.

    runtime: docker or host. containers: (role, ssh destination or empty, container name). digest: of the plan, empty for
    stock. watcher: process id of the watch, 0 for none. pid, pid_started: of the server without docker.
    """

    runtime: str
    containers: tuple[tuple[str, str, str], ...]
    ssh_port: str = ""
    ssh_key: str = ""
    ssh_config: str = ""
    url: str = "http://127.0.0.1:8000"
    config: str = ""
    plugin: bool = False
    ready: bool = False
    digest: str = ""
    watcher: int = 0
    pid: int = 0
    pid_started: str = ""


def folder(environ: Mapping[str, str] | None = None) -> Path:
    """Where the launcher keeps its state."""
    environ = os.environ if environ is None else environ
    base = environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "vllm-launcher"


def _file() -> Path:
    return folder() / "started.json"


def kept_log(role: str) -> Path:
    """Where the end of a rank's log is kept when its container is gone."""
    return folder() / f"{role}.last.log"


def save(started: Started) -> None:
    """Write the file as a whole or not at all."""
    path = _file()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(asdict(started), indent=1), encoding="utf-8")
    part.replace(path)


def read() -> Started | None:
    """What was started last and not stopped; None when nothing is known."""
    try:
        data = json.loads(_file().read_text(encoding="utf-8"))
        data["containers"] = tuple((str(role), str(ssh), str(name)) for role, ssh, name in data["containers"])
        return Started(**data)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def forget() -> None:
    _file().unlink(missing_ok=True)


def known_or_assumed(root: Path) -> Started:
    """What was started, or else what the settings say would have been, taken as leniently as possible: a settings file
    with a mistake in it must not keep anybody from stopping a server."""
    started = read()
    if started:
        return started
    values = dict(DEFAULTS)
    with contextlib.suppress(LaunchError):
        values |= dotenv.read(root / ".env") if (root / ".env").exists() else {}
    values |= {name: value for name, value in os.environ.items() if name in DEFAULTS}
    prefix = values["SERVER_NAME"] or DEFAULTS["SERVER_NAME"]
    containers = [("head", "", f"{prefix}-head")]
    # An address from the example file is nobody's host yet.
    if (
        values["NODES"] != "1"
        and (root / ".env").exists()
        and values["WORKER_HOST"]
        and values["WORKER_HOST"][0] != "-"
    ):
        containers.append(("worker", values["WORKER_HOST"], f"{prefix}-worker"))
    port = int(values["PORT"]) if values["PORT"].isascii() and values["PORT"].isdigit() else 8000
    return Started(
        runtime="host" if values["RUNTIME"] == "host" else "docker",
        containers=tuple(containers),
        ssh_port=values["SSH_PORT"] if values["SSH_PORT"].isdigit() else "",
        ssh_key=values["SSH_KEY"],
        ssh_config=values["SSH_CONFIG"],
        url=f"http://127.0.0.1:{port}",
    )


@contextlib.contextmanager
def lock(*, take_over: bool) -> Iterator[None]:
    """One start, stop or restart at a time. `take_over`: interrupt the one that runs; a start then cleans up."""
    try:
        folder().mkdir(parents=True, exist_ok=True, mode=0o700)
        file = open(folder() / "lock", "a+", encoding="utf-8")  # noqa: SIM115  (closed below)
    except OSError as error:
        raise LaunchError(
            f"{folder()} cannot be written ({error.strerror}): make it writable, or set XDG_STATE_HOME to another folder."
        ) from None
    with file:
        _acquire(file.fileno(), take_over)
        file.seek(0)
        file.truncate()
        file.write(str(os.getpid()))
        file.flush()
        yield


def _acquire(descriptor: int, take_over: bool) -> None:
    deadline = time.monotonic() + LET_GO_S
    told = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            owner = os.pread(descriptor, 20, 0).decode(errors="replace").strip()
        if not take_over:
            raise LaunchError(
                f"another start or stop is running here (process {owner or 'unknown'}): wait for it, or run ./start.sh stop."
            )
        if not told and owner.isdigit():
            told = True
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(int(owner), signal.SIGTERM)
        if time.monotonic() > deadline:
            return  # it hangs; stopping containers beside it does no harm
        time.sleep(0.1)
