"""Question: on a pair that was trained, so that drafts mean something, what do block verification and vLLM's own
`enable_adaptive_verification` give, and what does `auto`?

    python bench/block/train.py --device cuda --seed 0 --out pair-0     # first
    python bench/gpu/trained_pair.py ENGINE --pair pair-0 --streams 1,8,32,128 --out rows.json

Engines: off, stock, sampled (stock with sampled drafts), block, auto, auto-sampled, auto-block, adaptive. Many can be
started at once on one GPU: with `--in-turn FOLDER:N` each waits until all N have started, and then measures while the
others are idle.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from engine import (
    DRAFT_WIDTH,
    FULL_DECODE_ONLY,
    about_machine,
    capture_sizes,
    check,
    check_place,
    command_line,
    in_turn,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "block"))

ENGINES: dict[str, tuple[dict[str, str], dict[str, Any] | None]] = {
    "off": ({}, None),
    "stock": ({}, {}),
    "sampled": ({}, {"draft_sample_method": "probabilistic"}),
    "block": ({"DFLASH_BLOCK_VERIFY": "1"}, {}),
    "auto": ({"DFLASH_VERIFY_TOKENS": "auto"}, {}),
    "auto-sampled": ({"DFLASH_VERIFY_TOKENS": "auto"}, {"draft_sample_method": "probabilistic"}),
    "auto-block": ({"DFLASH_VERIFY_TOKENS": "auto", "DFLASH_BLOCK_VERIFY": "1"}, {}),
    "adaptive": ({}, {"enable_adaptive_verification": True}),
}


def prompts(text: bytes, streams: int, length: int, seed: int) -> list[dict[str, list[int]]]:
    """Windows of held-out text: byte tokens, so ids are the bytes."""
    import random

    rng = random.Random(seed)
    starts = [rng.randrange(len(text) - length) for _ in range(streams)]
    return [{"prompt_token_ids": list(text[at : at + length])} for at in starts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=list(ENGINES))
    parser.add_argument("--pair", type=Path, required=True)
    parser.add_argument("--streams", default="1,8,32,128")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--in-turn", default="", metavar="FOLDER:N", help="N engines of one GPU, measured one by one")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    check(parser, args)
    check_place(parser, "--in-turn", args.in_turn)
    streams = [int(part) for part in args.streams.split(",")]
    environ, speculative = ENGINES[args.engine]
    os.environ.update(environ)
    from train import held_out_text
    from vllm import LLM

    try:
        text = held_out_text(args.pair)  # before an engine takes its time to start
    except OSError as error:
        parser.error(f"--pair: {error.filename} cannot be read ({error.strerror}); bench/block/train.py writes it")
    fields: dict[str, Any] = {
        "model": str(args.pair / "target"),
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": 1024,
        "max_num_seqs": max(streams),
        "max_num_batched_tokens": 8192,
        # Room for 128 requests, so that many engines fit.
        "gpu_memory_utilization": 0.05,
        "kv_cache_memory_bytes": 2 << 30,
        "disable_log_stats": False,
        "enable_prefix_caching": False,
        "compilation_config": FULL_DECODE_ONLY,
    }
    if speculative is not None and "DFLASH_VERIFY_TOKENS" not in environ:
        fields["compilation_config"] = FULL_DECODE_ONLY | {
            "cudagraph_capture_sizes": capture_sizes(max(streams), [DRAFT_WIDTH])
        }
    if speculative is not None:
        fields["speculative_config"] = {
            "method": "dflash",
            "model": str(args.pair / "draft"),
            "num_speculative_tokens": DRAFT_WIDTH,
        } | speculative
    began = time.time()
    llm = LLM(**fields)
    print(f"{args.engine}: started in {time.time() - began:.1f} s", flush=True)
    with in_turn(args.in_turn):
        rows = []
        for count in streams:
            rows.append(measure(llm, text, count, args))
            print(rows[-1], flush=True)
            result = {"machine": about_machine(), "command": command_line(), "rows": rows}
            Path(args.out).write_text(json.dumps(result, indent=1))
        llm.llm_engine.engine_core.shutdown()


def measure(llm: Any, text: bytes, streams: int, args: argparse.Namespace) -> dict[str, Any]:
    """One row: throughput, and what each step accepted and verified."""
    from vllm import SamplingParams

    def counters() -> dict[str, float]:
        prefix = "vllm:spec_decode_num_"
        return {
            m.name.removeprefix(prefix): m.value
            for m in llm.get_metrics()
            if m.name.startswith(prefix) and hasattr(m, "value")
        }

    params = SamplingParams(temperature=args.temperature, max_tokens=args.tokens, ignore_eos=True, detokenize=False)
    llm.generate(prompts(text, streams, 256, 99), params, use_tqdm=False)
    speeds, lengths, widths = [], [], []
    for repeat in range(args.repeats):
        before, started = counters(), time.perf_counter()
        llm.generate(prompts(text, streams, 256, repeat), params, use_tqdm=False)
        took, after = time.perf_counter() - started, counters()
        speeds.append(streams * args.tokens / took)
        if drafts := after.get("drafts", 0) - before.get("drafts", 0):
            lengths.append(1 + (after["accepted_tokens"] - before["accepted_tokens"]) / drafts)
            widths.append((after["draft_tokens"] - before["draft_tokens"]) / drafts)
    return {
        "engine": args.engine,
        "pair": args.pair.name,
        "temperature": args.temperature,
        "streams": streams,
        "tok_s": round(statistics.median(speeds), 1),
        "tok_s_all": [round(s, 1) for s in speeds],
        "acceptance_length": round(statistics.mean(lengths), 4) if lengths else 1.0,
        "acceptance_length_all": [round(length, 4) for length in lengths],
        "width": round(statistics.mean(widths), 3) if widths else 0.0,
    }


if __name__ == "__main__":
    main()
