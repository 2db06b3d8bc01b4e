"""The cost model on the steps that an H200 served: waves of 32 to 256 requests of four texts, `auto` with and without width 0, each with
the table it measured at its start (bench/gpu/results/)."""

import csv
import gzip
from pathlib import Path

import pytest

from dflash_verify.steering import LEFT_MS, LEFT_SHARE
from dflash_verify.width.cost import CostModel, CostTable

RESULTS = Path(__file__).parents[3] / "bench" / "gpu" / "results"
ENGINES = ("auto", "auto-0")


def measured(engine: str) -> CostTable:
    return CostTable.load(RESULTS / f"2026-11-30-h200-qwen3-8b-compiled-beside-{engine}-cost.json")


def served(engine: str, table: CostTable) -> CostModel:
    """A trusted model that has seen every step that would teach this engine's today, or as many as cost it the trust. The recording
    says which ones did then, when steps before which many requests had left were among them."""
    model = CostModel(table.widths, table.draft_width, table)
    path = RESULTS / f"2026-11-30-h200-qwen3-8b-compiled-beside-{engine}-steps.csv.gz"
    last_batch = 0
    with gzip.open(path, "rt") as file:
        for row in csv.DictReader(file):
            batch, width = int(row["batch"]), int(row["width"])
            left, last_batch = max(0, last_batch - batch), batch
            expected_ms = model.expected_ms(batch, width)
            assert expected_ms is not None
            if row["taught"] == "1" and not (width and left * LEFT_MS > LEFT_SHARE * expected_ms):
                model.observe(batch, width, float(row["step_ms"]))
            else:
                model.interrupted()
            if not model.trusted:
                break
    return model


@pytest.mark.parametrize("engine", ENGINES)
def test_the_table_that_the_engine_measured_keeps_the_trust(engine: str) -> None:
    """Both engines distrusted it then (`at about 23 requests width 7 takes 1.27 times`, `at about 8 requests width 5 takes 0.78 times`),
    having compared steps of draining batches with a level from elsewhere. Where one width followed another at least four times,
    the median says 8 % at most."""
    model = served(engine, measured(engine))
    assert model.contradiction == ""
    assert model.observed_steps > 10_000


@pytest.mark.parametrize(("engine", "most_steps"), [("auto", 1_000), ("auto-0", 11_500)])
@pytest.mark.parametrize("width", [1, 3, 5, 7])
@pytest.mark.parametrize("factor", [0.6, 0.75, 1.33, 1.6])
def test_a_table_with_one_width_wrong_by_a_quarter_or_more_loses_it(
    engine: str, most_steps: int, width: int, factor: float
) -> None:
    """With width 0 in use this takes until the batches are small: at 128 and more no other width follows another often."""
    table = measured(engine)
    at = table.widths.index(width)
    cells = {batch: (*row[:at], row[at] * factor, *row[at + 1 :]) for batch, row in table.cells.items()}
    wrong = CostTable(table.draft_width, table.widths, cells, table.capture_sizes)
    model = served(engine, wrong)
    assert model.learning
    assert f"width {width}" in model.contradiction
    assert model.observed_steps < most_steps
