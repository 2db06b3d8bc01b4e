"""start, stop, restart. The order in `start` is: everything that can be refused, then everything that changes something;
what was begun is written down before it begins, and from there on any failure or Ctrl-C stops it on every host."""

from __future__ import annotations

import contextlib
import json
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launcher import bundle as plugin
from launcher import digests, ranks, readiness, state, watch
from launcher.errors import Interrupted, LaunchError
from launcher.hosts import Host, Result, end, on_all, wind_down
from launcher.ranks import Rank
from launcher.runtimes import Runtime, runtime
from launcher.settings import Settings, load
from launcher.tools import planned_widths

ASK_S = 20  # a question to a host that answers at once
RUN_S = 120  # docker run, from an image that is there
PULL_S = 7200
CHECK_S = 300
STOP_LIMIT_S = 22  # with ssh's 5 s to connect this stays below the 30 s of `stop`
LOST_S = 60  # how long a host may be unreachable before a start gives up
DIGEST_EVERY_S = 3
SAY_EVERY_S = 15
KEPT_LINES = 400


@dataclass(frozen=True)
class Deployment:
    """Everything that one start needs."""

    root: Path
    settings: Settings
    bundle: plugin.Bundle | None
    ranks: list[Rank]
    hosts: list[Host]
    runtime: Runtime

    @classmethod
    def of(cls, root: Path, settings: Settings) -> Deployment:
        bundle = plugin.make(root) if settings.plugin_active else None
        return cls(
            root=root,
            settings=settings,
            bundle=bundle,
            ranks=ranks.make(settings, bundle),
            hosts=[Host.of(host, settings) for host in settings.hosts],
            runtime=runtime(settings["RUNTIME"]),
        )

    @property
    def server(self) -> readiness.Server:
        listen = self.settings["LISTEN"]
        address = "127.0.0.1" if listen in ("0.0.0.0", "::", "localhost") else listen
        address = f"[{address}]" if ":" in address else address
        url = f"http://{address}:{self.settings.port}"
        return readiness.Server(url, self.settings.model_name, self.settings.api_key)

    def rank_of(self, host: Host) -> Rank:
        return next(rank for rank in self.ranks if rank.host.role == host.role)

    def started(self) -> state.Started:
        return state.Started(
            runtime=self.settings["RUNTIME"],
            containers=tuple((rank.host.role, rank.host.ssh, rank.container) for rank in self.ranks),
            ssh_port=self.settings["SSH_PORT"],
            ssh_key=self.settings["SSH_KEY"],
            ssh_config=self.settings["SSH_CONFIG"],
            url=self.server.url,
            config=self.ranks[0].config,
            plugin=self.settings.plugin_active,
        )


def start(root: Path, *, dry_run: bool) -> int:
    """Serve, and return when the server is READY; 0 if it serves."""
    deployment = Deployment.of(root, load(root))
    if dry_run:
        show(deployment)
        return 0
    make_env_file(root)
    with state.lock(take_over=False):
        return _start(deployment)


def restart(root: Path, *, dry_run: bool) -> int:
    """Stop, then start; settings with a mistake leave the running server alone."""
    deployment = Deployment.of(root, load(root))
    if dry_run:
        show_stop(state.known_or_assumed(root))
        show(deployment)
        return 0
    with state.lock(take_over=True):
        code = stop_started(state.known_or_assumed(root))
        return code or _start(deployment)


def stop(root: Path, *, dry_run: bool) -> int:
    """Stop everything that was started, within 30 s; 1 if a host could not be asked."""
    if dry_run:
        show_stop(state.known_or_assumed(root))
        return 0
    with state.lock(take_over=True):
        return stop_started(state.known_or_assumed(root))


def make_env_file(root: Path) -> None:
    """.env from .env.example at the first run, readable by its owner only: it will hold tokens."""
    path = root / ".env"
    if path.exists():
        return
    try:
        with open(path, "x", encoding="utf-8") as file:
            path.chmod(0o600)
            file.write((root / ".env.example").read_text(encoding="utf-8"))
    except FileExistsError:
        return  # another start was faster
    except OSError as error:
        raise LaunchError(
            f"{path} cannot be written ({error.strerror}): make this folder writable, or put a settings file there."
        ) from None
    print(f"Made {path} from .env.example: hosts, model and widths are set there.")


def show(deployment: Deployment) -> None:
    """The commands of a start, per host; nothing runs."""
    for host in deployment.hosts:
        rank = deployment.rank_of(host)
        print(f"# {host.name}")
        if deployment.bundle:
            print(deployment.bundle.unpack_script(shown=True))
        print(deployment.runtime.run(rank, shown=True))
        print()


def show_stop(started: state.Started) -> None:
    """The commands of a stop, per host."""
    for role, ssh, name in started.containers:
        print(f"# {Host(role, ssh).name}")
        print(runtime(started.runtime).stop(name))
        print()


def stop_started(started: state.Started, *, quiet: bool = False) -> int:
    """Stop the watch and every rank, on all hosts at the same time."""
    watch.stop(started.watcher)
    kind = runtime(started.runtime)
    names = {role: name for role, _, name in started.containers}

    def stop_one(host: Host) -> tuple[Host, Result]:
        return host, host.run(kind.stop(names[host.role]), STOP_LIMIT_S)

    failed = [(host, result) for host, result in on_all(hosts_of(started), stop_one) if not result.ok]
    for host, result in failed:
        print(host.complaint(result, f"stopping {names[host.role]}"), file=sys.stderr)
    if failed:
        return 1
    state.forget()
    if not quiet:
        print("Stopped.")
    return 0


def keep_logs(started: state.Started) -> None:
    """The end of every rank's log, before its container goes; `logs` shows it afterwards."""
    kind = runtime(started.runtime)
    names = {role: name for role, _, name in started.containers}

    def keep(host: Host) -> None:
        result = host.run(kind.logs(names[host.role], KEPT_LINES, False), ASK_S)
        if result.ok:
            state.kept_log(host.role).write_text(result.out + "\n", encoding="utf-8", errors="replace")

    on_all(hosts_of(started), keep)


def hosts_of(started: state.Started) -> list[Host]:
    return [
        Host(role, ssh, started.ssh_port, started.ssh_key, started.ssh_config) for role, ssh, _ in started.containers
    ]


def _start(deployment: Deployment) -> int:
    d = deployment
    if _serves_already(d):
        return 0
    _preflight(d)
    if d.bundle:
        _install_and_check(d)
    _ports_are_free(d)
    started = d.started()
    state.save(started)
    try:
        widths = planned_widths(d.root, d.settings, d.bundle, d.hosts[0]) if d.bundle else []
        if ranks.switchable(d.settings):
            _switch(d)(None)  # left behind by a warm-up that was cut short, it would decide this server's width
        on_all(d.hosts, lambda host: host.must(d.runtime.run(d.rank_of(host)), RUN_S, "starting vLLM", whole=True))
        with _Ranks(d) as running:
            digest, unused = _wait_until_ready(d, running, widths)
        started = replace(started, ready=True, digest=digest)
        started = replace(started, watcher=watch.begin(d.root))
        state.save(started)
    except BaseException as error:
        # A second Ctrl-C must not leave half of it running.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        wind_down()
        print("\nInterrupted: stopping." if isinstance(error, Interrupted) else "Stopping everything that was started.")
        if isinstance(error, LaunchError):
            keep_logs(started)
        stop_started(state.read() or started, quiet=True)
        raise
    width = f"widths {', '.join(map(str, widths))}, plan digest {digest}" if digest else "stock vLLM"
    print(f"READY {d.server.url}  {d.settings.model_name}  {width}")
    if unused:
        print(
            f"The policy had no reason to use width {', '.join(map(str, unused))} in the warm-up; its graphs are captured."
        )
    return 0


def _serves_already(d: Deployment) -> bool:
    """Whether this very configuration is up; leftovers are removed, another configuration is refused."""
    before = state.read()
    if before and before.containers != d.started().containers and any(_inspect(before)):
        raise LaunchError(
            "a server with other hosts or another SERVER_NAME was started from here: ./start.sh stop first."
        )
    found = _inspect(d.started(), complain=True)
    if not any(found):
        return False
    ready = (before is None or before.ready) and d.server.healthy()
    same = all(line.split()[:1] == ["running"] and line.split()[2:] == [d.ranks[0].config] for line in found)
    if same and ready:
        print(f"Already serving with these settings: {d.server.url}")
        return True
    foreign = [line for line in found if line and len(line.split()) < 3]
    if foreign:
        raise LaunchError(
            f"a container named {d.ranks[0].container} exists that was not started from here: set another SERVER_NAME."
        )
    if ready and not same:
        raise LaunchError("a server with other settings is running: ./start.sh restart applies the new ones.")
    print("Removing what an earlier start left behind.")
    if stop_started(before or d.started(), quiet=True):
        raise LaunchError("what an earlier start left behind could not be removed: see the lines above.")
    return False


def _inspect(started: state.Started, *, complain: bool = False) -> list[str]:
    """`STATE RESTARTS CONFIG` per rank, empty for one that does not exist or cannot be asked."""
    kind = runtime(started.runtime)
    names = {role: name for role, _, name in started.containers}

    def ask(host: Host) -> str:
        result = host.run(kind.inspect(names[host.role]), ASK_S)
        if complain and not result.ok:
            raise LaunchError(host.complaint(result, "asking docker" if started.runtime == "docker" else "looking"))
        return result.out.strip()

    return on_all(hosts_of(started), ask)


def _preflight(d: Deployment) -> None:
    """Programs, image, network interface and disk space, on every host at the same time."""
    if d.settings["RUNTIME"] == "host":
        program = ranks.vllm_program(d.settings)
        d.hosts[0].must(f"command -v {shlex.quote(program)}", ASK_S, f"finding {program} (VLLM_BIN)")
        return
    images = on_all(d.hosts, lambda host: _prepare_host(d, host))
    if len(set(images)) > 1:
        shown = ", ".join(f"{host.name} {image[:19]}" for host, image in zip(d.hosts, images, strict=True))
        raise LaunchError(
            f"{d.settings['BASE_IMAGE']} is not the same image on every host ({shown}): pull it anew, or name it by digest."
        )


def _prepare_host(d: Deployment, host: Host) -> str:
    """Image ID, after a pull if it was missing."""
    rank = d.rank_of(host)
    image = shlex.quote(d.settings["BASE_IMAGE"])
    cache = rank_cache(d.settings)
    questions = [
        'command -v docker >/dev/null || { echo "docker is not installed" >&2; exit 1; }',
        "docker version --format '{{.Server.Version}}' >/dev/null || exit 1",
        f'at={cache}; while ! [ -e "$at" ]; do at=$(dirname -- "$at"); done',
        "free_gb=$(df -Pk -- \"$at\" | awk 'NR == 2 {print int($4 / 1048576)}')",
        f'[ "$free_gb" -ge {d.settings.min_free_gb} ] || {{ echo "no space left: $free_gb GB free at $at,'
        f' MIN_FREE_GB is {d.settings.min_free_gb}" >&2; exit 1; }}',
    ]
    if rank.host.iface:
        iface = shlex.quote(rank.host.iface)
        questions.append(f'[ -e /sys/class/net/{iface} ] || {{ echo "there is no interface {iface}" >&2; exit 1; }}')
    questions.append(f"docker image inspect --format '{{{{.Id}}}}' {image} 2>/dev/null || true")
    found = host.must("\n".join(questions), ASK_S, "checking the host").strip()
    if found:
        return found
    print(f"{host.name}: pulling {d.settings['BASE_IMAGE']}, which can take a while.")
    host.must(f"docker pull --quiet {image}", PULL_S, "pulling the image")
    return host.must(f"docker image inspect --format '{{{{.Id}}}}' {image}", ASK_S, "looking for the image").strip()


def rank_cache(settings: Settings) -> str:
    """The folder of model files, as shell text."""
    text = settings["HF_CACHE"] or "~/.cache/huggingface"
    for home in ("~/", "$HOME/"):
        if text.startswith(home):
            return '"$HOME"/' + shlex.quote(text[len(home) :])
    return shlex.quote(text)


def _install_and_check(d: Deployment) -> None:
    """The plugin's folder on every host, and its self-check against the vLLM that will run."""
    bundle = d.bundle
    assert bundle is not None
    install = bundle.unpack_script()
    on_all(d.hosts, lambda host: host.must(install, RUN_S, "copying the plugin"))
    if d.settings["RUNTIME"] == "host":
        return  # the server checks itself, in its own Python
    print("Checking the plugin against the vLLM in the image.")
    check = ranks.tool(d.settings, bundle, ["check", "--json"], gpu=False)

    def check_one(host: Host) -> None:
        result = host.run(check, CHECK_S)
        if not result.ok:
            raise LaunchError(check_failure(host, result))

    on_all(d.hosts, check_one)


def check_failure(host: Host, result: Result) -> str:
    """One sentence for a self-check that failed."""
    drifted = []
    with contextlib.suppress(ValueError, KeyError, TypeError):
        document = json.loads(result.out)
        if document.get("error"):
            return f"{host.name}: the plugin's self-check failed ({document['error']}): use an image that has vLLM."
        drifted = [entry["name"] for entry in document["overlays"] if entry["status"] in ("drifted", "missing")]
    if not drifted:
        return host.complaint(result, "the plugin's self-check")
    return (
        f"{host.name}: overlay {', '.join(drifted)} does not fit the vLLM in the image: use a supported release, or "
        "DFLASH_VERIFY_TOKENS=0 to serve without the plugin (./start.sh check shows the details)."
    )


def _ports_are_free(d: Deployment) -> None:
    """The head's ports, and that the address the ranks will use is this host's."""
    wanted = [("PORT", d.settings.port)]
    if len(d.hosts) > 1:
        wanted.append(("MASTER_PORT", d.settings.master_port))
        address = d.settings.hosts[0].addr
        try:
            family, kind, protocol, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(where)
        except OSError:
            raise LaunchError(
                f"HEAD_ADDR={address} is not an address of this host: set it to the one at the cable (ip -brief address)."
            ) from None
    for name, port in wanted:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except PermissionError:
                raise LaunchError(f"{name}={port} needs root: use a port from 1024.") from None
            except OSError:
                raise LaunchError(
                    f"{name}={port} is taken on this host: stop what listens there, or set {name}."
                ) from None


class _Ranks:
    """The running ranks: knows when one ends, through one waiting connection per host."""

    def __init__(self, d: Deployment) -> None:
        self._d = d
        self._waiters: dict[Host, subprocess.Popen[str]] = {}
        self._lost_since: dict[Host, float] = {}
        self._connected: dict[Host, float] = {}

    def __enter__(self) -> _Ranks:
        for host in self._d.hosts:
            self._wait_for(host)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._waiters.values():
            end(process)

    def _wait_for(self, host: Host) -> None:
        text = self._d.runtime.wait(self._d.rank_of(host).container)
        self._waiters[host] = host.begin(text, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self._connected[host] = time.monotonic()

    def check(self) -> None:
        """LaunchError when a rank has ended, or when a host has been out of reach for too long."""
        now = time.monotonic()
        for host, process in list(self._waiters.items()):
            code = process.poll()
            if code is None:
                continue
            assert process.stdout is not None
            said = process.stdout.read().strip()
            if not host.ssh or code != 255:
                raise LaunchError(self._ended(host, said if code == 0 else "unknown"))
            # The connection was lost, which says nothing about the rank. One that held for a while begins a new count.
            if now - self._connected[host] > LOST_S:
                self._lost_since.pop(host, None)
            if now - self._lost_since.setdefault(host, now) > LOST_S:
                raise LaunchError(f"{host.name} has been out of reach for {LOST_S} s: check cable and host.")
            self._wait_for(host)

    def _ended(self, host: Host, code: str) -> str:
        name = self._d.rank_of(host).container
        tail = host.run(self._d.runtime.logs(name, 15, False), ASK_S).out
        print(f"--- the last lines of the {host.role}\n{tail}\n---", file=sys.stderr)
        return f"{host.name}: vLLM ended with exit code {code} during the start; its last lines are above."


def _wait_until_ready(d: Deployment, running: _Ranks, widths: Sequence[int]) -> tuple[str, list[int]]:
    """Health, equal digests, then the warm-up. Returns the digest and the widths that the warm-up did not use."""
    digest = ""
    print(
        f"Waiting for vLLM to load {d.settings['MODEL']} (up to {d.settings.start_timeout_s} s; Ctrl-C stops everything)."
    )
    for _ in _until_deadline(d, running):
        if d.bundle and not digest:
            digest = _digests(d, complete=False)
        if d.server.healthy():
            break
    if d.bundle and not digest:
        digest = _digests(d, complete=True)
    print(f"Healthy. Warming up at 1 to {d.settings.max_num_seqs} streams.")
    unused: list[int] = []
    switch = _switch(d) if ranks.switchable(d.settings) else None

    def warm() -> None:
        unused.extend(readiness.warm_up(d.server, d.settings.max_num_seqs, widths, switch))

    _beside(d, running, warm)
    return digest, unused


def _switch(d: Deployment) -> Callable[[int | None], None]:
    """Writes the head's control file, whole or not at all; None removes it."""
    path = ranks.control_file(d.settings)

    def switch(width: int | None) -> None:
        text = f'rm -f "{path}"'
        if width is not None:
            text = f'printf \'{{"width": %d}}\' {width} >"{path}.part" && mv "{path}.part" "{path}"'
        d.hosts[0].must(text, ASK_S, "switching the width for the warm-up")

    return switch


def _until_deadline(d: Deployment, running: _Ranks) -> Iterator[None]:
    """Steps of a wait: one a second, checking the ranks, saying where it stands; LaunchError at the end of the time."""
    began = said = time.monotonic()
    while True:
        running.check()
        yield
        now = time.monotonic()
        if now - began > d.settings.start_timeout_s:
            raise LaunchError(
                f"vLLM was not healthy after {d.settings.start_timeout_s} s: see its log with ./start.sh logs, or raise "
                "START_TIMEOUT_S."
            )
        if now - said > SAY_EVERY_S:
            said = now
            last = d.hosts[0].run(d.runtime.logs(d.ranks[0].container, 1, False), ASK_S).out
            print(f"  {now - began:4.0f} s  {last.strip()[:110]}")
        time.sleep(0.5)


def _beside(d: Deployment, running: _Ranks, work: Callable[[], None]) -> None:
    """`work` in a thread, while the ranks are watched: requests to a dead rank would wait for minutes."""
    failure: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    while thread.is_alive():
        running.check()
        thread.join(0.2)
    if failure:
        raise failure[0]


def _digests(d: Deployment, *, complete: bool) -> str:
    """The digest that all ranks agree on. complete: a rank without one is an error, else an empty text means "not yet"."""
    time.sleep(0 if complete else DIGEST_EVERY_S / 3)

    def ask(host: Host) -> str:
        return host.run(d.runtime.grep(d.rank_of(host).container, digests.GREP), ASK_S).out

    logs = dict(zip((host.name for host in d.hosts), on_all(d.hosts, ask), strict=True))
    if not complete and not all(digests.found(log) for log in logs.values()):
        return ""
    return digests.agree(logs)
