"""The charts of a report, drawn with matplotlib in a light and a dark theme."""

import base64
import io
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dflash_verify.bench.summary import Row, Summary, counted_runs
from dflash_verify.bench.verdict import arm_labels

# Baselines are grey; the others keep hue order and differ in marker too, for readers who do not tell the hues apart.
_MARKERS = "osD^vPX*"


@dataclass(frozen=True, slots=True)
class Theme:
    background: str
    ink: str
    muted: str
    grid: str
    baseline: str
    hues: tuple[str, ...]


LIGHT = Theme(
    "#ffffff", "#1c2330", "#5d6778", "#e3e7ee", "#7b8494", ("#1f6fd0", "#c8520a", "#0f8a5f", "#8a3fc2", "#b8860b")
)
DARK = Theme(
    "#171b22", "#e8ecf3", "#9aa5b6", "#2b323d", "#8b95a6", ("#6aaeff", "#ff9a55", "#3fcf97", "#c793ff", "#e6b84a")
)


@dataclass(frozen=True, slots=True)
class Chart:
    """title, one sentence that says how to read it, and a function that draws it on axes."""

    title: str
    reading: str
    draw: Callable[[Any, Theme], None]


def charts(manifest: dict[str, Any], records: list[dict[str, Any]], summary: Summary) -> list[Chart]:
    labels = arm_labels(manifest)
    styles = {name: (index, name in manifest.get("baselines", [])) for index, name in enumerate(labels)}

    def look(arm: str, theme: Theme) -> dict[str, Any]:
        index, baseline = styles[arm]
        hue = sum(not b for _, b in list(styles.values())[:index])
        colour = theme.baseline if baseline else theme.hues[hue % len(theme.hues)]
        return {"color": colour, "marker": _MARKERS[index % len(_MARKERS)]}

    found = [
        Chart(
            "Throughput",
            "Tokens per second over all streams; the bar is the 95 % interval of the median run.",
            lambda ax, theme: _throughput(ax, theme, summary, labels, look),
        )
    ]
    workload = _most_informative(summary)
    if workload is not None:
        found.append(
            Chart(
                f"Acceptance per position: {workload}",
                "Share of the verified drafts at a position that were accepted.",
                lambda ax, theme: _acceptance(ax, theme, summary, workload, labels, look),
            )
        )
    found.append(
        Chart(
            "Verify width over time",
            "Mean width between two samples, over the whole measurement; it also shows the order of the arms.",
            lambda ax, theme: _widths(ax, theme, records, labels, look),
        )
    )
    found.append(
        Chart(
            "Cost of a step",
            "Step time by verify width, one line per number of streams.",
            lambda ax, theme: _staircase(ax, theme, summary),
        )
    )
    return found


Look = Callable[[str, Theme], dict[str, Any]]


def _throughput(ax: Any, theme: Theme, summary: Summary, labels: dict[str, str], look: Look) -> None:
    rows = [row for row in summary.rows if row.tok_s is not None]
    places = list(dict.fromkeys(_short_place(row) for row in rows))
    arms = [arm for arm in labels if any(row.arm == arm for row in rows)]
    seen: set[str] = set()
    for row in rows:
        assert row.tok_s is not None
        # Arms of one place lie side by side within 0.7 of the row.
        offset = (arms.index(row.arm) + 0.5) / len(arms) - 0.5
        ax.errorbar(
            row.tok_s.median,
            places.index(_short_place(row)) + 0.7 * offset,
            xerr=[[row.tok_s.median - row.tok_s.low], [row.tok_s.high - row.tok_s.median]],
            label=labels[row.arm] if row.arm not in seen else None,
            linestyle="none",
            markersize=6,
            capsize=2.5,
            **look(row.arm, theme),
        )
        seen.add(row.arm)
    ax.set_yticks(range(len(places)), places)
    ax.set_ylim(len(places) - 0.5, -0.5)
    for edge in range(1, len(places)):
        ax.axhline(edge - 0.5, color=theme.grid, linewidth=0.8)
    ax.set_xlim(left=0)
    ax.set_xlabel("tok/s")
    ax.grid(axis="x", color=theme.grid)
    _legend(ax, theme)


def _short_place(row: Row) -> str:
    slots = f" ({row.max_num_seqs} slots)" if row.max_num_seqs else ""
    return f"{row.workload} x{row.concurrency}{slots}"


def _most_informative(summary: Summary) -> str | None:
    """The workload whose acceptance falls most from first to last position: there a width has something to decide."""
    falls = {
        row.workload: row.acceptance[0] - (row.acceptance[-1] or 0.0)
        for row in summary.rows
        if row.acceptance and row.acceptance[0] is not None
    }
    return max(falls, key=lambda name: falls[name]) if falls else None


def _acceptance(ax: Any, theme: Theme, summary: Summary, workload: str, labels: dict[str, str], look: Look) -> None:
    rows = [row for row in summary.rows if row.workload == workload]
    concurrency = min(row.concurrency for row in rows)
    seqs = min(row.max_num_seqs for row in rows)
    for row in rows:
        if (row.concurrency, row.max_num_seqs) != (concurrency, seqs):
            continue
        points = [(i + 1, a) for i, a in enumerate(row.acceptance) if a is not None]
        if points:
            ax.plot(
                *zip(*points, strict=True), label=labels[row.arm], markersize=5, linewidth=1.6, **look(row.arm, theme)
            )
    ax.set_ylim(0, 1.03)
    ax.set_xlabel(f"draft position ({concurrency} stream{'s' if concurrency > 1 else ''})")
    ax.set_ylabel("accepted / verified")
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.grid(axis="y", color=theme.grid)
    _legend(ax, theme)


def width_points(records: list[dict[str, Any]]) -> list[tuple[str, list[tuple[float, float]]]]:
    """(arm, [(seconds since the first run, mean width)]) of every counted run, in order."""
    runs = counted_runs(records)
    if not runs:
        return []
    start_s = runs[0][1]["before"]["unix_s"]
    found = []
    for cell, run, _ in runs:
        at = run["before"]["unix_s"] - start_s
        timeline = [
            {"s": 0.0, "steps": {}, "drafts": 0, "draft_tokens": 0},
            *run["timeline"],
            {
                "s": run["after"]["unix_s"] - run["before"]["unix_s"],
                "steps": {w: n - run["before"]["steps"].get(w, 0) for w, n in run["after"]["steps"].items()},
                "drafts": (run["after"]["drafts"] or 0) - (run["before"]["drafts"] or 0),
                "draft_tokens": (run["after"]["draft_tokens"] or 0) - (run["before"]["draft_tokens"] or 0),
            },
        ]
        points = []
        for earlier, later in itertools.pairwise(timeline):
            moved = {int(w): n - earlier["steps"].get(w, 0) for w, n in later["steps"].items()}
            steps = sum(moved.values())
            drafts = (later["drafts"] or 0) - (earlier["drafts"] or 0)
            if steps:
                width = sum(w * n for w, n in moved.items()) / steps
            elif drafts and not later["steps"]:
                width = ((later["draft_tokens"] or 0) - (earlier["draft_tokens"] or 0)) / drafts
            else:
                continue
            points.append((at + (earlier["s"] + later["s"]) / 2, width))
        found.append((cell.arm, points))
    return found


def _widths(ax: Any, theme: Theme, records: list[dict[str, Any]], labels: dict[str, str], look: Look) -> None:
    seen: set[str] = set()
    for arm, points in width_points(records):
        if points:
            style = look(arm, theme)
            ax.plot(
                *zip(*points, strict=True),
                label=labels[arm] if arm not in seen else None,
                markersize=2.5,
                linewidth=1.1,
                **style,
            )
            seen.add(arm)
    if not seen:
        _say(ax, theme, "the server did not speculate")
        return
    ax.set_ylim(bottom=0)
    ax.set_xlabel("seconds since the first run")
    ax.set_ylabel("mean width")
    ax.grid(axis="y", color=theme.grid)
    _legend(ax, theme)


def _staircase(ax: Any, theme: Theme, summary: Summary) -> None:
    lines: dict[int, dict[int, list[float]]] = {}
    for row in summary.rows:
        for width, ms in row.step_ms.items():
            lines.setdefault(row.concurrency, {}).setdefault(width, []).append(ms)
    if not lines:
        _say(ax, theme, "step times need the plugin's counters")
        return
    for index, (concurrency, by_width) in enumerate(sorted(lines.items())):
        widths = sorted(by_width)
        means = [sum(by_width[w]) / len(by_width[w]) for w in widths]
        ax.plot(
            widths,
            means,
            label=f"{concurrency} stream{'s' if concurrency > 1 else ''}",
            color=theme.hues[index % len(theme.hues)],
            marker=_MARKERS[index % len(_MARKERS)],
            markersize=5,
            linewidth=1.6,
        )
    ax.set_ylim(bottom=0)
    ax.set_xlabel("verify width")
    ax.set_ylabel("ms per step")
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.grid(axis="y", color=theme.grid)
    _legend(ax, theme)


def _say(ax: Any, theme: Theme, text: str) -> None:
    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center", color=theme.muted)
    ax.set_xticks([])
    ax.set_yticks([])


def _legend(ax: Any, theme: Theme) -> None:
    """Above the axes, where it covers no data."""
    handles, names = ax.get_legend_handles_labels()
    if handles:
        ax.legend(
            handles,
            names,
            loc="lower left",
            bbox_to_anchor=(-0.02, 1.0),
            ncols=min(len(names), 4),
            frameon=False,
            fontsize=8.5,
            labelcolor=theme.ink,
            handletextpad=0.4,
            columnspacing=1.1,
            borderaxespad=0.2,
        )


@contextmanager
def _themed(theme: Theme, salt: str) -> Iterator[Any]:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    settings = {
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": 9.5,
        "axes.facecolor": theme.background,
        "figure.facecolor": theme.background,
        "savefig.facecolor": theme.background,
        "text.color": theme.ink,
        "axes.labelcolor": theme.muted,
        "axes.edgecolor": theme.grid,
        "xtick.color": theme.muted,
        "ytick.color": theme.muted,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "svg.fonttype": "path",  # the reader's fonts have other widths
        "svg.hashsalt": salt,  # the same records give the same file
    }
    with mpl.rc_context(settings):
        yield Figure


def svg_data_url(chart: Chart, theme: Theme, height_in: float = 3.4) -> str:
    """One chart as a data URL for an img element."""
    with _themed(theme, chart.title) as figure_class:
        figure = figure_class(figsize=(5.2, height_in), layout="constrained")
        chart.draw(figure.subplots(), theme)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()


def png(all_charts: list[Chart], title: str, footer: str) -> bytes:
    """All charts on one light sheet with the verdict above."""
    with _themed(LIGHT, "sheet") as figure_class:
        figure = figure_class(figsize=(13, 9.4), layout="constrained", dpi=120)
        figure.get_layout_engine().set(w_pad=0.15, h_pad=0.15)
        figure.suptitle(title, x=0.012, ha="left", fontsize=12.5, color=LIGHT.ink, wrap=True)
        figure.supxlabel(footer, x=0.012, ha="left", fontsize=8.5, color=LIGHT.muted)
        axes = figure.subplots(2, 2).ravel()
        for ax, chart in zip(axes, all_charts, strict=False):
            chart.draw(ax, LIGHT)
            ax.set_title(chart.title, loc="left", fontsize=11, color=LIGHT.ink, pad=24)
        for ax in axes[len(all_charts) :]:
            ax.set_visible(False)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()
