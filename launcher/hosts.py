"""Runs shell text on a host, here or over ssh, always with a time limit.

The text goes to `sh` through standard input: secrets in it are seen in no process list, and no quoting is lost on the way.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from launcher.errors import LaunchError
from launcher.settings import DEFAULTS, PLUGIN_PREFIX, HostSettings, Settings

CONNECT_S = 5
# docker's last line, after the one that says why.
_ADVICE = re.compile(r"(?:See|Run) '\S+ .*--help'")
WIND_DOWN_S = 8
_T = TypeVar("_T")


# Commands of `Host.run` that have not ended, and whether each must not be cut short.
_running: dict[subprocess.Popen[str], bool] = {}


@dataclass(frozen=True)
class Result:
    """code: exit status, None when the time limit ran out. out, err: text without the final newline."""

    code: int | None
    out: str
    err: str

    @property
    def ok(self) -> bool:
        return self.code == 0


@dataclass(frozen=True)
class Host:
    """A place where commands run. ssh: destination, empty for this host."""

    role: str
    ssh: str = ""
    ssh_port: str = ""
    ssh_key: str = ""
    ssh_config: str = ""

    @classmethod
    def of(cls, host: HostSettings, settings: Settings) -> Host:
        return cls(host.role, host.ssh, settings["SSH_PORT"], settings["SSH_KEY"], settings["SSH_CONFIG"])

    @property
    def name(self) -> str:
        return f"{self.role} ({self.ssh})" if self.ssh else f"{self.role} (this host)"

    def argv(self) -> list[str]:
        """The process that reads shell text on this host."""
        if not self.ssh:
            return ["sh", "-s"]
        # Never ask for a password or a host key: a launcher that waits for a keyboard looks like one that hangs.
        options = [
            "-oBatchMode=yes",
            f"-oConnectTimeout={CONNECT_S}",
            "-oServerAliveInterval=5",
            "-oServerAliveCountMax=3",
        ]
        if self.ssh_config:
            options += ["-F", str(Path(self.ssh_config).expanduser())]
        if self.ssh_port:
            options += ["-p", self.ssh_port]
        if self.ssh_key:
            options += ["-i", str(Path(self.ssh_key).expanduser()), "-oIdentitiesOnly=yes"]
        return ["ssh", *options, "--", self.ssh, "sh -s"]

    def begin(self, text: str, **options: object) -> subprocess.Popen[str]:
        """Start shell text without waiting; its own session, so that Ctrl-C in the terminal does not reach it."""
        # A function, so that the shell has read everything before a command can touch its standard input.
        process = subprocess.Popen(  # type: ignore[call-overload]
            self.argv(),
            stdin=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
            env=clean_environment(),
            **options,
        )
        assert process.stdin is not None
        try:
            process.stdin.write(f"launch() {{\n{text}\n}}\nlaunch </dev/null\n")
            process.stdin.close()
        except BrokenPipeError:
            pass  # ssh has ended already; its status and message say why
        process.stdin = None
        return process  # type: ignore[no-any-return]

    def run(self, text: str, timeout_s: float, *, whole: bool = False) -> Result:
        """Run shell text; never raises for what the text does. `whole`: an interruption lets it finish (wind_down)."""
        process = self.begin(text, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        _running[process] = whole
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            end(process)
            return Result(None, "", f"no answer within {timeout_s:.0f} s")
        except BaseException:
            end(process)
            raise
        finally:
            _running.pop(process, None)
        return Result(process.returncode, out.rstrip("\n"), err.rstrip("\n"))

    def must(self, text: str, timeout_s: float, doing: str, *, whole: bool = False) -> str:
        """Run shell text and return what it printed; LaunchError says what could not be done, and why."""
        result = self.run(text, timeout_s, whole=whole)
        if not result.ok:
            raise LaunchError(self.complaint(result, doing))
        return result.out

    def complaint(self, result: Result, doing: str) -> str:
        """One sentence for a failed command; ssh's own failures in words of what to do about them."""
        if self.ssh and result.code == 255:
            return f"{self.name}: {_ssh_failure(result.err, self.ssh)}"
        lines = [line for line in result.err.splitlines() if line.strip()]
        lines = [line for line in lines if not _ADVICE.match(line)] or lines or ["no message"]
        why = next((line for line in lines if "no space left" in line.lower()), lines[-1]).strip().rstrip(".")
        hint = "free some disk space there" if "no space left" in why.lower() else "correct that and try again"
        return f"{self.name}: {doing} failed ({why[:300]}): {hint}."


def clean_environment() -> dict[str, str]:
    """The operator's environment without settings that were given inline: a command gets what its text says, and a
    stock server must not find a variable of the plugin."""
    return {n: v for n, v in os.environ.items() if n not in DEFAULTS and not n.startswith(PLUGIN_PREFIX)}


def end(process: subprocess.Popen[str]) -> None:
    """End a process of `begin` with everything it started here."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        try:
            process.wait(timeout=2)
            return
        except subprocess.TimeoutExpired:
            continue


def _ssh_failure(err: str, ssh: str) -> str:
    if re.search(r"permission denied|too many authentication", err, re.I):
        return f"ssh refused the key: run `ssh-copy-id {ssh}`, or set SSH_KEY."
    if "host key verification failed" in err.lower():
        return f"ssh does not know this host's key, or it changed: run `ssh {ssh}` once by hand and check it."
    if re.search(r"timed out|no route|unreachable|refused|could not resolve|lost|closed", err, re.I):
        why = err.splitlines()[-1].strip().rstrip(".") if err.strip() else "no answer"
        return f"cannot be reached by ssh ({why}): check cable, address, SSH_PORT and that the host is up."
    last = err.splitlines()[-1].strip() if err.strip() else "no message"
    return f"ssh failed ({last}): check WORKER_HOST, SSH_PORT and SSH_KEY."


def wind_down() -> None:
    """End what is running, after an interruption. A command that creates a container gets a moment to finish: cut short,
    it could create it on the other host after everything there has been stopped."""
    deadline = time.monotonic() + WIND_DOWN_S
    for process, whole in list(_running.items()):
        if whole:
            try:
                process.wait(timeout=max(deadline - time.monotonic(), 0.1))
                continue
            except subprocess.TimeoutExpired:
                pass
        end(process)


def on_all(hosts: Sequence[Host], work: Callable[[Host], _T]) -> list[_T]:
    """`work` on every host at the same time; results in the hosts' order, the first failure raised after all ended."""
    with ThreadPoolExecutor(max_workers=max(len(hosts), 1)) as pool:
        futures = [pool.submit(work, host) for host in hosts]
        try:
            wait(futures)
        except BaseException:
            wind_down()
            raise
        return [future.result() for future in futures]
