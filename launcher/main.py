"""The serving commands of start.sh: reads the words of the command line and turns every failure into one sentence."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from launcher import report, serve, tools, watch
from launcher.errors import Interrupted, LaunchError
from launcher.settings import load

PROFILE_S = "600"
# Which options each command knows; check, plan and bench pass theirs on to `dflash-verify`.
OPTIONS: dict[str, tuple[str, ...]] = {
    "start": (),
    "stop": (),
    "restart": (),
    "status": (),
    "logs": ("head", "worker", "-f", "--follow"),
    "profile": (),
    watch.WORD: (),
}


def main() -> None:
    """argv: root, command, its words."""
    root, command, *words = sys.argv[1:]
    if sys.version_info < (3, 10):  # noqa: UP036  (a host's own Python, not the project's)
        sys.exit(f"start.sh: python3 is {sys.version.split()[0]} and the launcher needs 3.10: install a newer one.")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        sys.exit(_run(Path(root), command, words))
    except LaunchError as error:
        sys.stdout.flush()
        sys.exit(f"start.sh: {error}")
    except Interrupted:
        sys.exit(130)
    except BrokenPipeError:
        os._exit(141)


def _interrupt(number: int, frame: object) -> None:
    raise Interrupted


def _run(root: Path, command: str, words: list[str]) -> int:
    shows = [] if command == watch.WORD else ["--dry-run"]
    for word in words:
        if command in OPTIONS and word not in [*OPTIONS[command], *shows]:
            known = " ".join([*OPTIONS[command], *shows]) or "nothing"
            raise LaunchError(f"{command} does not know {word!r}: it takes {known}.")
    dry_run = "--dry-run" in words
    words = [word for word in words if word != "--dry-run"]
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(line_buffering=True)  # progress, also through a pipe
    commands: dict[str, Callable[[], int]] = {
        "start": lambda: serve.start(root, dry_run=dry_run),
        "stop": lambda: serve.stop(root, dry_run=dry_run),
        "restart": lambda: serve.restart(root, dry_run=dry_run),
        "status": lambda: report.status(root, dry_run=dry_run),
        "logs": lambda: report.logs(
            root,
            "worker" if "worker" in words else "head",
            follow=bool({"-f", "--follow"} & set(words)),
            dry_run=dry_run,
        ),
        "check": lambda: tools.check(root, words, dry_run=dry_run),
        "plan": lambda: tools.plan(root, words, dry_run=dry_run),
        "profile": lambda: _profile(root, dry_run=dry_run),
        "bench": lambda: tools.bench(root, words, dry_run=dry_run),
        watch.WORD: watch.run,
    }
    return commands[command]()


def _profile(root: Path, *, dry_run: bool) -> int:
    """A restart that measures: with two hosts only the running ranks together have a step time."""
    os.environ.setdefault("DFLASH_PROFILE_SECONDS", PROFILE_S)
    asked = load(root).widths_asked
    if not asked.startswith("auto"):
        raise LaunchError(
            f"step times are measured for a policy and DFLASH_VERIFY_TOKENS is {asked or '0'}: set it to auto, then profile."
        )
    return serve.restart(root, dry_run=dry_run)
