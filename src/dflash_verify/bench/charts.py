"""The charts of a report, drawn with matplotlib in a light and a dark theme."""

import base64
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from dflash_verify.bench.summary import Row, Summary, counted_runs
from dflash_verify.bench.verdict import arm_labels

# Baselines are grey; the others keep hue order and differ in marker too, for readers who do not tell the hues apart.
_MARKERS = "osD^vPX*"
_MIN_STEPS_PER_POINT = 10


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
    """title, one sentence that says how to read it, and a function that draws it on axes.

    on_sheet: it is one of those on the PNG.
    """

    title: str
    reading: str
    draw: Callable[[Any, Theme], None]
    on_sheet: bool = True


Look = Callable[[str, Theme], dict[str, Any]]


def charts(manifest: dict[str, Any], records: list[dict[str, Any]], summary: Summary) -> list[Chart]:
    labels = arm_labels(manifest)
    styles = {name: (index, name in manifest.get("baselines", [])) for index, name in enumerate(labels)}

    def look(arm: str, theme: Theme) -> dict[str, Any]:
        index, baseline = styles[arm]
        hue = sum(not b for _, b in list(styles.values())[:index])
        colour = theme.baseline if baseline else theme.hues[hue % len(theme.hues)]
        return {"color": colour, "marker": _MARKERS[index % len(_MARKERS)]}

    sizes = sorted({(row.max_num_seqs, row.concurrency) for row in summary.rows})
    found = [
        Chart(
            f"Throughput, {_size(*size)}",
            "Tokens per second over all streams; the bar is the 95 % interval of the median run.",
            partial(_throughput, rows=_of_size(summary, size), labels=labels, look=look),
            on_sheet=size in (sizes[0], sizes[-1]),
        )
        for size in sizes
    ]
    steepest = _most_informative(summary)
    found += [
        Chart(
            f"Acceptance per position, {workload}",
            f"Share of the verified drafts at a position that were accepted, {_size(*sizes[0])}.",
            partial(_acceptance, rows=rows, labels=labels, look=look),
            on_sheet=workload == steepest,
        )
        for workload in dict.fromkeys(row.workload for row in summary.rows)
        if any(rows := [r for r in _of_size(summary, sizes[0]) if r.workload == workload and r.accepted])
    ]
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


def _size(max_num_seqs: int, concurrency: int) -> str:
    streams = f"{concurrency} stream{'s' if concurrency > 1 else ''}"
    return f"{streams} of {max_num_seqs} slots" if max_num_seqs else streams


def _of_size(summary: Summary, size: tuple[int, int]) -> list[Row]:
    return [row for row in summary.rows if (row.max_num_seqs, row.concurrency) == size]


def _throughput(ax: Any, theme: Theme, rows: list[Row], labels: dict[str, str], look: Look) -> None:
    places = list(dict.fromkeys(row.workload for row in rows))
    arms = [arm for arm in labels if any(row.arm == arm for row in rows)]
    seen: set[str] = set()
    for row in rows:
        assert row.tok_s is not None
        # Arms of one workload lie side by side within 0.7 of its row.
        offset = (arms.index(row.arm) + 0.5) / len(arms) - 0.5
        ax.errorbar(
            row.tok_s.median,
            places.index(row.workload) + 0.7 * offset,
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


def _most_informative(summary: Summary) -> str | None:
    """The workload whose acceptance falls most from first to last position: there a width has something to decide."""
    falls = {
        row.workload: row.acceptance[0] - (row.acceptance[-1] or 0.0)
        for row in summary.rows
        if row.acceptance and row.acceptance[0] is not None
    }
    return max(falls, key=lambda name: falls[name]) if falls else None


def _acceptance(ax: Any, theme: Theme, rows: list[Row], labels: dict[str, str], look: Look) -> None:
    for row in rows:
        points = [(i + 1, a) for i, a in enumerate(row.acceptance) if a is not None]
        if points:
            ax.plot(
                *zip(*points, strict=True), label=labels[row.arm], markersize=5, linewidth=1.6, **look(row.arm, theme)
            )
    ax.set_ylim(0, 1.03)
    ax.set_xlabel("draft position")
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
        points: list[tuple[float, float]] = []
        earlier = timeline[0]
        for later in timeline[1:]:
            moved = {int(w): n - earlier["steps"].get(w, 0) for w, n in later["steps"].items()}
            drafts = (later["drafts"] or 0) - (earlier["drafts"] or 0)
            weight = sum(moved.values()) if later["steps"] else drafts
            # A sample that caught two steps is noise, unless the whole run was that short.
            if weight < _MIN_STEPS_PER_POINT and not (later is timeline[-1] and not points):
                continue
            if later["steps"]:
                width = sum(w * n for w, n in moved.items()) / weight if weight else None
            else:
                width = ((later["draft_tokens"] or 0) - (earlier["draft_tokens"] or 0)) / drafts if drafts else None
            if width is not None:
                points.append((at + (earlier["s"] + later["s"]) / 2, width))
            earlier = later
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


def svg_data_url(chart: Chart, theme: Theme) -> str:
    """One chart as a data URL for an img element."""
    with _themed(theme, chart.title) as figure_class:
        figure = figure_class(figsize=(5.2, 3.4), layout="constrained")
        chart.draw(figure.subplots(), theme)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()


def png(all_charts: list[Chart], title: str, footer: str) -> bytes:
    """The main charts on one light sheet with the verdict above."""
    shown = [chart for chart in all_charts if chart.on_sheet]
    rows = -(-len(shown) // 2)
    with _themed(LIGHT, "sheet") as figure_class:
        figure = figure_class(figsize=(13, 1.6 + 4.0 * rows), layout="constrained", dpi=120)
        figure.get_layout_engine().set(w_pad=0.15, h_pad=0.15)
        figure.suptitle(title, x=0.012, ha="left", fontsize=11.5, color=LIGHT.ink, linespacing=1.4)
        figure.supxlabel(footer, x=0.012, ha="left", fontsize=8.5, color=LIGHT.muted)
        axes = figure.subplots(rows, 2, squeeze=False).ravel()
        for ax, chart in zip(axes, shown, strict=False):
            chart.draw(ax, LIGHT)
            ax.set_title(chart.title, loc="left", fontsize=11, color=LIGHT.ink, pad=24)
        for ax in axes[len(shown) :]:
            ax.set_visible(False)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()
