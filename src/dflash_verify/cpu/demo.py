"""`dflash-verify demo`: stock vLLM, width 3 and width 1 on this machine's CPU, and whether the text stays the same."""

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

ARM_TIMEOUT_S = 300


@dataclass(frozen=True)
class Arm:
    """One engine of the demo. verify_tokens: DFLASH_VERIFY_TOKENS, or None for unset. width: what it must schedule."""

    name: str
    drafter: str
    verify_tokens: str | None
    width: int


REFERENCE = Arm("no speculation", "none", None, 0)
ARMS = (Arm("stock", "dflash2", None, 7), Arm("width 3", "dflash2", "3", 3), Arm("width 1", "dflash2", "1", 1))

NEXT = (
    "Same drafter, same seven proposals, same text: only how many of them the target verifies has changed.\n"
    "Where to go next:\n"
    "  dflash-verify plan --verify-tokens 3 --draft-tokens 7   what a width changes in vLLM's configuration\n"
    "  dflash-verify check                                     whether the plugin fits the vLLM that is installed here\n"
    "  DFLASH_VERIFY_TOKENS=auto vllm serve ...                on a GPU, with your own model and drafter"
)


@click.command(name="demo")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
@click.option("--keep", type=click.Path(file_okay=False, path_type=Path), help="Keep models and logs in this folder.")
def demo(as_json: bool, keep: Path | None) -> None:
    """The real vLLM engine on this CPU: stock, width 3, width 1.

    A tiny target and a tiny DFlash2 drafter are generated, and vLLM serves them through Triton's interpreter, once
    without speculation and once per arm. Takes about a minute. Exit status 1 if a width or a text is not what it has to
    be.
    """
    _refuse_without_vllm()
    with tempfile.TemporaryDirectory(prefix="dflash-verify-demo-") as temporary:
        folder = keep or Path(temporary)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise click.ClickException(
                f"--keep {folder} cannot be used ({error.strerror}): name a writable folder."
            ) from None
        results = _run_all(folder, Console(stderr=True))
    rows = [_judge(arm, results[arm.name], results[REFERENCE.name]) for arm in ARMS]
    if as_json:
        click.echo(json.dumps({"arms": rows}))
    else:
        Console().print(_table(rows))
        click.echo(NEXT)
    if not all(row["as_expected"] for row in rows):
        raise SystemExit(1)


def _refuse_without_vllm() -> None:
    if find_spec("vllm") is None:
        raise click.ClickException(
            "the demo runs vLLM, which is not installed here: ./start.sh demo installs it, or pip install "
            "'dflash-verify[vllm]' (about 10 GB)."
        )
    try:
        version("dflash-verify")
    except PackageNotFoundError:
        raise click.ClickException(
            "vLLM finds plugins among installed packages and dflash-verify is not one of them: pip install it (pip "
            "install -e . in a source tree)."
        ) from None


def _run_all(folder: Path, console: Console) -> dict[str, dict[str, Any]]:
    """Results by arm name, at most one engine per CPU core at a time."""
    from dflash_verify.cpu.models import generate

    arms = (REFERENCE, *ARMS)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("generating models", total=len(arms) + 1)
        models = generate(folder / "models")
        progress.update(task, advance=1, description=f"vLLM, {len(arms)} engines")
        results = {}
        with ThreadPoolExecutor(max_workers=max(1, min(len(arms), os.cpu_count() or 1))) as pool:
            waiting = {pool.submit(_run_arm, arm, models.root, folder): arm for arm in arms}
            for done in as_completed(waiting):
                arm = waiting[done]
                try:
                    results[arm.name] = done.result()
                except Exception:
                    for other in waiting:
                        other.cancel()
                    raise
                progress.update(task, advance=1)
                if not console.is_terminal:  # a log file gets lines, a terminal the bar
                    console.print(f"{arm.name}: done")
        return results


def _run_arm(arm: Arm, models: Path, folder: Path) -> dict[str, Any]:
    """Run one arm in a child process. Raises ClickException with its last words when it fails."""
    from dflash_verify.cpu.environment import child_environment

    # The caller's own DFLASH_ settings are for a server, not for a demonstration of these three.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("DFLASH_")}
    # An allow-list made for other plugins would leave both of ours out.
    inherited.pop("VLLM_PLUGINS", None)
    width = {} if arm.verify_tokens is None else {"DFLASH_VERIFY_TOKENS": arm.verify_tokens}
    env = child_environment({"VLLM_LOGGING_LEVEL": "WARNING", **inherited}, width)
    log = folder / f"{arm.name.replace(' ', '-')}.log"
    command = [sys.executable, "-m", "dflash_verify.cpu.demo_arm", str(models), arm.drafter]
    with log.open("w") as stderr:
        done = subprocess.run(
            command, env=env, stdout=subprocess.PIPE, stderr=stderr, text=True, timeout=ARM_TIMEOUT_S, check=False
        )
    if done.returncode:
        tail = "\n".join((log.read_text() + done.stdout).splitlines()[-15:])
        raise click.ClickException(
            f"the engine of arm '{arm.name}' ended with {done.returncode}; its last lines:\n{tail}"
        )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _judge(arm: Arm, result: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """One row. A drafter that is never right, or always, would show nothing: the length must lie in between."""
    equal = result["tokens"] == reference["tokens"]
    length = result["acceptance_length"]
    return {
        "arm": arm.name,
        "verify_tokens": arm.verify_tokens,
        "steps": result["steps"],
        "mean_width": result["mean_width"],
        "acceptance_length": length,
        "equal": equal,
        "as_expected": equal and result["mean_width"] == arm.width and 1.3 <= length <= arm.width + 0.9,
    }


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="vLLM on this CPU: a drafter that proposes 7 tokens, two requests of 64 tokens")
    table.add_column("arm", no_wrap=True)
    for name in ("DFLASH_\nVERIFY_TOKENS", "steps", "scheduled\nwidth per step", "acceptance\nlength"):
        table.add_column(name, justify="right", no_wrap=True)  # fits 80 columns
    table.add_column("equal to no\nspeculation", no_wrap=True)
    for row in rows:
        table.add_row(
            row["arm"],
            row["verify_tokens"] or "unset",
            str(row["steps"]),
            f"{row['mean_width']:.2f}",
            f"{row['acceptance_length']:.2f}",
            "yes" if row["equal"] else "[bold red]no[/]",
        )
    return table
