"""Auto against every static width over all cost models and acceptance profiles.

    python bench/width/sweep.py exact|none|wrong [--seeds 20] [--steps 2000] [--delay 1|2] [--hazard] [--extra] [--csv FILE]

exact: the measured table, no noise. none: no table; wrong: a table off by 30 % per width; both see step times with 10 %
noise, 1 % of them tripled. Ratios are to the best static width of the same workload, which no operator knows beforehand.
"""

import argparse
import csv
import sys
from collections import defaultdict

import numpy as np

from dflash_verify.simulate.compare import BELIEFS, Comparison, sweep
from dflash_verify.simulate.generate import EXTRA_SETTINGS, PROFILES, SETTINGS


def describe(name: str, ratios: list[float]) -> str:
    r = np.array(ratios)
    quantiles = " / ".join(f"{q:.4f}" for q in np.percentile(r, [0, 1, 5, 50, 95, 100]))
    shares = " ".join(f">={limit}: {100 * (r >= limit).mean():.1f} %" for limit in (0.95, 0.98, 0.985, 0.99, 1.0))
    return f"{name:24s} n={len(r):5d} mean {r.mean():.4f}  min/p1/p5/median/p95/max {quantiles}  {shares}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("belief", choices=BELIEFS)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--delay", type=int, default=1, choices=(1, 2))
    parser.add_argument("--hazard", action="store_true", help="also run the per-position hazard estimator")
    parser.add_argument("--extra", action="store_true", help="the batch sizes 1 and 256 instead")
    parser.add_argument("--csv", help="write every run")
    arguments = parser.parse_args()
    estimators = ("class", "hazard") if arguments.hazard else ("class",)
    runs: list[Comparison] = []
    for run in sweep(
        EXTRA_SETTINGS if arguments.extra else SETTINGS,
        range(arguments.seeds),
        belief=arguments.belief,
        steps=arguments.steps,
        delay=arguments.delay,
        estimators=estimators,
    ):
        runs.append(run)
        if len(runs) % 50 == 0:
            print(f"{len(runs)} runs", file=sys.stderr, flush=True)
    for estimator in estimators:
        print(describe(f"{arguments.belief}, {estimator}, all", [r.of_best_static(estimator) for r in runs]))
        steady = [r.of_best_static(estimator) for r in runs if not PROFILES[r.profile].moves]
        moving = [r.of_best_static(estimator) for r in runs if PROFILES[r.profile].moves]
        print(describe("  stationary", steady))
        print(describe("  moving", moving))
        print(describe("  against full width", [r.of_full_width(estimator) for r in runs]))
        cells: dict[tuple[str, str], list[float]] = defaultdict(list)
        for r in runs:
            cells[f"{r.cost} x{r.max_num_seqs}", r.profile].append(r.of_best_static(estimator))
        columns = sorted({column for column, _ in cells})
        print(f"  mean (min) per pair   {' '.join(f'{c:>21s}' for c in columns)}")
        for profile in PROFILES:
            row = [cells[c, profile] for c in columns]
            print(f"  {profile:20s}  " + " ".join(f"{np.mean(v):12.4f} ({min(v):.4f})" for v in row))
    if arguments.hazard:
        gain = np.array([r.auto["class"] / r.auto["hazard"] - 1.0 for r in runs])
        print(
            f"class over hazard: {100 * gain.mean():+.3f} % (standard error {100 * gain.std() / len(gain) ** 0.5:.3f} %), "
            f"better in {100 * (gain > 0).mean():.0f} %, worse in {100 * (gain < 0).mean():.0f} % of runs"
        )
    if arguments.csv:
        with open(arguments.csv, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(
                ["cost", "max_num_seqs", "profile", "seed", "belief", "best_static", "static_full", *estimators]
            )
            for r in runs:
                best, full = max(r.static.values()), r.static[max(r.static)]
                writer.writerow(
                    [r.cost, r.max_num_seqs, r.profile, r.seed, r.belief, best, full, *(r.auto[e] for e in estimators)]
                )


if __name__ == "__main__":
    main()
