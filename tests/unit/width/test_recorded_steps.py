"""The cost model on the steps that an H200 served: waves of 32 to 256 requests of four texts, `auto` with and without width 0, each with
the table it measured at its start (bench/gpu/results/)."""

import csv
import gzip
from pathlib import Path

import pytest

from dflash_verify.width.cost import CostModel, CostTable

RESULTS = Path(__file__).parents[3] / "bench" / "gpu" / "results"
ENGINES = ("auto", "auto-0")


def measured(engine: str) -> CostTable:
    return CostTable.load(RESULTS / f"2026-11-30-h200-qwen3-8b-compiled-beside-{engine}-cost.json")


def served(engine: str, table: CostTable) -> CostModel:
    """A trusted model that has seen every step that taught this engine's, or as many as cost it the trust."""
    model = CostModel(table.widths, table.draft_width, table)
    path = RESULTS / f"2026-11-30-h200-qwen3-8b-compiled-beside-{engine}-steps.csv.gz"
    with gzip.open(path, "rt") as file:
        for row in csv.DictReader(file):
            if row["taught"] == "1":
                model.observe(int(row["batch"]), int(row["width"]), float(row["step_ms"]))
            if not model.trusted:
                break
    return model


@pytest.mark.parametrize("engine", ENGINES)
def test_the_table_that_the_engine_measured_keeps_the_trust(engine: str) -> None:
    """Both engines distrusted it then (`at about 23 requests width 7 takes 1.27 times`), having compared steps of draining batches
    with a level from elsewhere. Where one width followed another at least four times, the median says 8 % at most."""
    model = served(engine, measured(engine))
    assert model.contradiction == ""
    assert model.observed_steps > 10_000


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("factor", [0.75, 1.33])
def test_a_table_with_one_width_wrong_by_a_third_loses_it(engine: str, factor: float) -> None:
    table = measured(engine)
    at = table.widths.index(3)
    cells = {batch: (*row[:at], row[at] * factor, *row[at + 1 :]) for batch, row in table.cells.items()}
    wrong = CostTable(table.draft_width, table.widths, cells, table.capture_sizes)
    model = served(engine, wrong)
    assert model.learning
    assert "width 3" in model.contradiction
