"""What each part of the controller is worth: the sweep of generated workloads with one thing changed at a time.

    python bench/width/ablation.py [--seeds 1] [--steps 500] [--delay 1]

Exact table, all cost models and profiles; ratios to the best static width. Differences under 0.1 % are noise.
"""

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from unittest.mock import patch

import numpy as np

from dflash_verify.simulate.compare import sweep
from dflash_verify.simulate.generate import PROFILES, SETTINGS
from dflash_verify.width.acceptance import ClassFilter
from dflash_verify.width.controller import WidthController


def constant(owner: type, name: str, value: object) -> Callable[[], AbstractContextManager[object]]:
    return lambda: patch.object(owner, name, value)


def plain_sum() -> AbstractContextManager[object]:
    def sums(self: WidthController, expected: np.ndarray, batch: int) -> tuple[list[float], list[float]]:
        total = expected.sum(axis=0).tolist()[:-1]
        return total, total

    return patch.object(WidthController, "_sums", sums)


def no_shape() -> AbstractContextManager[object]:
    return patch.object(ClassFilter, "_learn_shape", lambda self: self._shape_steps.clear())


VARIANTS: dict[str, list[Callable[[], AbstractContextManager[object]]]] = {
    "as it is": [],
    "plain sum of tokens": [plain_sum],
    "no shape": [no_shape],
    "all-or-nothing mass 0.1": [constant(ClassFilter, "ALL_OR_NOTHING_MASS", 0.1)],
    "switch every 20 steps": [constant(ClassFilter, "SWITCH", 0.05)],
    "switch every 200 steps": [constant(ClassFilter, "SWITCH", 0.005)],
    "no probe": [constant(WidthController, "PROBE_SHARE", 0.0)],
    "probe budget 0.6 %": [constant(WidthController, "PROBE_SHARE", 0.006)],
    "no hysteresis": [constant(WidthController, "HYSTERESIS", 1.0)],
    "hysteresis 2 %": [constant(WidthController, "HYSTERESIS", 1.02)],
    "no warm-up": [constant(WidthController, "WARM_UP", 0)],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--delay", type=int, default=1, choices=(1, 2))
    arguments = parser.parse_args()
    print(f"{'variant':26s} {'stationary mean / min':>24s} {'moving mean / min':>24s}")
    for name, changes in VARIANTS.items():
        with ExitStack() as stack:
            for change in changes:
                stack.enter_context(change())
            runs = list(sweep(SETTINGS, range(arguments.seeds), steps=arguments.steps, delay=arguments.delay))
        columns = []
        for moves in (False, True):
            r = np.array([run.of_best_static() for run in runs if PROFILES[run.profile].moves == moves])
            columns.append(f"{r.mean():.4f} / {r.min():.4f}")
        print(f"{name:26s} {columns[0]:>24s} {columns[1]:>24s}", flush=True)


if __name__ == "__main__":
    main()
