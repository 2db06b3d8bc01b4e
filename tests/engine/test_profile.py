"""Step times: measured on the real engine through its own scheduler, kept with their key, refused for any other engine."""

import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_verify import overlays, profile
from dflash_verify.cpu import environment
from dflash_verify.cpu.engine import ENGINE_ARGS, open_engine, plugin_environment, speculative_config
from dflash_verify.cpu.models import Models
from dflash_verify.profile import batch_sizes, cost_key, measuring_order
from dflash_verify.settings import SettingsError, load
from dflash_verify.width.cost import CostKey, CostTable


def test_batch_sizes_cover_the_slots_with_both_ends() -> None:
    assert batch_sizes(1) == [1]
    assert batch_sizes(4) == [1, 2, 3, 4]
    assert batch_sizes(100) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 100]


def test_measuring_that_is_cut_off_has_spanned_the_slots() -> None:
    """A table that ended at 96 of 256 requests priced 234 by a straight line from there."""
    assert measuring_order([1]) == [1]
    assert measuring_order([1, 2]) == [1, 2]
    sizes = batch_sizes(256)
    order = measuring_order(sizes)
    assert sorted(order) == sizes
    for count in range(2, len(order) + 1):
        places = sorted(sizes.index(size) for size in order[:count])
        assert places[0] == 0
        assert places[-1] == len(sizes) - 1
        gaps = [b - a for a, b in itertools.pairwise(places)]
        assert max(gaps) <= 4 * min(gaps)


class FullCore:
    """An EngineCore of `slots` slots whose KV cache holds `room` new requests at once; a step starts at most 100 of them. growth: how
    much more of that room a request needs with every step; the newest are preempted."""

    step_ms = 10.0

    def __init__(self, slots: int, room: int, growth: float = 0.0) -> None:
        self.steering = SimpleNamespace(widths=(3, 7), draft_width=7, forced=None, on_step=None)
        self.scheduler = SimpleNamespace(
            steering=self.steering,
            running=[],
            scheduler_config=SimpleNamespace(max_num_seqs=slots),
            reset_prefix_cache=lambda: None,
            has_requests=lambda: False,
        )
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=2048))
        self.batch_queue = None
        self.waiting: list[Any] = []
        self.room, self.growth, self.steps = room, growth, 0
        self.preprocess_add_request = lambda request: (request,)
        self.add_request = self.waiting.append
        self.abort_requests = self.end
        self.post_step = lambda executed: None

    def end(self, ids: list[str]) -> None:
        self.waiting.clear()
        self.scheduler.running.clear()

    def step_fn(self) -> tuple[None, bool]:
        running = self.scheduler.running
        self.steps += 1
        for request in running:
            request.num_output_tokens += 1
        full = False
        while self.used() > self.room:
            self.waiting.insert(0, running.pop())
            full = True
        new = [] if full else self.waiting[: max(0, min(100, int(self.room - self.used())))]
        del self.waiting[: len(new)]
        step_ms = None if new else self.step_ms + len(running)
        self.steering.on_step(SimpleNamespace(step_ms=step_ms, batch=len(running), width=self.steering.forced))
        running += [SimpleNamespace(num_output_tokens=0) for _ in new]
        return None, True

    def used(self) -> float:
        return sum(1.0 + self.growth * request.num_output_tokens for request in self.scheduler.running)


def test_where_the_kv_cache_holds_fewer_than_the_slots_the_table_ends_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 256 slots a hybrid model ran 234, and the table ended at 128: what did not fit was left out, and the next size
    below had its turn last."""
    monkeypatch.setattr(profile, "random_request", lambda *args: None)
    monkeypatch.setattr(profile, "cost_key", lambda config: key())
    table = profile.measure(FullCore(slots=256, room=234), allowed_s=60)
    assert table is not None
    assert sorted(table.cells) == batch_sizes(234)
    assert table.cells[234] == (244.0, 244.0)
    # What fits at first may outgrow the cache while it is measured: the most that stays together is looked for.
    growing = FullCore(slots=256, room=234, growth=0.05)
    table = profile.measure(growing, allowed_s=60)
    assert table is not None
    assert 150 < max(table.cells) <= 234 / (1 + 0.05 * 8)
    assert {1, 2, 4, 64, 128} < set(table.cells)
    assert growing.steps < 1500  # what does not fit is given up soon: a step of a large batch takes 0.1 s
    # Nothing at all fits: no table, and no endless loop.
    assert profile.measure(FullCore(slots=256, room=0), allowed_s=60) is None


def key() -> CostKey:
    return CostKey("GPU", 1, "target", "draft", "0.33.0", "bfloat16", "NONE", ())


def test_the_command_measures_every_cell_and_a_server_then_uses_the_table(models: Models, tmp_path: Path) -> None:
    environ = environment.child_environment() | {
        "DFLASH_VERIFY_TOKENS": "auto:3",
        "DFLASH_CACHE_DIR": str(tmp_path),
        "VLLM_LOGGING_LEVEL": "INFO",
    }
    flags = [
        f"--{name.replace('_', '-')}" for name in ("dtype", "max_model_len", "max_num_batched_tokens", "block_size")
    ]
    values = [str(ENGINE_ARGS[name]) for name in ("dtype", "max_model_len", "max_num_batched_tokens", "block_size")]
    command = [sys.executable, "-m", "dflash_verify.cli", "profile", "--seconds", "400", "--", str(models.target)]
    command += [word for pair in zip(flags, values, strict=True) for word in pair]
    command += ["--max-num-seqs", "2", "--kv-cache-memory-bytes", str(16 << 20), "--enforce-eager", "--seed", "0"]
    command += ["--speculative-config", json.dumps(speculative_config(models, "dflash2"))]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "stored in" in done.stdout
    (path,) = tmp_path.glob("cost-*.json")
    table = CostTable.load(path)
    assert set(table.cells) == {1, 2}
    assert table.widths == (3, 7)
    assert all(ms > 0 for row in table.cells.values() for ms in row)
    with open_engine(
        models, "dflash2", {"DFLASH_VERIFY_TOKENS": "auto:3", "DFLASH_CACHE_DIR": str(tmp_path)}, max_num_seqs=2
    ) as engine:
        assert engine.scheduler.steering.controller.cost.table.cells == table.cells
        # Nothing of the measurement is left where requests will run.
        assert engine.scheduler.steering.controller.snapshot()["requests"] == 0


def test_a_stored_table_without_a_width_is_no_table_for_it(models: Models, tmp_path: Path) -> None:
    """The key does not hold the widths, and without graphs nothing else in it differs: such a start died on the loaded weights."""
    environ = {"DFLASH_CACHE_DIR": str(tmp_path), "DFLASH_CPU": "1"}
    narrow = config(models, DFLASH_VERIFY_TOKENS="auto:3", **environ)
    path = profile.table_path(cost_key(narrow), load({"DFLASH_VERIFY_TOKENS": "auto"} | environ))
    CostTable(7, (3, 7), {1: (1.0, 2.0)}, (), cost_key(narrow)).save(path)
    with open_engine(models, "dflash2", {"DFLASH_VERIFY_TOKENS": "auto:3"} | environ) as engine:
        assert engine.scheduler.steering.controller.cost.trusted
    with open_engine(models, "dflash2", {"DFLASH_VERIFY_TOKENS": "auto:0,3"} | environ) as engine:
        assert engine.scheduler.steering.controller.cost.table is None
        engine.generate(["Hello world"], 8)


def test_a_compiled_server_has_a_key_of_its_own(models: Models) -> None:
    from vllm.config import CompilationMode

    found = config(models, DFLASH_VERIFY_TOKENS="auto")
    keys = []
    for mode in (CompilationMode.NONE, CompilationMode.VLLM_COMPILE):
        found.compilation_config.mode = mode
        keys.append(cost_key(found))
    assert keys[1].difference(keys[0]) == "compilation is NONE there and VLLM_COMPILE here"


def config(models: Models, **environ: str) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    fields = {**ENGINE_ARGS, "speculative_config": speculative_config(models, "dflash2")}
    with plugin_environment(environ):
        return EngineArgs(model=str(models.target), **fields).create_engine_config()


@pytest.mark.parametrize("wrong", ["gpu", "widths", "missing", "garbage"])
def test_a_named_table_that_is_not_this_engines_stops_before_weights_load(
    models: Models, tmp_path: Path, wrong: str
) -> None:
    key = cost_key(config(models, DFLASH_VERIFY_TOKENS="auto"))
    path = tmp_path / "cost.json"
    if wrong == "gpu":
        CostTable(7, (1, 3, 5, 7), {1: (1.0, 1.0, 1.0, 1.0)}, (), replace(key, gpu="GB10")).save(path)
    elif wrong == "widths":
        CostTable(7, (3, 7), {1: (1.0, 1.0)}, (), key).save(path)
    elif wrong == "garbage":
        path.write_text("{")
    with pytest.raises(SettingsError) as error:
        config(models, DFLASH_VERIFY_TOKENS="auto", DFLASH_COST_TABLE=str(path))
    text = str(error.value)
    assert text.startswith("DFLASH_COST_TABLE cannot be used: ")
    assert text.endswith(".")
    assert "\n" not in text
    expected = {"gpu": "gpu is GB10 there and", "widths": "width 1", "missing": "cannot be read", "garbage": "not JSON"}
    assert expected[wrong] in text
    assert not overlays.status().names("applied")


def test_a_static_width_measures_nothing(models: Models, tmp_path: Path) -> None:
    with open_engine(models, "dflash2", {"DFLASH_VERIFY_TOKENS": "3", "DFLASH_CACHE_DIR": str(tmp_path)}):
        assert not os.listdir(tmp_path)
