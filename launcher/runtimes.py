"""The two ways a rank runs, as shell text: in a container, or, on one host, as a process of its own session.

Every text is bounded in time by its caller, takes names that settings.py or state.py has checked, and answers on one line.
"""

import shlex
from typing import Protocol

from launcher.ranks import CONFIG_LABEL, STOP_S, Rank
from launcher.state import folder


class Runtime(Protocol):
    """Shell texts for one rank; `name` is its container name."""

    def run(self, rank: Rank, *, shown: bool = False) -> str:
        """Start it and return."""

    def wait(self, name: str) -> str:
        """Return when it has ended, and print its exit code."""

    def stop(self, name: str) -> str:
        """End it and remove it; fails only if something is left. Nothing to stop is success."""

    def logs(self, name: str, lines: int, follow: bool) -> str:
        """Print the end of its log."""

    def grep(self, name: str, pattern: str) -> str:
        """Print the first lines of its log that match."""

    def inspect(self, name: str) -> str:
        """Print `STATE RESTARTS CONFIG`, or nothing when it does not exist."""


class Docker:
    """Containers; the default, and the only way for two hosts."""

    def run(self, rank: Rank, *, shown: bool = False) -> str:
        return rank.command(shown=shown)

    def wait(self, name: str) -> str:
        return f"docker wait {shlex.quote(name)}"

    def stop(self, name: str) -> str:
        name = shlex.quote(name)
        return (
            f"docker stop -t {STOP_S} {name} >/dev/null 2>&1\n"
            f"docker rm --force --volumes {name} >/dev/null 2>&1\n"
            f'left=$(docker ps --all --quiet --filter "name=^/"{name}"\\$") || exit 1\n'
            '[ -z "$left" ] || { echo "a container is left" >&2; exit 1; }'
        )

    def logs(self, name: str, lines: int, follow: bool) -> str:
        return f"docker logs {'--follow ' if follow else ''}--tail {lines} {shlex.quote(name)} 2>&1"

    def grep(self, name: str, pattern: str) -> str:
        return f"docker logs {shlex.quote(name)} 2>&1 | grep -a -m 50 {shlex.quote(pattern)} || true"

    def inspect(self, name: str) -> str:
        form = f'{{{{.State.Status}}}} {{{{.RestartCount}}}} {{{{index .Config.Labels "{CONFIG_LABEL}"}}}}'
        # `ps` fails when docker cannot be asked; `inspect` fails when there is no such container.
        return (
            "docker ps --quiet >/dev/null || exit 1\n"
            f"docker inspect --type container --format {shlex.quote(form)} {shlex.quote(name)} 2>/dev/null || true"
        )


class Process:
    """A process on this host, in a session of its own, with a log file and a pid file in the state folder."""

    _ALIVE = (
        'began() { sed "s/.*) //" "/proc/$1/stat" 2>/dev/null | cut -d" " -f20; }\n'
        'alive() { [ -n "$pid" ] && [ "$(began "$pid")" = "$since" ]; }\n'
        "read -r pid since config 2>/dev/null <{pid} || pid=\n"
    )

    def _known(self, name: str) -> str:
        return self._ALIVE.replace("{pid}", self._file(name, "pid"))

    def _file(self, name: str, kind: str) -> str:
        return shlex.quote(str(folder() / f"{name}.{kind}"))

    def run(self, rank: Rank, *, shown: bool = False) -> str:
        log, pid = self._file(rank.container, "log"), self._file(rank.container, "pid")
        return (
            f"{rank.command(shown=shown)} >{log} 2>&1 </dev/null &\n"
            f'echo "$! $(sed "s/.*) //" /proc/$!/stat | cut -d" " -f20) {rank.config}" >{pid}'
        )

    def wait(self, name: str) -> str:
        return f"{self._known(name)}while alive; do sleep 0.5; done\necho unknown"

    def stop(self, name: str) -> str:
        # The session holds everything that vLLM started, also what a dead parent left behind. The leader gets its time to
        # end its children; what is left of them after that gets two seconds.
        return (
            f'{self._known(name)}[ -n "$pid" ] || return 0\n'
            "members() { ps -o pid= -o stat= --sid \"$pid\" | awk '$2 !~ /^Z/ {print $1}'; }\n"
            "now() { date +%s; }\n"
            # A leader that has died leaves its number to the session; another process with that number is not ours.
            'if alive; then kill -TERM "$pid" 2>/dev/null; elif [ -n "$(began "$pid")" ]; then return 0\n'
            "else kill -TERM $(members) 2>/dev/null; fi\n"
            f"until=$(($(now) + {STOP_S}))\n"
            'while alive && [ "$(now)" -lt "$until" ]; do sleep 0.2; done\n'
            "until=$(($(now) + 2))\n"
            'while [ -n "$(members)" ] && [ "$(now)" -lt "$until" ]; do sleep 0.2; done\n'
            'left=$(members); [ -z "$left" ] || kill -KILL $left 2>/dev/null\n'
            f"rm -f {self._file(name, 'pid')}"
        )

    def logs(self, name: str, lines: int, follow: bool) -> str:
        return f"tail -n {lines} {'-f ' if follow else ''}{self._file(name, 'log')}"

    def grep(self, name: str, pattern: str) -> str:
        return f"grep -a -m 50 {shlex.quote(pattern)} {self._file(name, 'log')} || true"

    def inspect(self, name: str) -> str:
        return f'{self._known(name)}[ -n "$pid" ] || return 0\nif alive; then echo "running 0 $config"; else echo "exited 0 $config"; fi'


def runtime(kind: str) -> Runtime:
    """By RUNTIME's value."""
    return Process() if kind == "host" else Docker()
