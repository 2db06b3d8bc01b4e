"""Live view of a server: width, acceptance per position, goodput, step time per width and the controller's last reason."""

from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dflash_verify.bench.endpoint import Snapshot, by_position, by_width
from dflash_verify.bench.summary import mean_width, step_ms


@dataclass(frozen=True, slots=True)
class Moment:
    """The change between two snapshots, per second where it says so."""

    seconds: float
    tok_s: float
    steps: dict[int, float]
    step_ms: dict[int, float]
    mean_width: float | None
    tokens_per_step: float | None
    acceptance: tuple[float | None, ...]
    nonuniform: float


def moment(before: Snapshot, after: Snapshot) -> Moment:
    drafts = (after.drafts or 0.0) - (before.drafts or 0.0)
    accepted = by_position(after.accepted, before.accepted)
    verified = by_position(after.verified, before.verified) or tuple(drafts for _ in accepted)
    seconds = max(after.unix_s - before.unix_s, 1e-9)
    return Moment(
        seconds=seconds,
        tok_s=(after.generation_tokens - before.generation_tokens) / seconds,
        steps=by_width(after.steps, before.steps),
        step_ms=step_ms(before, after),
        mean_width=mean_width(before, after),
        tokens_per_step=1 + ((after.accepted_tokens or 0) - (before.accepted_tokens or 0)) / drafts if drafts else None,
        acceptance=tuple(a / v if v else None for a, v in zip(accepted, verified, strict=True)),
        nonuniform=(after.nonuniform_steps or 0) - (before.nonuniform_steps or 0),
    )


def view(url: str, now: Snapshot, last: Moment) -> RenderableType:
    """What `watch` shows."""
    head = Table.grid(padding=(0, 3))
    head.add_row(
        _fact("goodput", f"{last.tok_s:.1f} tok/s"),
        _fact("mean width", "–" if last.mean_width is None else f"{last.mean_width:.2f}"),
        _fact("tokens/step", "–" if last.tokens_per_step is None else f"{last.tokens_per_step:.2f}"),
        _fact("running", f"{now.running:.0f}"),
        _fact("waiting", f"{now.waiting:.0f}"),
    )
    parts: list[RenderableType] = [head]
    if now.has_plugin:
        widths = Table(box=None, padding=(0, 2), title="steps by width", title_justify="left")
        for column in ("width", "steps/s", "share", "", "step ms"):
            widths.add_column(column, justify="left" if column == "" else "right")
        total = sum(last.steps.values())
        for width in sorted({*last.steps, *(int(w) for w in now.steps)}):
            n = last.steps.get(width, 0.0)
            share = n / total if total else 0.0
            time_ms = last.step_ms.get(width)
            widths.add_row(
                str(width),
                f"{n / last.seconds:.1f}",
                f"{share * 100:.0f} %",
                ProgressBar(total=1.0, completed=share, width=20),
                "–" if time_ms is None else f"{time_ms:.1f}",
            )
        parts.append(widths)
    acceptance = Table(box=None, padding=(0, 2), title="accepted / verified by position", title_justify="left")
    for column in ("position", "share", ""):
        acceptance.add_column(column, justify="left" if column == "" else "right")
    for position, accepted in enumerate(last.acceptance, 1):
        acceptance.add_row(
            str(position),
            "–" if accepted is None else f"{accepted * 100:.0f} %",
            ProgressBar(total=1.0, completed=accepted or 0.0, width=20),
        )
    if last.acceptance:
        parts.append(acceptance)
    if now.info is None:
        parts.append(Text("The server exports no dflash_verify_* counters: no width is active there.", style="yellow"))
    else:
        active = "chooses the width" if now.policy_active else "is not in charge (control file or vLLM's own schedule)"
        parts.append(Text(f"mode {now.info['mode']} {active}; {last.nonuniform:.0f} non-uniform steps"))
        if now.reason:
            parts.append(Text(f"last decision: {now.reason}"))
    return Panel(Group(*parts), title=f"dflash-verify watch {url}", title_align="left")


def _fact(name: str, value: str) -> Text:
    return Text.assemble((f"{name} ", "dim"), (value, "bold"))
