"""Waves of requests that alternate between structured text and prose, all at once: how fast does the width follow?

    python bench/width/waves.py [--table FILE] [--streams 8,32,128,256] [--tokens 120] [--seeds 5]

The workload of `bench/gpu/width.py`'s regime *alternating*, simulated on a measured cost table: every wave is new requests,
which say nothing about themselves, after others that were unlike them. *informed* knows the wave's survival curve and takes
the best width for the requests that are left; what it lacks is only the delay. Ratios of tok/s, mean over the seeds; sd: of one
run's tok/s, which draws its own acceptance. With --plain-ms a step at width 0 takes so much longer than the table of `auto` says.
"""

import argparse
import dataclasses
import itertools
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from dflash_verify.simulate.generate import SURVIVAL
from dflash_verify.width.controller import WidthController
from dflash_verify.width.cost import CostTable, CostTableError

REPOSITORY = Path(__file__).parents[2]
TABLE = REPOSITORY / "bench/gpu/results/2026-11-29-h200-qwen3-8b-cost.json"
WAVES = 4  # of the texts in turn
DELAY = 2  # asynchronous scheduling: a step is decided when the one before the last has come back
PREFILL_STEPS = 1.5  # of full width, at the start of a wave


class Policy(Protocol):
    def decide(self, ids: list[str], kind: str) -> int: ...
    def observe(self, ids: list[str], width: int, accepted: list[int], step_ms: float, ended: list[str]) -> None: ...


class Auto:
    def __init__(self, table: CostTable) -> None:
        self.controller = WidthController(table.widths, table.draft_width, table)

    def decide(self, ids: list[str], kind: str) -> int:
        return self.controller.decide(ids).width

    def observe(self, ids: list[str], width: int, accepted: list[int], step_ms: float, ended: list[str]) -> None:
        self.controller.observe(ids, width, accepted)
        self.controller.observe_step(len(ids), width, step_ms)
        self.controller.forget(ended)


class Static:
    def __init__(self, width: int) -> None:
        self.width = width

    def decide(self, ids: list[str], kind: str) -> int:
        return self.width

    def observe(self, ids: list[str], width: int, accepted: list[int], step_ms: float, ended: list[str]) -> None:
        pass


class Informed(Static):
    def __init__(self, table: CostTable) -> None:
        super().__init__(table.draft_width)
        self.table = table

    def decide(self, ids: list[str], kind: str) -> int:
        goodput = [
            (1.0 + sum(SURVIVAL[kind][:width])) / ms
            for width, ms in zip(self.table.widths, self.table.row(len(ids)), strict=True)
        ]
        return self.table.widths[int(np.argmax(goodput))]


def serve(
    policy: Policy, table: CostTable, texts: Sequence[str], streams: int, tokens: int, seed: int
) -> tuple[float, list[list[int]]]:
    """tok/s, and the width of every step of each wave."""
    rng = np.random.default_rng(seed)
    pending: deque[tuple[list[str], int, list[int], float, list[str]]] = deque()
    clock_ms = 0.0
    widths: list[list[int]] = []
    for wave, kind in enumerate(itertools.islice(itertools.cycle(texts), WAVES)):
        left = dict.fromkeys((f"{wave}-{i}" for i in range(streams)), tokens)
        clock_ms += PREFILL_STEPS * table.step_ms(streams, table.draft_width)
        while pending:
            policy.observe(*pending.popleft())
        next_width = policy.decide(list(left), kind)  # with the step of the prompts
        widths.append([])
        while left:
            ids = list(left)
            while len(pending) >= DELAY:
                policy.observe(*pending.popleft())
            width, next_width = next_width, policy.decide(ids, kind)
            widths[-1].append(width)
            accepted = (rng.random((len(ids), 1)) < SURVIVAL[kind][:width]).sum(axis=1).tolist()
            step_ms = table.step_ms(len(ids), width)
            clock_ms += step_ms
            for request, count in zip(ids, accepted, strict=True):
                left[request] -= count + 1
            ended = [request for request in ids if left[request] <= 0]
            for request in ended:
                del left[request]
            pending.append((ids, width, accepted, step_ms * float(np.exp(0.02 * rng.standard_normal())), ended))
    while pending:
        policy.observe(*pending.popleft())
    return 1e3 * streams * tokens * WAVES / clock_ms, widths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--streams", default="8,32,128,256")
    parser.add_argument("--tokens", type=int, default=120, help="of each request")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--texts", default="structured,prose", help=f"of the waves in turn, of {', '.join(SURVIVAL)}")
    parser.add_argument("--widths", default="", help="a subset of the table's (default: all)")
    parser.add_argument(
        "--plain-ms", type=float, default=0.0, help="what served steps at width 0 take beyond the table"
    )
    args = parser.parse_args()
    texts = args.texts.split(",")
    if unknown := [text for text in texts if text not in SURVIVAL]:
        parser.error(f"--texts: {unknown[0]!r} is unknown; known are {', '.join(SURVIVAL)}")
    widths = args.widths.split(",") if args.widths else []
    if wrong := [width for width in widths if not width.isdecimal()]:
        parser.error(f"--widths: {wrong[0]!r} is no whole number; separate them by commas")
    try:
        table = CostTable.load(args.table)
        table = table.restrict(map(int, widths)) if widths else table
    except CostTableError as error:
        parser.error(str(error))
    if args.plain_ms and 0 not in table.widths:
        parser.error("--plain-ms: width 0 is not among the widths; leave it out, or take a table and widths with 0")
    served = slower_at_0(table, args.plain_ms)
    print(
        "streams  tok/s of auto     sd  auto / full width  auto / best static  auto / informed  widths of the third wave"
    )
    for streams in (int(part) for part in args.streams.split(",")):
        auto, informed = [], []
        static: dict[int, list[float]] = {width: [] for width in table.widths}
        for seed in range(args.seeds):
            policy = Auto(table)
            serve(policy, served, texts, streams, args.tokens, seed + 1000)  # a controller that has been serving
            speed, widths = serve(policy, served, texts, streams, args.tokens, seed)
            auto.append(speed)
            informed.append(serve(Informed(served), served, texts, streams, args.tokens, seed)[0])
            for width, speeds in static.items():
                speeds.append(serve(Static(width), served, texts, streams, args.tokens, seed)[0])
        mean = {width: float(np.mean(speeds)) for width, speeds in static.items()}
        ratios = [float(np.mean(auto)) / of for of in (mean[table.draft_width], max(mean.values()), np.mean(informed))]
        print(
            f"{streams:7d}  {np.mean(auto):13.0f}  {np.std(auto) / np.mean(auto):5.3f}  {ratios[0]:17.3f}  {ratios[1]:18.3f}  "
            f"{ratios[2]:15.3f}  {''.join(map(str, widths[2]))}"
        )


def slower_at_0(table: CostTable, plain_ms: float) -> CostTable:
    if table.widths[0] != 0:
        return table
    return dataclasses.replace(table, cells={b: (row[0] + plain_ms, *row[1:]) for b, row in table.cells.items()})


if __name__ == "__main__":
    main()
