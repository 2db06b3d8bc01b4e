"""A tiny vLLM engine inside this process, for the demo and the tests.

    with open_engine(models, drafter="dflash2") as engine:
        tokens = engine.generate(["Hello world"], max_tokens=32)
        engine.steps         # what vLLM's scheduler did
        engine.counters()    # vLLM's own speculative decoding counters

`environment.activate()` must have run before anything imported vLLM.
"""

import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from dflash_verify.cpu import trace
from dflash_verify.cpu.models import Drafter, Models

DRAFT_WIDTH = 7

# Small on purpose: a block is 16 tokens, and every test that needs less or more says so.
ENGINE_ARGS: Mapping[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 256,
    "block_size": 16,
    "kv_cache_memory_bytes": 16 << 20,
    "enable_prefix_caching": False,
    "disable_log_stats": False,
    "seed": 0,
}


@dataclass(frozen=True)
class Counters:
    """vLLM's cumulative counters of speculative decoding."""

    drafts: int
    draft_tokens: int
    accepted_tokens: int

    @property
    def acceptance_length(self) -> float:
        """Tokens per verified draft, the target's own included."""
        return 1 + self.accepted_tokens / self.drafts


@dataclass(frozen=True)
class Request:
    """A request for `Engine.play`.

    arrive_step: engine steps before it is added. abort_after: aborted once it has shown that many tokens. sampling:
    further fields of vLLM's SamplingParams.
    """

    prompt: str | Sequence[int]
    max_tokens: int
    arrive_step: int = 0
    abort_after: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)


class Engine:
    """One in-process `vllm.LLM` and the trace of its scheduler."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.steps: list[trace.Step] = []
        trace.attach(self.scheduler, self.steps.append)

    @property
    def core(self) -> Any:
        """vLLM's EngineCore."""
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def scheduler(self) -> Any:
        return self.core.scheduler

    @property
    def model_runner(self) -> Any:
        return self.llm.llm_engine.model_executor.driver_worker.worker.model_runner

    def generate(
        self, prompts: Sequence[str | Sequence[int]], max_tokens: int, temperature: float = 0.0, **sampling: Any
    ) -> list[list[int]]:
        """Token ids per prompt, exactly `max_tokens` of them each (the end-of-text token does not stop a request)."""
        outputs = self.llm.generate(
            [_prompt(p) for p in prompts],
            _sampling_params(max_tokens, {"temperature": temperature, **sampling}),
            use_tqdm=False,
        )
        return [list(output.outputs[0].token_ids) for output in outputs]

    def play(self, requests: Sequence[Request], max_steps: int = 4000) -> list[list[int]]:
        """Run requests that arrive and leave at different times, greedy unless their `sampling` says otherwise.

        Returns token ids per request, in the order given; those of an aborted one up to its abort. RuntimeError when
        they are not done within `max_steps` engine steps.
        """
        engine = self.llm.llm_engine
        waiting = sorted(range(len(requests)), key=lambda i: requests[i].arrive_step)
        ids: dict[str, int] = {}
        tokens: list[list[int]] = [[] for _ in requests]
        for step in range(max_steps):
            while waiting and requests[waiting[0]].arrive_step <= step:
                index = waiting.pop(0)
                request = requests[index]
                params = _sampling_params(request.max_tokens, {"temperature": 0.0, **request.sampling})
                # vLLM may return the id it gave the request; outputs carry the one given here.
                engine.add_request(f"request-{index}", _prompt(request.prompt), params)
                ids[f"request-{index}"] = index
            if not waiting and not engine.has_unfinished_requests():
                return tokens
            for output in engine.step():
                index = ids[output.request_id]
                tokens[index] = list(output.outputs[0].token_ids)
                limit = requests[index].abort_after
                if limit is not None and len(tokens[index]) >= limit and not output.finished:
                    engine.abort_request([output.request_id])
        raise RuntimeError(f"{len(requests)} requests were not done after {max_steps} engine steps")

    def counters(self) -> Counters:
        """vLLM's counters since the engine started."""
        values = {metric.name: getattr(metric, "value", 0) for metric in self.llm.get_metrics()}
        drafts, draft_tokens, accepted = (
            int(values.get(f"vllm:spec_decode_num_{name}", 0)) for name in ("drafts", "draft_tokens", "accepted_tokens")
        )
        return Counters(drafts, draft_tokens, accepted)

    def close(self) -> None:
        """Tear the engine down so that another can be built in this process."""
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        cleanup_dist_env_and_memory()  # also undoes the worker's gc.freeze()
        gc.freeze()


def _prompt(prompt: str | Sequence[int]) -> Any:
    return {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": list(prompt)}


def _sampling_params(max_tokens: int, fields: Mapping[str, Any]) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**{"max_tokens": max_tokens, "ignore_eos": True, "detokenize": False, **fields})


def speculative_config(models: Models, drafter: Drafter, **fields: Any) -> dict[str, Any]:
    """vLLM's `speculative_config` for one of the generated drafters at its trained width."""
    return {
        "method": "dspark" if drafter == "dspark" else "dflash",
        "model": str(models.drafter(drafter)),
        "num_speculative_tokens": DRAFT_WIDTH,
        **fields,
    }


@contextmanager
def plugin_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """DFLASH_ variables for the engines built inside: the plugin applied with exactly these, and reverted after.

    In a process of its own vLLM loads the plugin once, with the environment that the process was started with.
    """
    from dflash_verify import overlays, plugin

    before = {name: value for name, value in os.environ.items() if name.startswith("DFLASH_")}
    kept = {name: value for name, value in before.items() if name == "DFLASH_CPU"}

    def set_to(wanted: Mapping[str, str]) -> None:
        for name in [name for name in os.environ if name.startswith("DFLASH_")]:
            del os.environ[name]
        os.environ.update(wanted)

    set_to({**kept, **variables})
    try:
        plugin.register()
        yield
    finally:
        overlays.revert()
        set_to(before)


@contextmanager
def open_engine(
    models: Models,
    drafter: Drafter | None = None,
    environ: Mapping[str, str] | None = None,
    speculative: Mapping[str, Any] | None = None,
    **engine_args: Any,
) -> Iterator[Engine]:
    """An engine for the generated target, with a drafter or without speculation.

    environ: DFLASH_ variables, such as DFLASH_VERIFY_TOKENS, for this engine only. speculative: fields on top of
    `speculative_config`. engine_args: fields of vLLM's EngineArgs on top of ENGINE_ARGS.
    """
    from vllm import LLM

    fields = {**ENGINE_ARGS, **engine_args}
    if drafter is not None:
        fields["speculative_config"] = speculative_config(models, drafter, **(speculative or {}))
    with plugin_environment(environ or {}):
        engine = Engine(LLM(model=str(models.target), **fields))
        try:
            yield engine
        finally:
            engine.close()
