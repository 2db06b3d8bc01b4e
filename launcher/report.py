"""status and logs: they need no valid settings, and an unreachable host costs them seconds."""

import sys
from pathlib import Path

from launcher import digests, state, watch
from launcher.hosts import Host, Result, end, on_all
from launcher.readiness import Server
from launcher.runtimes import runtime
from launcher.serve import hosts_of

ASK_S = 12
LOG_S = 60
GPU = "nvidia-smi --query-gpu=temperature.gpu --format=csv,noheader,nounits 2>/dev/null | paste -sd, - || true"


def status(root: Path, *, dry_run: bool = False) -> int:
    """One line per rank, then health; 0 if everything runs and answers."""
    started = state.known_or_assumed(root)
    kind = runtime(started.runtime)
    names = {role: name for role, _, name in started.containers}

    def question(host: Host) -> str:
        name = names[host.role]
        # One connection for all of it: state, digest, temperature, a line each.
        return (
            f"inspect() {{\n{kind.inspect(name)}\n}}\nplan() {{\n{kind.grep(name, digests.GREP)}\n}}\n"
            'state=$(inspect) || exit 1\necho "$state" | head -n 1\n'
            "plan 2>/dev/null | head -n 1 | tr -d '\\n'; echo\n" + GPU
        )

    if dry_run:
        for host in hosts_of(started):
            print(f"# {host.name}\n{question(host)}\n")
        return 0

    def ask(host: Host) -> tuple[bool, str]:
        result = host.run(question(host), ASK_S)
        if not result.ok:
            return False, f"unknown    {host.complaint(result, 'asking').partition(': ')[2]}"
        found, plan, temperature = [*result.out.split("\n"), "", "", ""][:3]
        words = found.split()
        shown = f"{words[0] if words else 'absent':10s} restarts {words[1] if len(words) > 1 else '-'}"
        digest = "/".join(sorted(digests.found(plan)))
        shown += f"   plan {digest or '-'}   GPU {temperature.strip() + ' C' if temperature.strip() else '-'}"
        return words[:1] == ["running"], shown

    hosts = hosts_of(started)
    answers = on_all(hosts, ask)
    for host, (_, shown) in zip(hosts, answers, strict=True):
        print(f"{host.role:7s} {host.ssh or 'this host':24s} {shown}")
    healthy = Server(started.url, "").healthy()
    print(f"health  {'ok' if healthy else 'no answer':24s} {started.url}")
    print(f"watch   {'running' if watch.alive(started.watcher) else 'not running'}")
    return 0 if healthy and all(running for running, _ in answers) else 1


def logs(root: Path, role: str, *, follow: bool, dry_run: bool = False) -> int:
    """The end of one rank's log; what was kept of it when its container is gone."""
    started = state.known_or_assumed(root)
    by_role = {host.role: host for host in hosts_of(started)}
    if role not in by_role:
        print(f"start.sh: there is no {role}: this server has {' and '.join(by_role)}.", file=sys.stderr)
        return 1
    host = by_role[role]
    name = next(name for known, _, name in started.containers if known == role)
    text = runtime(started.runtime).logs(name, 200, follow)
    if dry_run:
        print(f"# {host.name}\n{text}")
        return 0
    if follow:
        process = host.begin(text)
        try:
            return process.wait()
        finally:
            end(process)
    result = host.run(text, LOG_S)
    kept = state.kept_log(role)
    if result.ok:
        print(result.out)
    elif kept.exists() and not (host.ssh and result.code == 255):
        print(kept.read_text(encoding="utf-8", errors="replace"), end="")
    else:
        print(
            f"start.sh: {host.complaint(result if result.err else _no_log(result.out), 'reading the log')}",
            file=sys.stderr,
        )
        return 1
    return 0


def _no_log(said: str) -> Result:
    return Result(1, "", said or "there is no log")
