"""Question: what does each verify width give, stationary and alternating, and does `auto` take the best of it?

The engine `widths` captures all widths; its arms are switched between runs, so that nothing but the width differs. Engines
of their own, started as a server would be: `auto`, `staticK` (DFLASH_VERIFY_TOKENS=K), `stock` (no plugin), `off` (no
speculation), `plainK` (vLLM's own schedule [[1, M, K]], no overlay) and `adaptive` (enable_adaptive_verification).
Two engines, each on a GPU of its own (CUDA_VISIBLE_DEVICES), are measured at once with `--beside`: each waits for the
other, since an engine that starts slows another's small batches. With `--in-turn` several start together on one GPU, each
with a KV cache of `--kv-gib`, and are measured one by one while the others are idle: most of an engine's time is its start.

    python bench/gpu/width.py ENGINE --model qwen3-8b --streams 1,8,32,128,256 --out rows.json
"""

import argparse
import json
import os
import time
from typing import Any

from shapes import SHAPES

from engine import (
    DRAFT_WIDTH,
    FULL_DECODE_ONLY,
    SURVIVAL,
    GpuEngine,
    about_machine,
    capture_sizes,
    check,
    check_place,
    check_whole,
    command_line,
    in_turn,
    median_row,
    meet,
)

STATIC = {f"static{width}": width for width in range(1, DRAFT_WIDTH + 1)}
PLAIN = {f"plain{width}": width for width in range(1, DRAFT_WIDTH)}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=["widths", "auto", "stock", "off", "adaptive", *STATIC, *PLAIN])
    parser.add_argument("--model", default="qwen3-8b", choices=list(SHAPES))
    parser.add_argument("--streams", default="1,8,32,128,256")
    parser.add_argument("--slots", type=int, default=0, help="request slots (default: the largest of --streams)")
    parser.add_argument(
        "--regimes", default="structured,prose,alternating", help="also code, hard; alternating:N has waves of N tokens"
    )
    parser.add_argument("--widths", default="1,3,5,7")
    parser.add_argument("--arms", default="", help="of engine widths: a subset of the widths and auto (default: all)")
    parser.add_argument(
        "--tokens",
        type=int,
        default=0,
        help="of each request, not of alternating's (default: 20480 / streams, 160 to 1600)",
    )
    parser.add_argument("--trace", action="store_true", help="record the controller's time and every step's width")
    parser.add_argument("--memory", type=float, help="gpu_memory_utilization (default: 0.85)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--one-process", action="store_true", help="front end and engine core in one process, unlike a server's"
    )
    parser.add_argument(
        "--compiled",
        action="store_true",
        help="vLLM's default, torch.compile and FULL_AND_PIECEWISE graphs, for mode=0 and FULL_DECODE_ONLY",
    )
    parser.add_argument(
        "--beside", default="", metavar="FOLDER:N", help="measure when N engines of this host are ready"
    )
    parser.add_argument("--in-turn", default="", metavar="FOLDER:N", help="N engines of one GPU, measured one by one")
    parser.add_argument(
        "--kv-gib", type=float, default=0.0, help="size of the KV cache instead of what --memory leaves, for --in-turn"
    )
    parser.add_argument("--seconds", type=float, default=1e9, help="after the start; no further cell begins then")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    check(parser, args)
    check_whole(parser, "--widths", args.widths, 0, DRAFT_WIDTH)
    largest = max(map(int, args.streams.split(",")))
    if args.slots and args.slots < largest:
        parser.error(f"--slots: {args.slots} request slots are fewer than {largest} streams")
    if args.arms and args.engine != "widths":
        parser.error(f"--arms: engine {args.engine} is one arm; arms are switched in engine widths")
    if args.trace and args.engine not in ("widths", "auto", *STATIC):
        parser.error(f"--trace: engine {args.engine} has no plugin that would write one")
    wrong = [regime for regime in args.regimes.split(",") if not known_regime(regime)]
    if wrong:
        parser.error(f"--regimes: {wrong[0]!r} is unknown; known are {', '.join(SURVIVAL)}, alternating, alternating:N")
    arms = [*args.widths.split(","), "auto"]
    unknown = [arm for arm in args.arms.split(",") if args.arms and arm not in arms]
    if unknown:
        parser.error(f"--arms: {unknown[0]!r} is none of {', '.join(arms)}")
    check_place(parser, "--beside", args.beside)
    check_place(parser, "--in-turn", args.in_turn)
    if args.beside and args.in_turn:
        parser.error("--beside and --in-turn: measure at once or one by one, not both")
    if bool(args.in_turn) != (args.kv_gib > 0) or args.kv_gib < 0:
        parser.error(
            "--in-turn and --kv-gib go together, since engines that share a GPU cannot measure what is left of it: give both, "
            "with a positive size, or neither"
        )
    if args.in_turn and args.memory is not None:
        parser.error("--memory and --in-turn: engines that share a GPU are given --kv-gib instead; leave --memory out")
    return args


def known_regime(regime: str) -> bool:
    name, colon, tokens = regime.partition(":")
    if name == "alternating":
        return not colon or (tokens.isdecimal() and int(tokens) > 0)
    return name in SURVIVAL and not colon


def main() -> None:
    args = parse()
    slots = args.slots or max(map(int, args.streams.split(",")))
    if args.one_process:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    speculative: dict[str, Any] | None = {}
    if args.engine in ("widths", "auto"):
        os.environ["DFLASH_VERIFY_TOKENS"] = f"auto:{args.widths}"
    elif args.engine in STATIC:
        os.environ["DFLASH_VERIFY_TOKENS"] = str(STATIC[args.engine])
    elif args.engine == "off":
        speculative = None
    elif args.engine in PLAIN:
        speculative = {"num_speculative_tokens_per_batch_size": [[1, slots, PLAIN[args.engine]]]}
    elif args.engine == "adaptive":
        speculative = {"enable_adaptive_verification": True}

    graphs = {} if args.compiled else FULL_DECODE_ONLY
    fields: dict[str, Any] = {
        "gpu_memory_utilization": 0.85 if args.memory is None else args.memory,
        "compilation_config": graphs,
    }
    if args.engine in ("stock", "adaptive", *PLAIN):
        verified = {PLAIN.get(args.engine, DRAFT_WIDTH), DRAFT_WIDTH}
        fields["compilation_config"] = graphs | {"cudagraph_capture_sizes": capture_sizes(slots, verified)}
    if args.in_turn:
        # With its size given, vLLM does not measure what is left, and asks only that this much be free.
        fields |= {"kv_cache_memory_bytes": int(args.kv_gib * (1 << 30)), "gpu_memory_utilization": 0.05}
    engine = GpuEngine(args.model, speculative, slots, switched=args.engine == "widths", traced=args.trace, **fields)
    print(f"{args.engine} {args.model}: started in {engine.start_s:.1f} s", flush=True)
    if args.beside:
        meet(args.beside, "ready")
    with in_turn(args.in_turn):
        measure(engine, args)
        if args.beside:
            meet(args.beside, "done")
        engine.close()


def measure(engine: GpuEngine, args: argparse.Namespace) -> None:
    """Every cell of streams and regimes; what there is so far is written after each."""
    began = time.time()
    arms = [args.engine]
    if args.engine == "widths":
        arms = args.arms.split(",") if args.arms else [*args.widths.split(","), "auto"]
    rows: list[dict[str, Any]] = []
    for count in map(int, args.streams.split(",")):
        tokens = args.tokens or min(1600, max(160, 20480 // count))
        select(engine, args.engine, arms[0])
        engine.run("structured", count, 24)  # first-use work of this batch size
        for regime in args.regimes.split(","):
            runs: dict[str, list[Any]] = {arm: [] for arm in arms}
            for repeat in range(args.repeats):
                # Every other repeat visits the arms backwards, so that drift does not favour one.
                for arm in arms if repeat % 2 == 0 else arms[::-1]:
                    if time.time() - began > args.seconds:
                        break
                    select(engine, args.engine, arm)
                    runs[arm].append(engine.run(regime, count, tokens, seed=1000 * repeat))
            labels = {"engine": args.engine, "model": args.model, "regime": regime, "streams": count}
            new = [median_row(runs[arm], arm=arm, **labels) for arm in arms if runs[arm]]
            rows += new
            print(
                count, regime, {row["arm"]: (row["tok_s"], row["width"], row["decode_ms"]) for row in new}, flush=True
            )
            write(args.out, engine, rows, about_machine())
    print("drafter graphs", engine.draft_graphs(), flush=True)


def select(engine: GpuEngine, kind: str, arm: str) -> None:
    if kind == "widths":
        engine.set_width(arm)


def write(path: str, engine: GpuEngine, rows: list[dict[str, Any]], machine: dict[str, str]) -> None:
    result = {
        "machine": machine,
        "command": command_line(),
        "start_s": round(engine.start_s, 1),
        "drafter_graphs": engine.draft_graphs(),
        "rows": rows,
    }
    with open(path, "w") as file:
        json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
