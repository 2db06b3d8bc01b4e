"""Two hosts on one machine: network namespaces with a cable (a veth pair) between them and a real sshd in the second.

Without the privilege for namespaces, two loopback addresses stand for the hosts; pytest's header says so. All traffic
stays on loopback or inside the namespaces.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STANDIN = Path(__file__).parent / "standin"
SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
SSH_PORT = 22022
PORT = 18473
COMMAND_S = 90
CHECK = {"ok": True, "overlays": []}
PLAN = {
    "widths": [3],
    "graphs": {"total": 16, "gib": 0.1, "gib_hybrid": 0.2},
    "capture_sizes": [4, 8, 12, 16, 24],
    "notes": [],
}


def until(promise: Callable[[], object], within_s: float = 20) -> None:
    """Poll until it holds; a deadline, not a sleep, decides."""
    deadline = time.monotonic() + within_s
    while not promise():
        assert time.monotonic() < deadline, f"not within {within_s} s"
        time.sleep(0.05)


_METRICS = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1]).read().decode())"


@dataclass(frozen=True)
class Cable:
    """head, worker: addresses. enter: role -> words that run a command on that host."""

    head: str
    worker: str
    nowhere: str  # an address on the same wire that nobody has
    namespaces: dict[str, str] = field(default_factory=dict)

    def enter(self, role: str) -> list[str]:
        return ["ip", "netns", "exec", self.namespaces[role]] if self.namespaces else []


def _namespaces() -> Cable | None:
    """The cable between two namespaces; None without the privilege or the tools."""
    names = {role: f"dfv{role[0]}{os.getpid()}" for role in ("head", "worker")}
    wires = {role: f"dfv{role[0]}{os.getpid() % 100000}" for role in names}
    cable = Cable("10.213.77.1", "10.213.77.2", "10.213.77.99", names)
    commands = [["ip", "netns", "add", name] for name in names.values()]
    commands.append(["ip", "link", "add", wires["head"], "type", "veth", "peer", "name", wires["worker"]])
    for role, address in (("head", cable.head), ("worker", cable.worker)):
        inside = ["ip", "-n", names[role]]
        commands += [
            ["ip", "link", "set", wires[role], "netns", names[role]],
            [*inside, "address", "add", f"{address}/24", "dev", wires[role]],
            [*inside, "link", "set", wires[role], "up"],
            [*inside, "link", "set", "lo", "up"],
        ]
    try:
        for command in commands:
            subprocess.run(command, check=True, capture_output=True)
        subprocess.run([*cable.enter("head"), "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        _remove(cable)
        return None
    return cable


def _remove(cable: Cable) -> None:
    for name in cable.namespaces.values():
        with contextlib.suppress(OSError):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def pytest_report_header() -> str:
    made = _namespaces()
    if made:
        _remove(made)
    kind = "two network namespaces" if made else "two loopback addresses, since this user may not make namespaces"
    return f"launcher: {kind}; sshd: {SSHD if Path(SSHD).exists() else 'missing, the end-to-end tests are skipped'}"


@pytest.fixture(scope="session")
def cable() -> Iterator[Cable]:
    if not Path(SSHD).exists() or not shutil.which("ssh"):
        pytest.skip("no sshd or ssh: install openssh-server and openssh-client")
    found = _namespaces() or Cable("127.0.0.1", "127.0.0.2", "127.0.0.3")
    yield found
    _remove(found)


class Hosts:
    """Head and worker with their stand-ins, a checkout of the launcher, and a settings file."""

    def __init__(self, tmp: Path, cable: Cable) -> None:
        self.tmp, self.cable = tmp, cable
        self.root = tmp / "checkout"
        self.root.mkdir()
        shutil.copy(ROOT / "start.sh", self.root)
        for name in ("launcher", "overlays", "pyproject.toml", ".env.example"):
            (self.root / name).symlink_to(ROOT / name)
        # A copy: somebody may be editing the plugin, which is part of what makes two starts the same.
        shutil.copytree(ROOT / "src", self.root / "src", ignore=shutil.ignore_patterns("__pycache__"))
        for role in ("head", "worker"):
            (self.folder(role) / "containers").mkdir(parents=True)
            (self.folder(role) / "home").mkdir()
            (self.folder(role) / "image-id").write_text("sha256:" + "5" * 64)
            # What the plugin's commands print; without this file the stand-in runs them for real, which takes seconds.
            (self.folder(role) / "canned.json").write_text(json.dumps({"check": CHECK, "plan": PLAN}))
        self._programs()
        self._ssh_keys()
        self.sshd: subprocess.Popen[bytes] | None = None
        self.launches: list[subprocess.Popen[str]] = []

    def folder(self, role: str) -> Path:
        return self.tmp / role

    def _programs(self) -> None:
        bin_ = self.tmp / "bin"
        bin_.mkdir()
        # A host's own Python has no packages; what runs in the container finds those of the tests.
        bare = getattr(sys, "_base_executable", sys.executable)
        programs = {
            "docker": f'exec "$STANDIN_PYTHON" {shlex.quote(str(STANDIN / "docker.py"))} "$@"',
            "vllm": f'exec "$STANDIN_PYTHON" {shlex.quote(str(STANDIN / "vllm.py"))} "$@"',
            "python3": f'[ "$2" != -m ] && [ "$1" != -m ] || exec "$STANDIN_PYTHON" "$@"\nexec {shlex.quote(bare)} "$@"',
            "nvidia-smi": "echo 54",
        }
        for name, text in programs.items():
            (bin_ / name).write_text(f"#!/bin/sh\n{text}\n")
            (bin_ / name).chmod(0o755)

    def environment(self, role: str) -> dict[str, str]:
        return {
            "PATH": f"{self.tmp / 'bin'}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(self.folder(role) / "home"),
            "STANDIN": str(self.folder(role)),
            "STANDIN_PYTHON": sys.executable,
        }

    def _ssh_keys(self) -> None:
        for name in ("host", "user", "stranger"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.tmp / f"{name}_key")]
            subprocess.run(command, check=True)
        # Set in the session as the worker's own; the sshd of the tests is this user's.
        variables = " ".join(f'"{name}={value}"' for name, value in self.environment("worker").items())
        (self.tmp / "sshd_config").write_text(
            f"Port {SSH_PORT}\nListenAddress {self.cable.worker}\nHostKey {self.tmp}/host_key\n"
            f"AuthorizedKeysFile {self.tmp}/user_key.pub\nStrictModes no\nUsePAM no\nPasswordAuthentication no\n"
            f"PermitRootLogin yes\nPidFile none\nSetEnv {variables}\n"
        )
        host_key = " ".join((self.tmp / "host_key.pub").read_text().split()[:2])
        names = ",".join(f"[{name}]:{SSH_PORT}" for name in (self.cable.worker, self.cable.nowhere))
        (self.tmp / "known_hosts").write_text(f"{names} {host_key}\n")
        (self.tmp / "ssh_config").write_text(
            f"UserKnownHostsFile {self.tmp}/known_hosts\nGlobalKnownHostsFile /dev/null\nIdentitiesOnly yes\n"
            f"IdentityFile {self.tmp}/user_key\n"
        )

    def start_sshd(self) -> None:
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)
        log = open(self.tmp / "sshd.log", "ab")  # noqa: SIM115  (sshd's, until it ends)
        self.sshd = subprocess.Popen(
            [*self.cable.enter("worker"), SSHD, "-D", "-e", "-f", str(self.tmp / "sshd_config")], stdout=log, stderr=log
        )
        until(lambda: b"Server listening" in (self.tmp / "sshd.log").read_bytes())

    def stop_sshd(self) -> None:
        """The worker's host goes down: no new connections, and the open ones are gone."""
        assert self.sshd
        for pid in _descendants(self.sshd.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.sshd.kill()
        self.sshd.wait()

    def settings(self, **changes: str) -> None:
        """Write .env: the two hosts, changed by name."""
        values = {
            "HEAD_ADDR": self.cable.head,
            "WORKER_HOST": self.cable.worker,
            "SSH_PORT": str(SSH_PORT),
            "SSH_CONFIG": str(self.tmp / "ssh_config"),
            "PORT": str(PORT),
            "MAX_NUM_SEQS": "3",
            "DFLASH_VERIFY_TOKENS": "3",
            "START_TIMEOUT_S": "60",
            "MIN_FREE_GB": "0",
            "HF_TOKEN": "hf_secret",
        } | changes
        (self.root / ".env").write_text("".join(f"{name}='{value}'\n" for name, value in values.items()))

    def plan_widths(self, *widths: int) -> None:
        """What the canned plan says will be captured."""
        (self.folder("head") / "canned.json").write_text(
            json.dumps({"check": CHECK, "plan": PLAN | {"widths": list(widths)}})
        )

    def steps(self) -> dict[int, float]:
        """Steps per width that the running server has counted."""
        command = [*self.cable.enter("head"), sys.executable, "-c", _METRICS, f"http://127.0.0.1:{PORT}/metrics"]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return {int(width): float(count) for width, count in re.findall(r'width="(\d+)"} ([0-9.]+)', text)}

    def behave(self, role: str, **behaviour: str) -> None:
        (self.folder(role) / "behaviour.json").write_text(json.dumps(behaviour))

    def begin(self, *words: str, **inline: str) -> "subprocess.Popen[str]":
        """./start.sh on the head, in a session of its own."""
        environment = self.environment("head") | {"XDG_STATE_HOME": str(self.tmp / "state")} | inline
        process = subprocess.Popen(
            [*self.cable.enter("head"), str(self.root / "start.sh"), *words],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self.launches.append(process)
        return process

    def launch(self, *words: str, **inline: str) -> tuple[int, str]:
        """Exit code and output of ./start.sh on the head."""
        process = self.begin(*words, **inline)
        out, _ = process.communicate(timeout=COMMAND_S)
        return process.returncode, out

    def calls(self, role: str, word: str = "") -> list[list[str]]:
        """Arguments of every docker call on a host, those that begin with `word`."""
        path = self.folder(role) / "calls.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        every = [list(json.loads(line)["argv"]) for line in lines]
        return [argv for argv in every if not word or argv[0] == word]

    def runs(self, role: str) -> list[list[str]]:
        return [argv for argv in self.calls(role, "run") if "--detach" in argv]

    def containers(self) -> list[str]:
        """Every container on both hosts."""
        return sorted(
            path.stem for role in ("head", "worker") for path in (self.folder(role) / "containers").glob("*.json")
        )

    def processes(self) -> list[str]:
        """Command lines of every process that belongs to these hosts' servers or watch."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"STANDIN={self.tmp}/".encode() in (path / "environ").read_bytes() and self._is_server(path):
                    found.append((path / "cmdline").read_text(errors="replace").replace("\0", " "))
        return found

    @staticmethod
    def _is_server(path: Path) -> bool:
        words = (path / "cmdline").read_text(errors="replace")
        return any(word in words for word in ("standin/vllm.py", "supervise", "time.sleep(600)", "watch-ranks"))

    def server_pid(self, role: str) -> int:
        """The process that answers like vLLM in a host's container."""
        data = json.loads((self.folder(role) / "containers" / f"vllm-{role}.json").read_text())
        return next(pid for pid in _descendants(int(data["pid"])))

    def log(self, role: str) -> str:
        return (self.folder(role) / "containers" / f"vllm-{role}.log").read_text()

    def clean_up(self) -> None:
        for process in self.launches:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, ProcessLookupError):
                if f"STANDIN={self.tmp}/".encode() in (path / "environ").read_bytes():
                    os.kill(int(path.name), signal.SIGKILL)
        if self.sshd and self.sshd.poll() is None:
            self.stop_sshd()


def _descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            children.setdefault(int(path.read_text().rpartition(")")[2].split()[1]), []).append(int(path.parent.name))
    found, left = [], [pid]
    while left:
        below = children.get(left.pop(0), [])
        found += below
        left += below
    return found


@pytest.fixture
def hosts(tmp_path: Path, cable: Cable) -> Iterator[Hosts]:
    made = Hosts(tmp_path, cable)
    try:
        made.start_sshd()
        made.settings()
        yield made
    finally:
        made.clean_up()


def port_holder(hosts: Hosts, port: int) -> "subprocess.Popen[str]":
    """A process on the head that listens on a port."""
    text = f"import socket; s = socket.create_server(('', {port})); print('up', flush=True)\nwhile True: s.accept()"
    process = subprocess.Popen(
        [*hosts.cable.enter("head"), sys.executable, "-c", text], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process
