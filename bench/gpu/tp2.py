"""Question: with tensor parallelism 2, do both ranks run the same widths and sample the same tokens, step for step?

Every rank keeps the widths it was told and a running checksum of the last token that each request sampled in each step,
over --steps steps with `auto` and an acceptance that alternates; 32 streams, where the best width changes with it. Then
rank 1 is killed: does the engine end?

    python bench/gpu/tp2.py --steps 10000 --out tp2.json
"""

import argparse
import itertools
import json
import os
import signal
import sys
import time
from typing import Any

from shapes import SHAPES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-30b-a3b", choices=list(SHAPES))
    parser.add_argument("--steps", type=int, default=10000)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    os.environ["DFLASH_VERIFY_TOKENS"] = "auto:1,3,5,7"
    os.environ.setdefault("DFLASH_PROFILE_SECONDS", "20")

    import numpy as np
    from vllm import SamplingParams

    from engine import GpuEngine, about_machine, command_line

    engine = GpuEngine(args.model, {}, args.streams, tensor_parallel_size=2, gpu_memory_utilization=0.7)
    print(f"started in {engine.start_s:.1f} s", flush=True)
    llm = engine.llm
    pids = llm.collective_rpc("watch_steps")
    rng = np.random.default_rng(0)
    prompts = [{"prompt_token_ids": rng.integers(10, 50000, 64).tolist()} for _ in range(args.streams)]
    params = SamplingParams(temperature=1.0, max_tokens=1800, ignore_eos=True, detokenize=False)
    began, waves, steps = time.time(), 0, 0
    while steps < args.steps and time.time() - began < args.seconds:
        engine.set_survival("structured" if waves % 2 else "prose")
        llm.generate(prompts, params, use_tqdm=False)
        waves += 1
        testimony = llm.collective_rpc("steps")
        steps = len(testimony[0][0])
    (widths_0, sum_0), (widths_1, sum_1) = testimony
    result = {
        "machine": about_machine(),
        "command": command_line(),
        "steps": steps,
        "seconds": round(time.time() - began, 1),
        "widths": {str(width): widths_0.count(width) for width in sorted(set(widths_0))},
        "changes": sum(a != b for a, b in itertools.pairwise(widths_0)),
        "same_widths": widths_0 == widths_1,
        "same_tokens": sum_0 == sum_1,
    }
    print(json.dumps(result), flush=True)
    write(args.out, result)
    # A rank that dies must end the engine, not hang it.
    os.kill(pids[1], signal.SIGKILL)
    killed = time.time()
    try:
        llm.generate(prompts, params, use_tqdm=False)
        result["killed_rank"] = "not noticed"
    except Exception as error:  # whatever vLLM raises is the answer
        result["killed_rank"] = f"{type(error).__name__} after {time.time() - killed:.1f} s"
    print(result["killed_rank"], flush=True)
    write(args.out, result)
    sys.stdout.flush()
    os._exit(0)


def write(path: str, result: dict[str, Any]) -> None:
    with open(path, "w") as file:
        json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
