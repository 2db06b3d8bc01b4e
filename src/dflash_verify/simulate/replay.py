"""Replays a trace against a cost table and a policy, step by step, with the scheduler's delays."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dflash_verify.simulate.policies import Policy
from dflash_verify.simulate.trace import Trace, TraceError
from dflash_verify.width.cost import CostTable


@dataclass(frozen=True)
class StepNoise:
    """Error of the step times that a policy sees; the clock itself is exact.

    percent: standard deviation of a lognormal factor. spikes: share of steps that seem to take three times as long.
    """

    percent: float = 0.0
    spikes: float = 0.01
    seed: int = 0
    SPIKE = 3.0

    def factors(self, rng: np.random.Generator, count: int) -> list[float]:
        sigma = self.percent / 100.0
        factor = np.exp(sigma * rng.standard_normal(count))
        factor[rng.random(count) < self.spikes] *= self.SPIKE
        return [float(f) for f in factor]


@dataclass
class Result:
    """ms: the clock when the last request ended, idle time included. widths: of every step, in order."""

    policy: str
    tokens: int = 0
    ms: float = 0.0
    idle_ms: float = 0.0
    widths: list[int] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    starts_ms: list[float] = field(default_factory=list)
    request_tok_s: dict[str, float] = field(default_factory=dict)

    @property
    def tok_s(self) -> float:
        return 1000.0 * self.tokens / self.ms if self.ms else 0.0

    def steps(self, widths: tuple[int, ...]) -> dict[int, int]:
        return {width: self.widths.count(width) for width in widths}

    def to_json(self, widths: tuple[int, ...]) -> dict[str, Any]:
        return {
            "policy": self.policy,
            "tokens": self.tokens,
            "ms": round(self.ms, 3),
            "idle_ms": round(self.idle_ms, 3),
            "tok_s": round(self.tok_s, 4),
            "steps": {str(width): count for width, count in self.steps(widths).items()},
            "requests": {name: round(rate, 4) for name, rate in self.request_tok_s.items()},
        }


def replay(
    trace: Trace, cost: CostTable, policy: Policy, *, name: str = "", delay: int = 1, noise: StepNoise | None = None
) -> Result:
    """Serve the trace.

    Policies that decide ahead run their first step at full width; while step s is scheduled they know what steps up to
    s - delay have shown and choose the width of step s + 1.

    Raises TraceError, naming the request, when an acceptance list runs out.
    """
    order = sorted(range(len(trace.requests)), key=lambda i: trace.requests[i].arrive_ms)
    requests = [trace.requests[i] for i in order]
    accepts = np.concatenate([r.accepts for r in requests])
    ends = np.cumsum([len(r.accepts) for r in requests])
    begins = ends - [len(r.accepts) for r in requests]
    arrivals = [r.arrive_ms for r in requests]
    at = begins.copy()  # next draw per request
    left = np.array([r.tokens for r in requests], dtype=np.intp)
    ids = [r.id for r in requests]
    guided = [r.guided for r in requests]
    admitted_ms = [0.0] * len(requests)
    result = Result(name)
    rng = np.random.default_rng(noise.seed if noise else 0)
    factors: list[float] = []
    pending: deque[tuple[list[str], int, list[int], float]] = deque()
    waiting = 0  # next request not yet admitted
    running: list[int] = []
    rows = np.empty(0, dtype=np.intp)
    run_ids: list[str] = []
    run_guided: list[bool] = []
    next_width = trace.draft_width
    now = 0.0
    while waiting < len(requests) or running:
        changed = False
        while waiting < len(requests) and len(running) < trace.max_num_seqs and arrivals[waiting] <= now:
            running.append(waiting)
            admitted_ms[waiting] = now
            waiting += 1
            changed = True
        if not running:
            result.idle_ms += arrivals[waiting] - now
            now = arrivals[waiting]
            continue
        if changed or len(running) != len(rows):
            rows = np.array(running, dtype=np.intp)
            run_ids = [ids[i] for i in running]
            run_guided = [guided[i] for i in running]
        place = at[rows]
        short = place >= ends[rows]
        if short.any():
            which = requests[running[int(np.argmax(short))]]
            raise TraceError(
                f"request {which.id!r} has {len(which.accepts)} accepts, too few for its {which.tokens} tokens at these "
                "widths; extend the list"
            )
        draws = accepts[place]
        while len(pending) >= delay:
            policy.observe(*pending.popleft())
        decided = policy.decide(run_ids, run_guided, draws.tolist())
        width, next_width = (next_width, decided) if policy.ahead else (decided, decided)
        step_ms = cost.step_ms(len(running), width)
        accepted = np.minimum(draws, width)
        result.tokens += int(np.minimum(accepted + 1, left[rows]).sum())
        at[rows] = place + 1
        left[rows] -= accepted + 1
        result.widths.append(width)
        result.batches.append(len(running))
        result.starts_ms.append(now)
        now += step_ms
        seen_ms = step_ms
        if noise is not None:
            if not factors:
                factors = noise.factors(rng, 1024)
            seen_ms *= factors.pop()
        pending.append((run_ids, width, accepted.tolist(), seen_ms))
        ended = [i for i in running if left[i] <= 0]
        if ended:
            for i in ended:
                if now == admitted_ms[i]:
                    raise TraceError(
                        f"request {ids[i]!r} ran at {now:g} ms, where a step of {step_ms:g} ms is too short for the clock"
                    )
                result.request_tok_s[ids[i]] = 1000.0 * requests[i].tokens / (now - admitted_ms[i])
            if delay == 1:  # the end is known with what the step has shown
                while pending:
                    policy.observe(*pending.popleft())
            policy.forget([ids[i] for i in ended])
            gone = set(ended)
            running = [i for i in running if i not in gone]
            rows = rows[:0]
    result.ms = now
    return result
