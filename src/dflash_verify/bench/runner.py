"""Runs the cells of a plan against one server and writes their records."""

import asyncio
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from dflash_verify.bench.endpoint import Endpoint, Snapshot, Stream, as_json
from dflash_verify.bench.errors import BenchError
from dflash_verify.bench.gpu import Gpus, wait_cool
from dflash_verify.bench.records import Cell, Store
from dflash_verify.bench.workloads import Workload, body_sha256, stream_seed, text_sha256


@dataclass(frozen=True, slots=True)
class Options:
    """How runs are made; part of the manifest.

    warmups: uncounted runs before the first run of a workload at a concurrency, on every visit of an arm.
    sample_s: period at which /metrics is read during a run (every arm pays the same for it).
    keep_prefix_cache: let requests hit the prefix cache; otherwise each carries its own cache salt.
    """

    seed: int = 0
    warmups: int = 1
    sample_s: float = 1.0
    keep_prefix_cache: bool = False


class RunFailed(BenchError):
    """A run that cannot count; its records are kept."""


class Runner:
    """Executes runs one after the other on one endpoint."""

    def __init__(
        self, endpoint: Endpoint, store: Store, options: Options, *, gpus: Gpus, say: Callable[[str], None]
    ) -> None:
        self.endpoint, self.store, self.options = endpoint, store, options
        self.gpus, self.say = gpus, say

    async def warm_up(self, workload: Workload, cell: Cell) -> None:
        """Runs that compile and fill caches; not recorded beyond an error."""
        for _ in range(self.options.warmups):
            streams = await self._streams(workload, cell, warm_up=True)
            broken = [s.error for s in streams if s.error]
            if broken:
                raise RunFailed(f"Warm-up of {cell.id} failed: {broken[0]}.")

    async def run(self, workload: Workload, cell: Cell) -> None:
        """One counted run; RunFailed when it cannot count (records are written before)."""
        attempt = self.store.next_attempt(cell.id)
        paused_s = await asyncio.to_thread(wait_cool, self.gpus.read, say=self.say)
        before = await self.endpoint.wait_idle()
        timeline: list[dict[str, Any]] = []
        gpu_samples = list(self.gpus.read())
        sampler = asyncio.create_task(self._sample(before, timeline, gpu_samples))
        try:
            streams = await self._streams(workload, cell)
        finally:
            sampler.cancel()
            await asyncio.gather(sampler, return_exceptions=True)
        for index, stream in enumerate(streams):
            self.store.add(self._request_record(workload, cell, attempt, stream, index))
        usage = sum(s.completion_tokens for s in streams)
        after: Snapshot | None = None
        lost: str | None = None
        try:
            # After an error the counter has nothing to agree with.
            expected = 0 if any(s.error for s in streams) else before.generation_tokens + usage
            after = await self.endpoint.wait_settled(expected)
        except BenchError as error:
            lost = str(error)
        gpu_samples += self.gpus.read()
        problems = find_problems(workload, streams, before, after)
        if lost is not None:
            problems.append(lost)
        self.store.add_run(
            cell,
            attempt,
            {
                "problems": problems,
                "before": as_json(before),
                "after": None if after is None else as_json(after),
                "timeline": timeline,
                "gpu": summarise_gpu(gpu_samples),
                "paused_s": paused_s,
            },
        )
        if problems:
            raise RunFailed(f"Run {cell.id} does not count: {problems[0]}.")

    async def _streams(self, workload: Workload, cell: Cell, *, warm_up: bool = False) -> list[Stream]:
        return await asyncio.gather(
            *(
                self.endpoint.stream(
                    workload.body(
                        workload.prompt_index(cell.prompt, cell.repeat, index),
                        self._seed(cell, index) + (1 if warm_up else 0),
                    ),
                    cache_salt=None if self.options.keep_prefix_cache else uuid.uuid4().hex,
                )
                for index in range(cell.concurrency)
            )
        )

    def _seed(self, cell: Cell, stream: int) -> int:
        return stream_seed(self.options.seed, cell.workload, cell.pass_index, cell.prompt, cell.repeat, stream)

    def _request_record(
        self, workload: Workload, cell: Cell, attempt: int, stream: Stream, index: int
    ) -> dict[str, Any]:
        prompt = workload.prompt_index(cell.prompt, cell.repeat, index)
        seed = self._seed(cell, index)
        return {
            "kind": "request",
            "run": cell.id,
            "attempt": attempt,
            "stream": index,
            "prompt": prompt,
            "prompt_sha256": text_sha256(workload.prompts[prompt]),
            "seed": seed,
            "body_sha256": body_sha256(workload.body(prompt, seed)),
            **asdict(stream),
        }

    async def _sample(self, before: Snapshot, timeline: list[dict[str, Any]], gpu_samples: list[Any]) -> None:
        """Counters over time, relative to the start: width, tokens and the controller's reason."""
        while True:
            await asyncio.sleep(self.options.sample_s)
            try:
                now = await self.endpoint.snapshot()
            except BenchError:
                continue  # the requests themselves report a lost server
            timeline.append(
                {
                    "s": round(now.unix_s - before.unix_s, 3),
                    "tokens": now.generation_tokens - before.generation_tokens,
                    "steps": {w: n - before.steps.get(w, 0) for w, n in now.steps.items()},
                    "drafts": _minus(now.drafts, before.drafts),
                    "draft_tokens": _minus(now.draft_tokens, before.draft_tokens),
                    "reason": now.reason,
                }
            )
            gpu_samples += self.gpus.read()


def _minus(a: float | None, b: float | None) -> float | None:
    return None if a is None else a - (b or 0.0)


def find_problems(workload: Workload, streams: list[Stream], before: Snapshot, after: Snapshot | None) -> list[str]:
    """Why a run does not count; empty when it does."""
    problems = [f"stream {i}: {s.error}" for i, s in enumerate(streams) if s.error]
    if workload.must_reach_length:
        problems += [
            f"stream {i} ended with {s.finish_reason!r} after {s.completion_tokens} tokens, expected 'length' at "
            f"{workload.max_tokens}"
            for i, s in enumerate(streams)
            if not s.error and s.finish_reason != "length"
        ]
    if after is None:
        return problems
    if after.identity != before.identity or after.generation_tokens < before.generation_tokens:
        problems.append("the server was restarted during the run")
        return problems
    usage = sum(s.completion_tokens for s in streams)
    generated = after.generation_tokens - before.generation_tokens
    if generated != usage and not any(s.error for s in streams):
        problems.append(
            f"the server generated {generated:.0f} tokens but these requests received {usage}: other traffic was served"
        )
    return problems


def summarise_gpu(samples: list[Any]) -> dict[str, Any] | None:
    """Hottest temperature, lowest and highest SM clock, and whether any sample was throttled; None if unreadable."""
    if not samples:
        return None
    clocks = [s.sm_mhz for s in samples if s.sm_mhz >= 0]
    return {
        "samples": len(samples),
        "max_celsius": max(s.celsius for s in samples),
        "min_sm_mhz": min(clocks, default=None),
        "max_sm_mhz": max(clocks, default=None),
        "throttled": any(s.throttled for s in samples),
    }


async def wait_ready(endpoint: Endpoint, timeout_s: float) -> dict[str, Any]:
    """Wait until the server has answered a request, not only /health: first requests compile. Returns describe()."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            facts = await endpoint.describe()
            break
        except BenchError as error:
            if "refused the key" in str(error) or time.monotonic() > deadline_s:
                raise
            await asyncio.sleep(0.5)
    body = {
        "messages": [{"role": "user", "content": "Say hello."}],
        "max_tokens": 8,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    first = await endpoint.stream(body)
    if first.error:
        raise BenchError(f"The server at {endpoint.url} is up but its first request failed: {first.error}.")
    return facts


def cells_of(
    workloads: tuple[Workload, ...],
    concurrency: tuple[int, ...],
    *,
    arm: str,
    pass_index: int = 0,
    max_num_seqs: int = 0,
) -> list[Cell]:
    """The runs of one visit of an arm, in order."""
    return [
        Cell(pass_index, max_num_seqs, arm, w.name, c, prompt, repeat)
        for w in workloads
        for c in concurrency
        for repeat in range(w.repeats)
        for prompt in range(w.prompts_per_repeat)
    ]


async def run_visit(runner: Runner, workloads: tuple[Workload, ...], cells: list[Cell]) -> None:
    """All runs of a visit that are not complete yet, with a warm-up before each (workload, concurrency)."""
    by_name = {w.name: w for w in workloads}
    warmed: set[tuple[str, int]] = set()
    for cell in cells:
        if cell.id in runner.store.complete:
            continue
        workload = by_name[cell.workload]
        if (cell.workload, cell.concurrency) not in warmed:
            await runner.warm_up(workload, cell)
            warmed.add((cell.workload, cell.concurrency))
        await runner.run(workload, cell)
        runner.say(f"{cell.id} done")
