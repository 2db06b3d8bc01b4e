"""Question: with tensor parallelism 2, do both ranks run the same widths and sample the same tokens, step for step?

Every rank keeps the widths it was told and a running checksum of the tokens it sampled, over --steps steps with `auto` and
an acceptance that alternates. `--kill` then ends rank 1 and watches the server go.

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

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")


class Witness:
    """vLLM's worker extension: methods that `collective_rpc` calls in each worker process."""

    model_runner: Any

    def watch(self) -> int:
        import torch

        runner = self.model_runner
        execute, sample = runner.execute_model, runner.sample_tokens
        self._widths: list[int] = []
        self._checksum = torch.zeros(1, dtype=torch.int64, device=runner.device)

        def watched_execute(output: Any, *args: Any, **kwargs: Any) -> Any:
            if output.total_num_scheduled_tokens:
                self._widths.append(output.num_spec_tokens_to_schedule)
            return execute(output, *args, **kwargs)

        def watched_sample(*args: Any, **kwargs: Any) -> Any:
            result = sample(*args, **kwargs)
            tokens = runner.req_states.last_sampled_tokens
            place = torch.arange(1, tokens.numel() + 1, device=tokens.device)
            # No synchronisation: the sum stays on the device until it is asked for.
            self._checksum.mul_(1000003).add_((tokens.flatten().long() * place).sum())
            return result

        runner.execute_model, runner.sample_tokens = watched_execute, watched_sample
        return os.getpid()

    def set_rates(self, rates: list[float]) -> None:
        target = self.model_runner.rejection_sampler.synthetic_conditional_rates
        import torch
        from vllm.v1.spec_decode.utils import unconditional_to_conditional_rates

        target.copy_(torch.tensor(unconditional_to_conditional_rates(rates), dtype=target.dtype))

    def testimony(self) -> tuple[list[int], int]:
        return self._widths, int(self._checksum.item())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--steps", type=int, default=10000)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    os.environ["DFLASH_VERIFY_TOKENS"] = "auto:1,3,7"
    os.environ.setdefault("DFLASH_PROFILE_SECONDS", "20")
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [os.path.dirname(os.path.abspath(__file__)), os.environ.get("PYTHONPATH", "")]
    )

    import numpy as np
    from vllm import SamplingParams

    from engine import SURVIVAL, GpuEngine, about_machine

    fields: dict[str, Any] = {
        "tensor_parallel_size": 2,
        "worker_extension_cls": "tp2.Witness",
        "gpu_memory_utilization": 0.7,
    }
    engine = GpuEngine(args.model, {}, args.streams, watch=False, **fields)
    print(f"started in {engine.start_s:.1f} s", flush=True)
    llm = engine.llm
    pids = llm.collective_rpc("watch")
    rng = np.random.default_rng(0)
    prompts = [{"prompt_token_ids": rng.integers(10, 50000, 64).tolist()} for _ in range(args.streams)]
    params = SamplingParams(temperature=1.0, max_tokens=1800, ignore_eos=True, detokenize=False)
    began, waves, steps = time.time(), 0, 0
    while steps < args.steps and time.time() - began < args.seconds:
        llm.collective_rpc("set_rates", args=(SURVIVAL["structured" if waves % 2 else "prose"],))
        llm.generate(prompts, params, use_tqdm=False)
        waves += 1
        testimony = llm.collective_rpc("testimony")
        steps = len(testimony[0][0])
    (widths_0, sum_0), (widths_1, sum_1) = testimony
    result = {
        "machine": about_machine(),
        "command": "python " + " ".join(sys.argv),
        "steps": steps,
        "seconds": round(time.time() - began, 1),
        "widths": {str(width): widths_0.count(width) for width in sorted(set(widths_0))},
        "changes": sum(a != b for a, b in itertools.pairwise(widths_0)),
        "same_widths": widths_0 == widths_1,
        "same_tokens": sum_0 == sum_1,
    }
    print(json.dumps(result), flush=True)
    # A rank that dies must end the engine, not hang it.
    os.kill(pids[1], signal.SIGKILL)
    killed = time.time()
    try:
        llm.generate(prompts, params, use_tqdm=False)
        result["killed_rank"] = "not noticed"
    except Exception as error:  # whatever vLLM raises is the answer
        result["killed_rank"] = f"{type(error).__name__} after {time.time() - killed:.1f} s"
    print(result["killed_rank"], flush=True)
    with open(args.out, "w") as file:
        json.dump(result, file, indent=1)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
