"""What a width decision costs the scheduler: microseconds per decision and per observed request.

    python bench/width/decision_cost.py [--repeats 40] [--estimator class|hazard]

One step = observe + observe_step + forget + decide, on a batch whose requests stay, or turn over: they live 128 steps, so
that at batch 256 two end and two arrive in every step. learning: without a table; with 0: width 0 is listed. Each figure is the median
over repeated runs of the mean over a run's steps, in CPU time of the calling thread; the fastest run is printed too,
since a shared machine only ever adds.
"""

import argparse
import itertools
import statistics
import time

import numpy as np

from dflash_verify.width.acceptance import ESTIMATORS
from dflash_verify.width.controller import WidthController
from dflash_verify.width.cost import CostModel, CostTable

WIDTHS = {"measured": (1, 3, 5, 7), "with 0": (0, 1, 3, 5, 7), "learning": (1, 3, 5, 7)}
BATCHES = (1, 4, 32, 256)
STEPS = 200
BEFORE = 300  # steps until what is measured is the steady state
LIFE = 128


def table(widths: tuple[int, ...]) -> CostTable:
    cells = {b: tuple(20.0 + 0.05 * b * (k + 1) for k in widths) for b in (1, 2, 4, 8, 16, 32, 64, 128, 256)}
    return CostTable(7, widths, cells)


def run(
    batch: int, model: CostModel, estimator: str, rng: np.random.Generator, turn_over: bool
) -> tuple[float, float, float]:
    """Mean us per step of decide, of observe, and of observe_step and forget."""
    controller = WidthController(model.widths, 7, model, estimator=estimator)
    ids = [f"request-{i:032x}" for i in range(batch)]
    accepts = (rng.random((BEFORE + STEPS, batch, 1)) < np.array([0.75, 0.58, 0.41, 0.28, 0.16, 0.09, 0.06])).sum(
        axis=2
    )
    took = [0, 0, 0]
    before = ids
    controller.decide(ids)
    width = 7
    for step in range(BEFORE + STEPS):
        if step == BEFORE:
            took = [0, 0, 0]
        due = (step + 1) * batch // LIFE - step * batch // LIFE if turn_over else 0
        gone, ids = ids[:due], [*ids[due:], *(f"request-{step}-{i:030x}" for i in range(due))]
        accepted = np.minimum(accepts[step], width).tolist()
        step_ms = 20.0 + 0.05 * batch * (width + 1) * float(rng.normal(1.0, 0.03))
        t0 = time.thread_time_ns()
        controller.observe(before, width, accepted)
        t1 = time.thread_time_ns()
        controller.observe_step(batch, width, step_ms)
        controller.forget(gone)
        t2 = time.thread_time_ns()
        width = controller.decide(ids).width
        t3 = time.thread_time_ns()
        before = ids
        took[0] += t3 - t2
        took[1] += t1 - t0
        took[2] += t2 - t1
    return took[0] / STEPS / 1e3, took[1] / STEPS / 1e3, took[2] / STEPS / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--estimator", choices=sorted(ESTIMATORS), default="class")
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    print(f"estimator {arguments.estimator}, {STEPS} steps a run, {arguments.repeats} runs; us: median (fastest)")
    print(
        f"{'cost':9s} {'requests':9s} {'batch':>5s} {'decide':>15s} {'observe':>15s} {'per request':>15s} {'time, forget':>15s} {'step in all':>15s}"
    )
    for name, requests in itertools.product(WIDTHS, ("stay", "turn over")):
        for batch in BATCHES:
            runs = []
            for _ in range(arguments.repeats):
                widths = WIDTHS[name]
                model = CostModel(widths, 7, None if name == "learning" else table(widths))
                runs.append(run(batch, model, arguments.estimator, rng, requests == "turn over"))
            decide, observe, timed = zip(*runs, strict=True)
            per_request = [us / batch for us in observe]
            in_all = [sum(each) for each in runs]
            columns = [
                f"{statistics.median(c):8.2f} ({min(c):.2f})" for c in (decide, observe, per_request, timed, in_all)
            ]
            print(f"{name:9s} {requests:9s} {batch:5d} " + " ".join(f"{c:>15s}" for c in columns))


if __name__ == "__main__":
    main()
