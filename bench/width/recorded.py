"""What the steps that an H200 served say: how long they take beside the table, what requests that left cost, how widths compare.

    python bench/width/recorded.py

For each recording in bench/gpu/results (`*-steps.csv.gz`, of `bench/gpu/width.py --trace`) and the table measured at its start:
milliseconds per request that left before a step (least squares); median step at width 0, served and by the table; how far two
widths are from the table where one follows the other at a batch size (the largest median of at least four changes); and after
how many steps a table with one width wrong by a factor is found out.
"""

import csv
import gzip
import math
import statistics
from collections import defaultdict
from pathlib import Path

import numpy as np

from dflash_verify.steering import LEFT_MS, LEFT_SHARE
from dflash_verify.width.cost import CostModel, CostTable

RESULTS = Path(__file__).parents[1] / "gpu" / "results"
FACTORS = (0.6, 0.75, 1.33, 1.6)
WINDOW = 8  # steps before and after a change of width

Rows = list[dict[str, str]]


def left_before(rows: Rows, at: int) -> int:
    return max(0, int(rows[at - 1]["batch"]) - int(rows[at]["batch"])) if at else 0


def per_request_that_left(rows: Rows, table: CostTable, plain: bool) -> tuple[int, float]:
    """Steps that follow a uniform one, both at width 0 or both not; ms per request that left."""
    x, y = [], []
    for at in range(1, len(rows)):
        before, row = rows[at - 1], rows[at]
        alike = all((int(each["width"]) == 0) == plain for each in (before, row))
        if alike and before["uniform"] == row["uniform"] == "1" and row["step_ms"]:
            x.append((1.0, left_before(rows, at)))
            y.append(float(row["step_ms"]) - table.step_ms(int(row["batch"]), int(row["width"])))
    if not x:
        return 0, math.nan
    return len(x), float(np.linalg.lstsq(np.array(x), np.array(y), rcond=None)[0][1])


def largest_difference(rows: Rows, table: CostTable) -> tuple[float, tuple[int, int, int]]:
    model = CostModel(table.widths, table.draft_width, table)
    apart: dict[tuple[int, int, int], list[float]] = defaultdict(list)
    cell, run, before, last = (0, -1), [0.0], [0.0], (0, -1)

    def close() -> None:
        if last[0] == cell[0] and 0 not in (last[1], cell[1]):
            low, high = sorted((last[1], cell[1]))
            by = statistics.median(run[:WINDOW]) - statistics.median(before[-WINDOW:])
            apart[cell[0], low, high].append(by if cell[1] == high else -by)

    for row in rows:
        if row["taught"] != "1":
            continue
        batch, width, ms = int(row["batch"]), int(row["width"]), float(row["step_ms"])
        if (model.group(batch), width) != cell:
            close()
            last, before, cell, run = cell, run, (model.group(batch), width), []
        run.append(math.log(ms / table.step_ms(batch, width)))
    close()
    pairs = {pair: statistics.median(by) for pair, by in apart.items() if len(by) >= 4}
    pair = max(pairs, key=lambda each: abs(pairs[each]))
    return math.expm1(pairs[pair]), pair


def recorded() -> dict[str, tuple[Rows, CostTable]]:
    """By name of the rows: every step, and the table that its engine measured."""
    found = {}
    for path in sorted(RESULTS.glob("*-steps.csv.gz")):
        with gzip.open(path, "rt") as file:
            name = path.name.removesuffix("-steps.csv.gz")
            found[name] = list(csv.DictReader(file)), CostTable.load(path.with_name(f"{name}-cost.json"))
    return found


def wrong(table: CostTable, width: int, factor: float) -> CostTable:
    """The same table with one width's times off by a factor."""
    at = table.widths.index(width)
    cells = {batch: (*row[:at], row[at] * factor, *row[at + 1 :]) for batch, row in table.cells.items()}
    return CostTable(table.draft_width, table.widths, cells, table.capture_sizes)


def serve(rows: Rows, table: CostTable) -> CostModel:
    """A trusted model that has seen every step that would teach this engine's today, or as many as cost the table the trust. The
    recordings say which ones did then, when steps before which many requests had left were among them."""
    model = CostModel(table.widths, table.draft_width, table)
    for at, row in enumerate(rows):
        batch, width = int(row["batch"]), int(row["width"])
        expected_ms = model.expected_ms(batch, width) or math.inf
        if row["taught"] == "1" and not (width and left_before(rows, at) * LEFT_MS > LEFT_SHARE * expected_ms):
            model.observe(batch, width, float(row["step_ms"]))
        else:
            model.interrupted()
        if not model.trusted:
            break
    return model


def found_out(model: CostModel) -> str:
    return "never" if model.trusted else str(model.observed_steps)


def main() -> None:
    for name, (rows, table) in recorded().items():
        print(f"{name}: {len(rows)} steps")
        for kind, plain in (("verifying", False), ("at width 0", True)):
            count, ms = per_request_that_left(rows, table, plain)
            print(f"  per request that left, {kind}: {ms:.3f} ms ({count} steps)")
        for batch in (128, 192, 256):
            at_0 = [row for row in rows if (row["taught"], row["batch"], row["width"]) == ("1", str(batch), "0")]
            if at_0:
                median = statistics.median(float(row["step_ms"]) for row in at_0)
                print(
                    f"  width 0, {batch} requests: {median:.2f} ms served, {table.step_ms(batch, 0):.2f} by the table"
                )
        by, (group, low, high) = largest_difference(rows, table)
        print(f"  widths {low} and {high} at about {group} requests: {by:+.1%}, the largest difference from the table")
        print(f"  the table itself is found out after {found_out(serve(rows, table))}")
        for width in (width for width in table.widths if width):
            steps = (f"{factor}: {found_out(serve(rows, wrong(table, width, factor)))}" for factor in FACTORS)
            print(f"  with width {width} wrong by a factor after  {', '.join(steps)}")


if __name__ == "__main__":
    main()
