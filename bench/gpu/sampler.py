"""Question: how long does vLLM's rejection sampling take token-wise, and how long with block verification?

Times `rejection_sample` of vLLM 0.33.0's Model Runner V2 on the logits of a step at temperature 1 without other sampling
parameters, in the chunks that vLLM makes of large batches. Drafts: `dflash` (sampled; bfloat16 logits of the whole vocabulary),
`dflash2` (sampled; float32 logits, 16 candidates, -inf elsewhere) and `greedy` (no draft logits). Both methods see the same
inputs.

    python bench/gpu/sampler.py --out sampler.json
    python bench/gpu/sampler.py --check     # without a GPU: every call once, tiny, in Triton's interpreter

`us` is the GPU's time, from a CUDA graph of several calls; `call_us` that of one call as vLLM makes it, without a graph, on an
idle GPU: where it is larger, launching is what takes the time.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import shapes
from gdn_kernels import captured, reason, replay_us, summary

CALLS = 5  # in one graph
REPEATS = 40
DRAFT_WIDTH = 7
DRAFTS = ("dflash", "dflash2", "greedy")
METHODS = ("token", "block")
CANDIDATES = 16
# Normal logits of this spread put about half of the probability on one of 151936 tokens; the drafter knows them blurred.
SPREAD, BLUR = 6.0, 1.0


@dataclass(frozen=True)
class Inputs:
    """What the drafter and the target left behind for `batch` requests, for any width up to DRAFT_WIDTH.

    target: [batch, N + 1, V]. draft_logits: [batch, N, V] or None. tokens: [batch, N], drawn from them.
    temperature, seeds: [batch], see `sampling`.
    """

    target: Any
    draft_logits: Any
    tokens: Any
    temperature: Any
    seeds: Any


def draw(drafts: str, batch: int, vocab: int, device: str) -> Inputs:
    import torch

    logits = torch.randn(batch, DRAFT_WIDTH + 1, vocab, device=device) * SPREAD
    draft = torch.randn(batch, DRAFT_WIDTH, vocab, device=device).mul_(BLUR).add_(logits[:, :-1])
    target = logits.bfloat16()
    del logits
    if drafts == "greedy":
        return Inputs(target, None, draft.argmax(-1), *sampling(batch, device))
    if drafts == "dflash":
        draft = draft.bfloat16()
    else:
        best = draft.topk(CANDIDATES, dim=-1)
        draft = draft.fill_(-torch.inf).scatter_(-1, best.indices, best.values)
    noise = torch.empty(draft.shape, device=device).exponential_().log_().neg_()
    return Inputs(target, draft, noise.add_(draft).argmax(-1), *sampling(batch, device))


def sampling(batch: int, device: str) -> tuple[Any, Any]:
    """Temperatures and seeds as vLLM keeps them: `.gpu` is the device's view of host memory."""
    import torch
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor

    values = torch.ones(batch), torch.arange(batch) * 7919
    if device == "cpu":
        return SimpleNamespace(gpu=values[0]), SimpleNamespace(gpu=values[1])
    current_platform.import_kernels()  # the view is made by an operator of vLLM's
    tensors = UvaBackedTensor(batch, torch.float32), UvaBackedTensor(batch, torch.int64)
    for tensor, value in zip(tensors, values, strict=True):
        tensor.cpu.copy_(value)
        tensor.copy_to_uva()
    return tensors


def verification(inputs: Inputs, width: int, method: str) -> Callable[[], list[Any]]:
    """A call that verifies the first `width` drafts of every request; it returns (sampled, num_sampled) of every chunk."""
    import torch
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import get_max_chunk_logits
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

    batch, _, vocab = inputs.target.shape
    length, device = width + 1, inputs.target.device
    number = partial(torch.arange, device=device, dtype=torch.int32)
    target = inputs.target[:, :length].reshape(batch * length, vocab)
    # [batch, K + 1]: a request's last token, then its drafts.
    drafts = torch.cat((inputs.tokens[:, :1], inputs.tokens[:, :width]), dim=1).to(torch.int32).flatten()
    start, slots, local = number(0, batch * length + 1, length), number(batch), number(length).repeat(batch)
    slot_of_row, position = slots.repeat_interleave(length), local.long() + 1000
    chunk = max(1, get_max_chunk_logits(vocab) // length)  # requests

    def call() -> list[Any]:
        results = []
        for first in range(0, batch, chunk):
            last = min(batch, first + chunk)
            rows = slice(first * length, last * length)
            result = rejection_sample(
                target[rows],
                inputs.draft_logits,
                drafts[rows],
                start[first : last + 1] - first * length,
                position[rows],
                slots[first:last],
                slot_of_row[rows],
                local[rows],
                inputs.temperature.gpu,
                inputs.seeds.gpu,
                DRAFT_WIDTH,
                use_block_verification=method == "block",
            )
            results.append(result)
        return results

    return call


def call_us(calls: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Microseconds from the first launch to the end of the work, each time on an idle GPU."""
    import torch

    samples: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(REPEATS):
        for name in list(calls) if repeat % 2 == 0 else list(calls)[::-1]:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            calls[name]()
            end.record()
            end.synchronize()
            samples[name].append(start.elapsed_time(end) * 1e3)
    return samples


def measure(drafts: str, batch: int, widths: list[int], vocab: int) -> list[dict[str, Any]]:
    """One row per width and method."""
    import torch

    rows = []
    try:
        torch.manual_seed(batch)
        inputs = draw(drafts, batch, vocab, "cuda")
        for width in widths:
            calls = {method: verification(inputs, width, method) for method in METHODS}
            accepted = {
                method: torch.cat([counts - 1 for _, counts in call()]).float().mean().item()
                for method, call in calls.items()
            }
            samples = replay_us({method: captured([call] * CALLS) for method, call in calls.items()}, REPEATS)
            singles = call_us(calls)
            for method in METHODS:
                row = {"drafts": drafts, "batch": batch, "width": width, "method": method}
                row |= summary(samples[method], CALLS)
                row |= {"call_us": summary(singles[method], 1)["us"], "accepted": round(accepted[method], 2)}
                rows.append(row)
    except Exception as error:  # does not fit, or whatever vLLM or the driver raises: that is the answer
        rows.append({"drafts": drafts, "batch": batch, "error": reason(error)})
    return rows


def check() -> None:
    """Every call once on a tiny vocabulary."""
    os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}  # before vLLM is imported; empty, not absent
    from dflash_verify.cpu import interpreter

    interpreter.install()
    import torch

    for drafts in DRAFTS:
        for batch in (1, 3):
            torch.manual_seed(batch)
            inputs = draw(drafts, batch, 64, "cpu")
            for width in (3, DRAFT_WIDTH):
                for method in METHODS:
                    ((sampled, counts),) = verification(inputs, width, method)()
                    assert sampled.shape == (batch, DRAFT_WIDTH + 1)
                    assert 1 <= int(counts.min()) <= int(counts.max()) <= width + 1
                    for tokens, count, drafted in zip(sampled, counts, inputs.tokens, strict=True):
                        assert tokens[: count - 1].equal(drafted[: count - 1])
                    print(f"{drafts}, {batch} requests, width {width}, {method}: {counts.tolist()} tokens", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="1,8,32,128,256")
    parser.add_argument("--widths", default="3,7")
    parser.add_argument("--drafts", default=",".join(DRAFTS))
    parser.add_argument("--vocab", type=int, default=shapes.VOCAB)
    parser.add_argument("--seconds", type=float, default=50, help="after the start; no further cell begins then")
    parser.add_argument("--out", default="sampler.json")
    parser.add_argument(
        "--check", action="store_true", help="no GPU, no times: every call once, in Triton's interpreter"
    )
    args = parser.parse_args()
    if args.check:
        check()
        return
    began = time.time()
    import torch

    from engine import about_machine, command_line

    result: dict[str, Any] = {"machine": about_machine(), "command": command_line(), "rows": []}
    widths = [int(part) for part in args.widths.split(",")]
    for drafts in args.drafts.split(","):
        for batch in (int(part) for part in args.batches.split(",")):
            if time.time() - began > args.seconds:
                break
            torch.cuda.empty_cache()
            rows = measure(drafts, batch, widths, args.vocab)
            result["rows"] += rows
            for row in rows:
                print(f"{time.time() - began:5.1f} s  {row}", flush=True)
            with open(args.out, "w") as file:
                json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
