"""One vLLM engine on a GPU whose acceptance can be set, and what one run on it showed.

Random weights accept nothing, so vLLM's own synthetic rejection sampler decides, with per-position survival rates from
published measurements. The processes are those of a server (front end here, EngineCore and workers in their own) unless
VLLM_ENABLE_V1_MULTIPROCESSING=0. Acceptance is switched through a worker extension while the engine runs, and so are
arms, where a script compares them in one engine, through the plugin's control file.
"""

import argparse
import contextlib
import fcntl
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import shapes

from dflash_verify.plan import request_counts
from dflash_verify.simulate import generate

DRAFT_WIDTH = 7
# P(first i drafts accepted); where they are from stands there. `hard` is one accepted draft a step, as at T=1.
SURVIVAL = {name: list(generate.SURVIVAL[name]) for name in ("structured", "code", "prose", "hard")}
# Waves of requests that alternate between two kinds of text; one engine, one controller throughout.
ALTERNATING = ("structured", "prose", "structured", "prose")
WAVE_TOKENS = 120  # of each request: about 20 steps of structured text at width 7, 45 of prose at width 3
FULL_DECODE_ONLY: dict[str, Any] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
MEET_S = 600
CONTROL_S = 0.25  # the plugin looks at its control file five times a second


@dataclass(frozen=True)
class Run:
    """One measured batch of streams of equal length.

    width: drafts verified per request and step without prompts. acceptance_length: tokens per request and step that verified any.
    decode_ms: median step while all streams decode and nothing is prefilled. prompts_s: time of steps with prompts in them,
    which run without a FULL graph, with the step before them and the gap between waves; prompt_steps: how many
    had prompts, which depends on when the requests came. controller_us: all of the controller's work per step, median; 0
    unless the engine writes a trace. path: the width of every step in order, e.g. `7x3 3x41`; likewise.
    """

    tok_s: float
    width: float
    acceptance_length: float
    step_ms: float
    decode_ms: float
    prompts_s: float
    prompt_steps: int
    controller_us: float
    path: str = ""


class GpuEngine:
    """An LLM over a random-weight shape. speculative: fields of vLLM's speculative_config, None for no speculation.

    switched: arms are switched while it runs (a control file). traced: one record per step is written, which costs a little
    in every step.
    """

    def __init__(
        self,
        model: str,
        speculative: dict[str, Any] | None,
        max_num_seqs: int,
        *,
        switched: bool = False,
        traced: bool = False,
        **fields: Any,
    ) -> None:
        # Step times of random weights are nobody else's, nor those of vLLM's own dummy weights (witness.py).
        os.environ.setdefault("DFLASH_CACHE_DIR", str(Path("~/.cache/dflash-verify-bench-own-values").expanduser()))
        folder = Path(tempfile.mkdtemp(prefix="dflash-verify-"))
        self._control = folder / "control.json"
        self._trace = folder / "trace.jsonl"
        if switched:
            os.environ["DFLASH_CONTROL_FILE"] = str(self._control)
        if traced:
            os.environ["DFLASH_TRACE_FILE"] = str(self._trace)
        from vllm import LLM

        target, draft = shapes.write(model, folder)
        args: dict[str, Any] = {
            "model": target,
            "skip_tokenizer_init": True,
            "load_format": "dummy",
            "dtype": "bfloat16",
            "max_model_len": 2048,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": 8192,
            "gpu_memory_utilization": 0.85,
            "disable_log_stats": False,
            "enable_prefix_caching": False,
            "compilation_config": FULL_DECODE_ONLY,
            "worker_extension_cls": "witness.Witness",
        }
        if "next" in model:
            args["additional_config"] = {"gdn_prefill_backend": "triton"}
        if speculative is not None:
            args["speculative_config"] = {
                "method": "dflash",
                "model": draft,
                "num_speculative_tokens": DRAFT_WIDTH,
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_rates": SURVIVAL["structured"],
            } | speculative
        began = time.time()
        self.llm = LLM(**(args | fields))
        self.start_s = time.time() - began
        self.llm.collective_rpc("watch_times")
        self._speculates = speculative is not None
        if self._speculates:
            self.llm.collective_rpc("watch_draft_graphs")

    def close(self) -> None:
        """End the engine's processes, so that the next engine finds the GPU free."""
        self.llm.llm_engine.engine_core.shutdown()

    def set_survival(self, name: str) -> None:
        self.llm.collective_rpc("set_survival", args=(SURVIVAL[name],))

    def set_width(self, width: str) -> None:
        """`auto`, a captured width, or "" for what the engine was started with."""
        if width:
            self._control.write_text(json.dumps({"width": int(width) if width.isdigit() else width}))
        else:
            self._control.unlink(missing_ok=True)
        time.sleep(CONTROL_S)

    def draft_graphs(self) -> dict[str, int]:
        """How the drafter's passes of rank 0 ran so far: FULL graph, or NONE (eager)."""
        return self.llm.collective_rpc("draft_graphs")[0] if self._speculates else {}

    def _counters(self) -> dict[str, float]:
        prefix = "vllm:spec_decode_num_"
        return {
            metric.name.removeprefix(prefix): metric.value
            for metric in self.llm.get_metrics()
            if metric.name.startswith(prefix) and hasattr(metric, "value")
        }

    def run(self, regime: str, streams: int, tokens: int, seed: int = 0) -> Run:
        """`streams` requests at once, of `tokens` tokens each, or of N in each wave of `alternating:N`. seed: of the first
        request; the others follow."""
        import numpy as np
        from vllm import SamplingParams

        name, _, wave = regime.partition(":")
        waves = (
            [(kind, int(wave or WAVE_TOKENS)) for kind in ALTERNATING] if name == "alternating" else [(name, tokens)]
        )
        rng = np.random.default_rng(streams)
        prompts = [{"prompt_token_ids": rng.integers(10, 50000, 64).tolist()} for _ in range(streams)]
        traced = self._trace.stat().st_size if self._trace.exists() else 0
        self.llm.collective_rpc("times")
        before, took = self._counters(), 0.0
        for number, (kind, length) in enumerate(waves):
            if self._speculates:
                self.set_survival(kind)
            # Seeds, so that engines at the same width accept the same drafts.
            first = seed + 100_000 * number
            params = [
                SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True, detokenize=False, seed=first + i)
                for i in range(streams)
            ]
            began = time.perf_counter()
            self.llm.generate(prompts, params, use_tqdm=False)
            took += time.perf_counter() - began
        after, phases = self._counters(), self._phases(streams, took)
        emitted = streams * sum(length for _, length in waves)
        drafts = after.get("drafts", 0) - before.get("drafts", 0)
        accepted = after["accepted_tokens"] - before["accepted_tokens"] if drafts else 0
        return Run(
            tok_s=emitted / took,
            acceptance_length=1 + accepted / drafts if drafts else 1.0,
            **phases,
            **self._traced(traced),
        )

    def _phases(self, streams: int, took: float) -> dict[str, Any]:
        """Of the steps since the last question, which took that many seconds; a step is from one launch to the next."""
        steps = self.llm.collective_rpc("times")[0]
        decode, prompts = [], 0.0
        decoding = [(batch, verified) for _, batch, has_prompts, verified in steps if not has_prompts]
        for (at, batch, has_prompts, _), (until, following, follow_prompts, _) in itertools.pairwise(steps):
            if has_prompts or follow_prompts:
                prompts += until - at
            elif batch == following == streams:
                decode.append(until - at)
        return {
            "width": sum(verified for _, verified in decoding) / max(1, sum(batch for batch, _ in decoding)),
            "step_ms": took * 1e3 * streams / max(1, sum(batch for _, batch, _, _ in steps)),
            "decode_ms": statistics.median(decode) * 1e3 if decode else 0.0,
            "prompts_s": prompts,
            "prompt_steps": sum(has_prompts for _, _, has_prompts, _ in steps),
        }

    def _traced(self, start: int) -> dict[str, Any]:
        if not self._trace.exists():
            return {"controller_us": 0.0}
        with self._trace.open() as file:
            file.seek(start)
            steps = [json.loads(line) for line in file]
        return {
            "controller_us": statistics.median(step["controller_us"] for step in steps) if steps else 0.0,
            "path": " ".join(
                f"{width}x{len(list(same))}" for width, same in itertools.groupby(step["width"] for step in steps)
            ),
        }


def median_row(runs: list[Run], **labels: Any) -> dict[str, Any]:
    """One row: median throughput with its range, median decode_ms, the prompt steps of every run, the rest of the run with
    median throughput."""
    middle = sorted(runs, key=lambda run: run.tok_s)[len(runs) // 2]
    return labels | {
        "tok_s": round(statistics.median(run.tok_s for run in runs), 1),
        "tok_s_min": round(min(run.tok_s for run in runs), 1),
        "tok_s_max": round(max(run.tok_s for run in runs), 1),
        "repeats": len(runs),
        "tok_s_of_runs": [round(run.tok_s, 1) for run in runs],
        "width": round(middle.width, 3),
        "acceptance_length": round(middle.acceptance_length, 3),
        "step_ms": round(middle.step_ms, 3),
        "decode_ms": round(statistics.median(run.decode_ms for run in runs), 3),
        "prompts_s": round(middle.prompts_s, 3),
        "prompts_of_runs": [[run.prompt_steps, round(run.prompts_s, 3)] for run in runs],
        "controller_us": round(middle.controller_us, 1),
        "path": middle.path,
    }


def capture_sizes(slots: int, widths: Iterable[int]) -> list[int]:
    """Token counts for vLLM's list, which ends at 512 by itself: every size that stock could use at these widths, so that only
    the width differs."""
    return sorted({count * (width + 1) for count in request_counts(slots) for width in widths})


def meet(place: str, stage: str) -> None:
    """Wait until N processes of this host have reached `stage`: each leaves a file STAGE-PID in the folder of place, `FOLDER:N`.

    SystemExit after ten minutes, or if such a process is gone: its engine has died, or the folder is of an earlier run.
    """
    name, _, count = place.rpartition(":")
    folder = Path(name)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{stage}-{os.getpid()}").touch()
    until = time.time() + MEET_S
    while True:
        here = [path.name.rpartition("-")[2] for path in folder.glob(f"{stage}-*")]
        gone = [pid for pid in here if not Path("/proc", pid).exists()]
        if gone and stage == "ready":
            raise SystemExit(
                f"{folder}: process {gone[0]} is no longer there; empty the folder and start all of them again"
            )
        if len(here) >= int(count):
            return
        if time.time() > until:
            raise SystemExit(
                f"{folder}: {len(here)} of {count} processes were {stage} after {MEET_S} s; start that many at once"
            )
        time.sleep(0.2)


@contextlib.contextmanager
def in_turn(place: str) -> Iterator[None]:
    """Wait until N processes have started, then for a turn to work alone among them. place: as for `meet`; "": at once."""
    if not place:
        yield
        return
    meet(place, "ready")
    with open(Path(place.rpartition(":")[0]) / "turn", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """What both scripts take; a mistake is said before an engine takes minutes to start."""
    check_whole(parser, "--streams", args.streams, 1)
    if args.repeats < 1:
        parser.error(f"--repeats: {args.repeats} leaves nothing to measure; give at least 1")
    folder = Path(args.out).resolve().parent
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        parser.error(f"--out: {folder} is no folder that can be written to")
    asked = sorted(name for name in ("DFLASH_VERIFY_TOKENS", "DFLASH_BLOCK_VERIFY") if os.environ.get(name))
    if asked:
        parser.error(
            f"{' and '.join(asked)} would apply to every engine, stock too: unset it; ENGINE says what is asked for"
        )


def check_place(parser: argparse.ArgumentParser, option: str, place: str) -> None:
    folder, _, engines = place.rpartition(":")
    if place and not (folder and engines.isdecimal() and int(engines) > 0):
        parser.error(f"{option}: {place!r} is no folder and number of engines; expected FOLDER:N, as in meet:2")


def check_whole(parser: argparse.ArgumentParser, option: str, text: str, least: int, most: int = 4096) -> None:
    for part in text.split(","):
        if not part.isdecimal() or not least <= int(part) <= most:
            parser.error(f"{option}: {part!r} is no whole number from {least} to {most}; separate them by commas")


def command_line() -> str:
    """How to ask again, from the repository's root: without the folders of this machine."""
    words = [Path(word).name if "/" in word else word for word in sys.argv[1:]]
    return " ".join(["python", f"bench/gpu/{Path(sys.argv[0]).name}", *words])


def about_machine() -> dict[str, str]:
    import torch
    import triton
    import vllm

    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "vllm": vllm.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }
