"""One vLLM engine on a GPU whose acceptance can be set, and what one run on it showed.

Random weights accept nothing, so vLLM's own synthetic rejection sampler decides, with per-position survival rates from
published measurements (FIELD: structured and prose are GLM-5.3-Flash's, hard is temperature-1 prose). The engine runs in
this process: rates, widths and graphs can be looked at and changed between two steps.
"""

import os
import statistics
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import shapes

DRAFT_WIDTH = 7
# P(first i drafts accepted). structured: counting 1 to 200, T=0; prose: hash-map explanation, T=0 (MiaAI README). code:
# cumulated from conditional rates of a code prompt (tonyd2wild README). hard: about one accepted draft a step.
SURVIVAL = {
    "structured": [0.98, 0.98, 0.94, 0.94, 0.91, 0.83, 0.83],
    "code": [0.93, 0.83, 0.70, 0.56, 0.44, 0.26, 0.25],
    "prose": [0.75, 0.58, 0.41, 0.28, 0.16, 0.09, 0.06],
    "hard": [0.50, 0.25, 0.12, 0.06, 0.03, 0.02, 0.01],
}
# Regimes of a text that changes between two kinds every SPAN tokens of each stream.
ALTERNATING = {"alternating": ("structured", "prose")}
SPAN = 40


@dataclass(frozen=True)
class Run:
    """One measured batch: c streams of equal length."""

    tok_s: float
    width: float  # drafts verified per request and step
    acceptance_length: float
    step_ms: float
    steps: int
    decide_us: float  # all of the controller's work per step: observing and deciding


class GpuEngine:
    """An in-process LLM over a random-weight shape."""

    def __init__(
        self, model: str, speculative: dict[str, Any] | None, max_num_seqs: int, watch: bool = True, **fields: Any
    ) -> None:
        from vllm import LLM

        target, draft = shapes.write(model, Path(tempfile.gettempdir()) / "dflash-verify-shapes")
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
            "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
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
        self.draft_graphs: Counter[str] = Counter()
        self._emitted = 0
        self._span = 0
        self._regime: tuple[str, ...] = ()
        self._survival = ""
        self._controller_s = 0.0
        self._synthetic = speculative is not None
        if self._synthetic and watch:  # only with the worker in this process
            self._count_draft_graphs()
            self._watch_tokens()
            self._watch_controller()

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def runner(self) -> Any:
        return self.core.model_executor.driver_worker.worker.model_runner

    @property
    def steering(self) -> Any:
        return self.core.scheduler.steering

    def _count_draft_graphs(self) -> None:
        manager = self.runner.speculator.query_cudagraph_manager
        dispatch = manager.dispatch

        def counted(*args: Any, **kwargs: Any) -> Any:
            desc = dispatch(*args, **kwargs)
            self.draft_graphs[desc.cg_mode.name] += 1
            return desc

        manager.dispatch = counted

    def _watch_tokens(self) -> None:
        """Switch the regime by tokens emitted, so that every arm reads the same text."""
        scheduler = self.core.scheduler
        update = scheduler.update_from_output

        def counted(output: Any, result: Any, *args: Any, **kwargs: Any) -> Any:
            self._emitted += sum(map(len, result.sampled_token_ids or ()))
            if len(self._regime) > 1:
                self.set_survival(self._regime[self._emitted // self._span % len(self._regime)])
            return update(output, result, *args, **kwargs)

        scheduler.update_from_output = counted

    def _watch_controller(self) -> None:
        steering = getattr(self.core.scheduler, "steering", None)
        if steering is None:
            return
        for name in ("decide", "finished"):
            self._time(steering, name)

    def _time(self, owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            result = original(*args, **kwargs)
            self._controller_s += time.perf_counter() - began
            return result

        setattr(owner, name, timed)

    def set_survival(self, name: str) -> None:
        if self._survival == name:
            return
        import torch
        from vllm.v1.spec_decode.utils import unconditional_to_conditional_rates

        rates = self.runner.rejection_sampler.synthetic_conditional_rates
        rates.copy_(torch.tensor(unconditional_to_conditional_rates(SURVIVAL[name]), dtype=rates.dtype))
        self._survival = name

    def counters(self) -> dict[str, float]:
        prefix = "vllm:spec_decode_num_"
        return {
            metric.name.removeprefix(prefix): metric.value
            for metric in self.llm.get_metrics()
            if metric.name.startswith(prefix) and hasattr(metric, "value")
        }

    def run(self, regime: str, streams: int, tokens: int) -> Run:
        """`streams` requests of `tokens` tokens each, all at once."""
        import numpy as np
        from vllm import SamplingParams

        self._regime = ALTERNATING.get(regime, (regime,))
        self._emitted, self._span = 0, SPAN * streams
        self._controller_s = 0.0
        if self._synthetic:
            self.set_survival(self._regime[0])
        rng = np.random.default_rng(streams)
        prompts = [{"prompt_token_ids": rng.integers(10, 50000, 64).tolist()} for _ in range(streams)]
        params = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        before, began = self.counters(), time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        took = time.perf_counter() - began
        after = self.counters()
        emitted = sum(len(output.outputs[0].token_ids) for output in outputs)
        drafts = after.get("drafts", 0) - before.get("drafts", 0)
        if not drafts:
            return Run(emitted / took, 0.0, 1.0, took * 1e3 / tokens, tokens, 0.0)
        steps = drafts / streams
        return Run(
            tok_s=emitted / took,
            width=(after["draft_tokens"] - before["draft_tokens"]) / drafts,
            acceptance_length=1 + (after["accepted_tokens"] - before["accepted_tokens"]) / drafts,
            step_ms=took * 1e3 / steps,
            steps=round(steps),
            decide_us=self._controller_s * 1e6 / steps,
        )


def median_row(runs: list[Run], **labels: Any) -> dict[str, Any]:
    """One row: median throughput with the range of the repeats, the rest of the median run."""
    middle = sorted(runs, key=lambda run: run.tok_s)[len(runs) // 2]
    return labels | {
        "tok_s": round(statistics.median(run.tok_s for run in runs), 1),
        "tok_s_min": round(min(run.tok_s for run in runs), 1),
        "tok_s_max": round(max(run.tok_s for run in runs), 1),
        "repeats": len(runs),
        "width": round(middle.width, 3),
        "acceptance_length": round(middle.acceptance_length, 3),
        "step_ms": round(middle.step_ms, 3),
        "decide_us": round(middle.decide_us, 1),
    }


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
