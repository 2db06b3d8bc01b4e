"""Question: what does each verify width give, stationary and alternating, and does `auto` take the best of it?

One engine captures all widths; arms are switched between runs inside it, so that nothing but the width differs. Engines of
their own: `stock` (no plugin), `off` (no speculation) and `plain3` (vLLM's own schedule [[1, M, 3]], no overlay).

    python bench/gpu/width.py ENGINE --model qwen3-8b --streams 1,8,32,128,256 --out rows.json
"""

import argparse
import json
import os
import sys
import time
from typing import Any


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=["widths", "static3", "stock", "off", "plain3", "adaptive"])
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--streams", default="1,8,32,128,256")
    parser.add_argument("--slots", type=int, default=0, help="request slots (default: the largest of --streams)")
    parser.add_argument("--regimes", default="structured,prose,alternating")
    parser.add_argument("--widths", default="1,3,5,7")
    parser.add_argument("--arms", default="", help="of engine widths: a subset of the widths and auto (default: all)")
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further cell after this long")
    parser.add_argument("--without", default="", help="leave this overlay off: what is it worth?")
    parser.add_argument("--out", required=True)
    return parser.parse_args()


def main() -> None:
    args = parse()
    began = time.time()
    streams = [int(part) for part in args.streams.split(",")]
    slots = args.slots or max(streams)
    speculative: dict[str, Any] | None = {}
    if args.engine == "widths":
        os.environ["DFLASH_VERIFY_TOKENS"] = f"auto:{args.widths}"
    elif args.engine == "static3":
        os.environ["DFLASH_VERIFY_TOKENS"] = "3"
    elif args.engine == "off":
        speculative = None
    elif args.engine == "plain3":
        speculative = {"num_speculative_tokens_per_batch_size": [[1, slots, 3]]}
    elif args.engine == "adaptive":
        speculative = {"enable_adaptive_verification": True}

    if args.without:
        leave_off(args.without)
    from engine import GpuEngine, about_machine, median_row

    fields: dict[str, Any] = {}
    if args.engine in ("stock", "plain3", "adaptive"):
        # The stock list ends at 512 tokens; give it every size it could use, so that only the width differs.
        counts = sorted({*range(1, 33), *range(40, 257, 8)} & set(range(1, slots + 1)))
        sizes = {n * rows for n in counts for rows in ((4, 8) if args.engine == "plain3" else (8,))}
        fields["compilation_config"] = {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": sorted(sizes),
        }
    engine = GpuEngine(args.model, speculative, slots, **fields)
    arms: list[str] = [args.engine]
    if args.engine == "widths":
        arms = args.arms.split(",") if args.arms else [*args.widths.split(","), "auto"]
        if engine.steering.controller.cost.table is not None:
            print(
                "cost",
                json.dumps(dict(engine.steering.controller.cost.table.cells)),
                flush=True,
            )
    rows: list[dict[str, Any]] = []
    print(f"{args.engine} {args.model}: started in {engine.start_s:.1f} s", flush=True)
    for count in streams:
        select(engine, arms[0])
        engine.run("structured", count, 24)  # first-use work of this batch size
        for regime in args.regimes.split(","):
            runs: dict[str, list[Any]] = {arm: [] for arm in arms}
            for repeat in range(args.repeats):
                # Every repeat visits the arms in the other direction, so drift does not favour one.
                for arm in arms if repeat % 2 == 0 else arms[::-1]:
                    if time.time() - began > args.seconds:
                        break
                    select(engine, arm)
                    runs[arm].append(engine.run(regime, count, args.tokens))
            for arm in arms:
                if runs[arm]:
                    rows.append(
                        median_row(
                            runs[arm], engine=args.engine, model=args.model, arm=arm, regime=regime, streams=count
                        )
                    )
            line = {
                r["arm"]: (r["tok_s"], r["width"], r["step_ms"])
                for r in rows
                if (r["streams"], r["regime"]) == (count, regime)
            }
            print(count, regime, line, flush=True)
            write(args.out, engine, rows, about_machine())
    print("drafter graphs", dict(engine.draft_graphs), flush=True)
    sys.stdout.flush()
    os._exit(0)  # an in-process engine's teardown is not what is measured


def leave_off(name: str) -> None:
    """Apply all overlays but one, before vLLM loads the plugin, which then finds them applied."""
    from dflash_verify import overlays
    from dflash_verify.overlays.manifest import load_manifests
    from dflash_verify.settings import load

    overlays.apply(load(), [manifest for manifest in load_manifests() if manifest.name != name])


def select(engine: Any, arm: str) -> None:
    if not hasattr(engine.core.scheduler, "steering"):
        return
    steering = engine.steering
    steering.forced = None if arm in ("auto", "static3") else int(arm)
    steering.restart()
    if steering.forced is not None:
        steering.published = steering.forced


def write(path: str, engine: Any, rows: list[dict[str, Any]], machine: dict[str, str]) -> None:
    with open(path, "w") as file:
        json.dump(
            {
                "machine": machine,
                "command": "python " + " ".join(sys.argv),
                "start_s": round(engine.start_s, 1),
                "drafter_graphs": dict(engine.draft_graphs),
                "rows": rows,
            },
            file,
            indent=1,
        )


if __name__ == "__main__":
    main()
