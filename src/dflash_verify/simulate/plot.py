"""One picture of a replay: the width over time, tok/s per policy, and the cost staircase the policy walks on."""

from collections.abc import Mapping
from pathlib import Path

from dflash_verify.simulate.replay import Result
from dflash_verify.simulate.trace import Trace
from dflash_verify.width.cost import CostTable


def draw(path: Path, trace: Trace, cost: CostTable, results: Mapping[str, Result], *, focus: Result) -> None:
    """Write a PNG. results: by policy name. focus: the policy whose widths are drawn.

    Raises ValueError when matplotlib is not installed or the file cannot be written.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        raise ValueError("--plot needs matplotlib, which is not installed; pip install matplotlib") from None

    figure, (over_time, rates, stairs) = plt.subplots(3, 1, figsize=(11, 12), constrained_layout=True)

    seconds = [ms / 1000.0 for ms in [*focus.starts_ms, focus.ms]]
    over_time.stairs(
        focus.widths, seconds, color="tab:blue", linewidth=0.9, baseline=None, label=f"width ({focus.policy})"
    )
    over_time.set_ylim(-0.3, cost.draft_width + 0.5)
    over_time.set_yticks(cost.widths)
    over_time.set_ylabel("verify width K")
    over_time.set_xlabel("time, s")
    running = over_time.twinx()
    running.stairs(focus.batches, seconds, color="tab:gray", alpha=0.5, linewidth=0.8, baseline=None)
    running.set_ylabel("requests running", color="tab:gray")
    running.set_ylim(0, trace.max_num_seqs * 1.1 + 1)
    over_time.set_title(f"{focus.policy}: {focus.tok_s:.1f} tok/s")

    best = max((r.tok_s for name, r in results.items() if name.startswith("static:")), default=focus.tok_s)
    names = list(results)
    values = [results[name].tok_s for name in names]
    colours = ["tab:blue" if n == "auto" else "tab:green" if n == "oracle" else "tab:gray" for n in names]
    bars = rates.bar(names, values, color=colours)
    rates.bar_label(bars, [f"{v:.1f}\n{v / best:.3f}" for v in values], fontsize=8)
    rates.axhline(best, color="black", linewidth=0.6, linestyle="--")
    rates.set_ylim(0, max(values) * 1.15)
    rates.set_ylabel("tok/s (and share of best static)")
    rates.tick_params(axis="x", rotation=30)

    most = max(trace.max_num_seqs, 2)
    batches = sorted({*range(1, min(most, 32) + 1), *(b for b in cost.cells if b <= most), most})
    for j, width in enumerate(cost.widths):
        stairs.plot(batches, [cost.row(b)[j] for b in batches], marker=".", linewidth=1, label=f"K = {width}")
    stairs.set_xlabel("requests in the step")
    stairs.set_ylabel("step time, ms")
    stairs.set_ylim(bottom=0)
    stairs.legend(ncol=4, fontsize=8)
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise ValueError(f"--plot {path}: cannot be written ({error.strerror or error})") from None
    except ValueError as error:
        raise ValueError(f"--plot {path}: {error}; expected a name like widths.png") from None
    finally:
        plt.close(figure)
