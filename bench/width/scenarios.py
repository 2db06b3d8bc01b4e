"""Auto on the scenarios with reference values, as ratios.

python bench/width/scenarios.py [--delay 1|2] [--estimator class|hazard]
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from dflash_verify.simulate.command import make_policy
from dflash_verify.simulate.replay import replay
from dflash_verify.simulate.trace import Trace
from dflash_verify.width.acceptance import ESTIMATORS
from dflash_verify.width.cost import CostTable

SCENARIOS = Path(__file__).parents[2] / "tests" / "data" / "scenarios"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delay", type=int, default=1, choices=(1, 2))
    parser.add_argument("--estimator", choices=sorted(ESTIMATORS), default="class")
    arguments = parser.parse_args()
    if not (SCENARIOS / "reference.json").is_file():
        sys.exit(f"{SCENARIOS} has no reference.json; expected the repository's scenarios, so run this in a clone")
    reference = json.loads((SCENARIOS / "reference.json").read_text())
    against = {
        "best static": lambda r: r["best_static"]["tok_s"],
        "full width": lambda r: r["static_7"],
        "recommended": lambda r: r["recommended"],
        "ema-min": lambda r: r["ema_min"],
        "oracle": lambda r: r["oracle"],
    }
    print(f"{'scenario':22s} {'tok/s':>9s}  " + " ".join(f"{name:>12s}" for name in against) + "  steps per width")
    rows = []
    for name, values in reference.items():
        cost = CostTable.load(SCENARIOS / f"{name}.cost.json")
        trace = Trace.load(SCENARIOS / f"{name}.trace.json")
        auto = make_policy("auto", cost, belief=cost, estimator=arguments.estimator)
        result = replay(trace, cost, auto, delay=arguments.delay)
        rows.append([result.tok_s / of(values) for of in against.values()])
        steps = " ".join(f"{width}:{count}" for width, count in result.steps(cost.widths).items())
        print(f"{name:22s} {result.tok_s:9.2f}  " + " ".join(f"{r:12.4f}" for r in rows[-1]) + f"  {steps}")
    print(f"{'mean':22s} {'':9s}  " + " ".join(f"{r:12.4f}" for r in np.mean(rows, axis=0)))


if __name__ == "__main__":
    main()
