"""What the plugin costs vLLM's scheduler: CPU time of `schedule` and `update_from_output` per step, with it and without.

    python bench/width/scheduler_cost.py [--batches 1 32 128] [--repeats 3]

The real scheduler of a real engine (on a CPU, DFlash2, K of 7), two steps in flight as under asynchronous scheduling; what the model
would answer is made up: prose. Arms: stock vLLM, a static width of 7, and `auto` with a cost table by which every width costs the
same, so that it decides for 7 as well and vLLM's own work is equal. Each figure is the median over a run's
steps, then over the repeats; the lowest of the repeats is printed too, since a shared machine only ever adds.
"""

import argparse
import os
import random
import statistics
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

for name in [name for name in os.environ if name.startswith("DFLASH_")]:
    del os.environ[name]
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from dflash_verify.cpu import environment

environment.activate()

from dflash_verify.cpu.engine import DRAFT_WIDTH, ENGINE_ARGS, plugin_environment, speculative_config
from dflash_verify.cpu.models import Models, generate
from dflash_verify.profile import random_request
from dflash_verify.simulate.generate import SURVIVAL
from dflash_verify.width.controller import WidthController
from dflash_verify.width.cost import CostTable

ARMS = {"stock": "", "static 7": "7", "auto": "auto"}
STEPS = 300
LENGTH = 512


def run(models: Models, width: str, batch: int, seed: int) -> float:
    """Median us per step in which all requests verify drafts."""
    from vllm import LLM
    from vllm.v1.outputs import ModelRunnerOutput

    rng = random.Random(seed)
    room = {"max_num_seqs": batch, "max_num_batched_tokens": 8192, "kv_cache_memory_bytes": 512 << 20}
    fields: dict[str, Any] = {**ENGINE_ARGS, **room, "max_model_len": LENGTH}
    with plugin_environment({"DFLASH_VERIFY_TOKENS": width} if width else {}):
        llm = LLM(model=str(models.target), speculative_config=speculative_config(models, "dflash2"), **fields)
        core = llm.llm_engine.engine_core.engine_core
        scheduler = core.scheduler
        if width == "auto":
            widths = scheduler.steering.widths
            flat = CostTable(DRAFT_WIDTH, widths, {n: (10.0,) * len(widths) for n in {1, batch}})
            scheduler.steering.controller = WidthController(widths, DRAFT_WIDTH, flat)
        for i in range(batch):
            core.add_request(*core.preprocess_add_request(random_request(core, f"request-{i:032x}", LENGTH - 64, rng)))
        in_flight: deque[Any] = deque()
        samples: list[float] = []
        for _ in range(STEPS):
            if not scheduler.has_requests():
                break
            began = time.process_time()
            in_flight.append(scheduler.schedule())
            took = time.process_time() - began
            if len(in_flight) < 2:
                continue
            output = in_flight.popleft()
            ids, drafts = list(output.num_scheduled_tokens), output.scheduled_spec_decode_tokens
            tokens = [[5] * (1 + accepted(len(drafts.get(request, ())), rng)) for request in ids]
            answer = ModelRunnerOutput(ids, {request: i for i, request in enumerate(ids)}, tokens)
            began = time.process_time()
            scheduler.update_from_output(output, answer)
            if len(drafts) == batch and all(len(offered) == DRAFT_WIDTH for offered in drafts.values()):
                samples.append(took + time.process_time() - began)
        core.abort_requests(list(scheduler.requests))
        close(llm)
    assert len(samples) > 50, "too few steps at full width"
    return statistics.median(samples) * 1e6


def accepted(drafted: int, rng: random.Random) -> int:
    draw = rng.random()
    return sum(draw < survival for survival in SURVIVAL["prose"][:drafted])


def close(llm: Any) -> None:
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    if min(*args.batches, args.repeats) < 1:
        parser.error("--batches and --repeats must be 1 or more")
    print("| batch | " + " | ".join(ARMS) + " |\n" + "|---" * (len(ARMS) + 1) + "|")
    with tempfile.TemporaryDirectory() as folder:
        models = generate(Path(folder))
        for batch in args.batches:
            took: dict[str, list[float]] = {arm: [] for arm in ARMS}
            for repeat in range(args.repeats):
                for arm, width in ARMS.items():
                    took[arm].append(run(models, width, batch, repeat))
            cells = [f"{statistics.median(us):.0f} ({min(us):.0f})" for us in took.values()]
            print(f"| {batch} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
