"""How the controller does against every static width, over generated workloads: the numbers behind docs/width.md."""

import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from dflash_verify.simulate.generate import COSTS, PROFILES, trace, wrong_table
from dflash_verify.simulate.policies import Auto
from dflash_verify.simulate.replay import StepNoise, replay
from dflash_verify.simulate.trace import Trace, TraceError
from dflash_verify.width.controller import WidthController
from dflash_verify.width.cost import CostModel, CostTable

BELIEFS = ("exact", "none", "wrong")
NOISE_PERCENT = 10.0


def static_tok_s(work: Trace, cost: CostTable, width: int) -> float:
    """tok/s at one width throughout: what `replay` finds, from request to request instead of step to step."""
    order = sorted(work.requests, key=lambda r: r.arrive_ms)
    need = []  # steps of each request
    for request in order:
        emitted = np.cumsum(np.minimum(request.accepts, width) + 1)
        if emitted[-1] < request.tokens:
            raise TraceError(
                f"request {request.id!r} has {len(emitted)} accepts, too few for its {request.tokens} tokens"
            )
        need.append(int(np.searchsorted(emitted, request.tokens)) + 1)
    running: list[int] = []  # heap of last steps
    waiting = step = 0
    now_ms = 0.0
    while waiting < len(order) or running:
        while waiting < len(order) and len(running) < work.max_num_seqs and order[waiting].arrive_ms <= now_ms:
            heapq.heappush(running, step + need[waiting])
            waiting += 1
        if not running:
            now_ms = order[waiting].arrive_ms
            continue
        step_ms = cost.step_ms(len(running), width)
        steps = running[0] - step
        if waiting < len(order) and len(running) < work.max_num_seqs:
            steps = min(steps, math.ceil((order[waiting].arrive_ms - now_ms) / step_ms))
        now_ms += steps * step_ms
        step += steps
        while running and running[0] == step:
            heapq.heappop(running)
    return 1000.0 * sum(r.tokens for r in order) / now_ms


@dataclass(frozen=True)
class Comparison:
    """tok/s of one workload, one seed. auto: by estimator."""

    cost: str
    max_num_seqs: int
    profile: str
    seed: int
    belief: str
    static: dict[int, float]
    auto: dict[str, float]
    steps: int

    def of_best_static(self, estimator: str = "class") -> float:
        return self.auto[estimator] / max(self.static.values())

    def of_full_width(self, estimator: str = "class") -> float:
        return self.auto[estimator] / self.static[max(self.static)]


def compare(
    cost_name: str,
    max_num_seqs: int,
    profile: str,
    seed: int,
    *,
    belief: str = "exact",
    steps: int = 2000,
    delay: int = 1,
    estimators: Iterable[str] = ("class",),
) -> Comparison:
    """One workload under every static width and under auto.

    belief: the exact table without noise; or, with 10 % noise and 1 % of steps seen tripled, no table or a table wrong by
    30 % per width.
    """
    cost = COSTS[cost_name]
    work = trace(profile, max_num_seqs, steps=steps, seed=seed, cost=cost)
    static = {width: static_tok_s(work, cost, width) for width in cost.widths}
    noise = None if belief == "exact" else StepNoise(NOISE_PERCENT, seed=seed)
    auto: dict[str, float] = {}
    count = 0
    for estimator in estimators:
        table = None if belief == "none" else cost if belief == "exact" else wrong_table(cost, seed)
        model = CostModel(cost.widths, cost.draft_width, table, trusted=belief == "exact")
        policy = Auto(WidthController(cost.widths, cost.draft_width, model, estimator=estimator))
        result = replay(work, cost, policy, delay=delay, noise=noise)
        auto[estimator] = result.tok_s
        count = len(result.widths)
    return Comparison(cost_name, max_num_seqs, profile, seed, belief, static, auto, count)


def sweep(
    settings: Iterable[tuple[str, int]],
    seeds: Iterable[int],
    *,
    belief: str = "exact",
    steps: int = 2000,
    delay: int = 1,
    estimators: Iterable[str] = ("class",),
) -> Iterator[Comparison]:
    """`compare` over every setting, acceptance profile and seed."""
    seeds, estimators = list(seeds), list(estimators)
    for cost_name, max_num_seqs in settings:
        for profile in PROFILES:
            for seed in seeds:
                yield compare(
                    cost_name,
                    max_num_seqs,
                    profile,
                    seed,
                    belief=belief,
                    steps=steps,
                    delay=delay,
                    estimators=estimators,
                )
