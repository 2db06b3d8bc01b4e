"""What vLLM's own scheduler scheduled, and what came back, step by step: the witness of demo and tests.

It looks at one scheduler object, whatever its class, and is no part of what it watches: not the plugin's own counters, and
the same for stock vLLM.
"""

import functools
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Names a file that gets one JSON line per step (`read` reads it). Not a DFLASH_ variable: those are the plugin's.
TRACE_VARIABLE = "CPU_ENGINE_TRACE"


@dataclass(frozen=True, slots=True)
class RequestStep:
    """One request in one step.

    request: vLLM's request id. tokens: scheduled tokens, drafts included. drafts: how many of them are drafts (0 in
    prefill). invalid: drafts that the grammar refused before verification. emitted: tokens that came out. prefill: the
    step computed prompt tokens, or tokens again after a preemption. guided: the request has a grammar.
    room: tokens left up to max_model_len when the step was scheduled; vLLM shortens drafts there.
    """

    request: str
    tokens: int
    drafts: int
    invalid: int
    emitted: int
    prefill: bool
    guided: bool
    room: int


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the engine, in the order in which results came back. preempted: ids thrown out of it."""

    requests: tuple[RequestStep, ...]
    preempted: tuple[str, ...] = ()


def draft_counts(steps: Iterable[Step]) -> list[int]:
    """Scheduled drafts, one per request and step past its prefill."""
    return [r.drafts for step in steps for r in step.requests if not r.prefill]


def attach(scheduler: Any, sink: Callable[[Step], None]) -> None:
    """Call `sink` with every step of this vLLM scheduler from now on."""
    pending: dict[int, tuple[Any, dict[str, dict[str, Any]], tuple[str, ...]]] = {}
    schedule, update_from_output = scheduler.schedule, scheduler.update_from_output

    @functools.wraps(schedule)
    def traced_schedule(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        facts = {}
        for request_id, tokens in output.num_scheduled_tokens.items():
            request = scheduler.requests[request_id]
            drafts = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
            # schedule() has advanced num_computed_tokens already.
            computed_before = request.num_computed_tokens - tokens
            facts[request_id] = {
                "tokens": tokens,
                "drafts": drafts,
                "prefill": tokens - drafts > 1 or computed_before < request.num_prompt_tokens,
                "guided": bool(request.use_structured_output),
                "room": scheduler.max_model_len - computed_before,
            }
        preempted = tuple(sorted(output.preempted_req_ids or ()))
        pending[id(output)] = (output, facts, preempted)  # holds the output, so that its id stays its own
        return output

    @functools.wraps(update_from_output)
    def traced_update(scheduler_output: Any, model_runner_output: Any, *args: Any, **kwargs: Any) -> Any:
        _, facts, preempted = pending.pop(id(scheduler_output), (None, {}, ()))
        sampled = model_runner_output.sampled_token_ids
        rows = []
        for request_id, fact in facts.items():
            row = model_runner_output.req_id_to_index.get(request_id)
            emitted = len(sampled[row]) if sampled and row is not None else 0
            # The grammar writes here after schedule() has returned.
            invalid = (scheduler_output.num_invalid_spec_tokens or {}).get(request_id, 0)
            rows.append(RequestStep(request=request_id, emitted=emitted, invalid=invalid, **fact))
        if rows:
            sink(Step(tuple(rows), preempted))
        return update_from_output(scheduler_output, model_runner_output, *args, **kwargs)

    scheduler.schedule, scheduler.update_from_output = traced_schedule, traced_update


def trace_every_scheduler() -> None:
    """In a server's processes: attach to each scheduler when it has been built, if TRACE_VARIABLE names a file."""
    path = os.environ.get(TRACE_VARIABLE)
    if not path:
        return
    from vllm.v1.core.sched.scheduler import Scheduler

    original = Scheduler.__init__
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def traced_init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        file = Path(path).open("a", buffering=1)  # noqa: SIM115  # as long as the scheduler: the process
        attach(self, lambda step: print(json.dumps(asdict(step)), file=file))

    Scheduler.__init__ = traced_init


def read(path: Path) -> Iterator[Step]:
    """The steps in a file written under TRACE_VARIABLE, so far."""
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):  # the last line may be half written
            step = json.loads(line)
            yield Step(tuple(RequestStep(**r) for r in step["requests"]), tuple(step["preempted"]))


def shortened(steps: Iterable[Step], width: int) -> Counter[str]:
    """How often, and why, a request past its prefill verified other than `width` drafts.

    The reasons that vLLM has: "end of context" (fewer tokens are left than the width asks for), "first after prefill" (no
    drafts were published for it yet) and "not in the step before" (its drafts were dropped: preempted, or left out for
    want of budget). Anything else is "unexplained".
    """
    reasons: Counter[str] = Counter()
    last_seen: dict[str, tuple[int, bool]] = {}
    for number, step in enumerate(steps):
        for row in step.requests:
            seen, was_prefill = last_seen.get(row.request, (-1, True))
            if not row.prefill and row.drafts != width:
                if row.drafts < width and row.room <= width + 1:
                    reasons["end of context"] += 1
                elif row.drafts < width and seen != number - 1:
                    reasons["not in the step before"] += 1
                elif row.drafts < width and was_prefill:
                    reasons["first after prefill"] += 1
                else:
                    reasons["unexplained"] += 1
            last_seen[row.request] = (number, row.prefill)
    return reasons
