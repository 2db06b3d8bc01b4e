"""Settings + engine facts -> widths, vLLM schedule, capture sizes. Pure: the same input gives the same plan in every
front end, API server process, worker and headless node, and `Plan.digest` lets a launcher see that it did."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from dflash_verify import __version__
from dflash_verify.settings import Settings, SettingsError

DEFAULT_WIDTHS = (1, 3, 5, 7)
# Every request count up to here gets graphs of its own; above it, vLLM's own request grid. Padding 33 requests to 40
# costs a fifth of a step once, padding 3 to 4 a third, and every count up to 256 would mean 768 graphs for three widths.
DENSE_REQUESTS = 32
# Per FULL graph, for the estimate that `plan` prints: one H200, graphs of four widths against those of one (docs/results.md,
# "Start-up"). The activations of the largest graph come on top and do not depend on the widths.
# Seconds and MiB, by what `Plan.estimates` appends to its names.
GRAPH_COST = {"": (0.045, 1.3), "_hybrid": (0.24, 10.6)}  # Qwen3-8B shape; GDN hybrid of 48 layers


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What the planner must know of an engine.

    draft_width: N, tokens proposed per request and step.
    max_num_seqs: request slots.
    draft_query_len: rows per request in the drafter's pass: N + 1 for DFlash and DFlash2, N or N + 1 for DSpark.
    max_num_batched_tokens: tokens per step at most (None: not known; vLLM drops capture sizes above it).
    user_capture_sizes: the operator's own list, which wins (None: none given).
    plain_decoding: whether this release leaves out the drafter's pass at K = 0, as vLLM does from 0.33 on.
    """

    draft_width: int
    max_num_seqs: int
    draft_query_len: int
    max_num_batched_tokens: int | None = None
    user_capture_sizes: tuple[int, ...] | None = None
    plain_decoding: bool = True


@dataclass(frozen=True, slots=True)
class GraphCount:
    """Graphs that vLLM will capture: one FULL decode graph per width and request count, the drafter's own, and one
    piecewise graph per capture size (mixed batches)."""

    target: dict[int, int]
    draft: int
    piecewise: int

    @property
    def total(self) -> int:
        return sum(self.target.values()) + self.draft + self.piecewise


@dataclass(frozen=True)
class Plan:
    """What will be verified and captured. `schedule` is vLLM's `num_speculative_tokens_per_batch_size`: it names every
    captured width once; which width a step gets is decided by the scheduler, not by the ranges."""

    mode: str  # DFLASH_VERIFY_TOKENS as text: "3", "auto", "auto:1,3,7"
    draft_width: int
    widths: tuple[int, ...]
    schedule: tuple[tuple[int, int, int], ...]
    capture_sizes: tuple[int, ...]
    graphs: GraphCount
    max_num_seqs: int
    sizes_are_ours: bool = True  # False: the operator gave the list
    notes: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """12 hex digits over everything that all ranks must agree on."""
        return digest(self.mode, self.draft_width, self.widths, self.capture_sizes, self.max_num_seqs)

    def as_json(self) -> dict[str, Any]:
        """The object that `dflash-verify plan --json` prints."""
        graphs = asdict(self.graphs) | {"total": self.graphs.total} | self.estimates
        return {
            "mode": self.mode,
            "draft_width": self.draft_width,
            "widths": list(self.widths),
            "schedule": [list(entry) for entry in self.schedule],
            "capture_sizes": list(self.capture_sizes),
            "graphs": graphs,
            "digest": self.digest,
            "notes": list(self.notes),
        }

    @property
    def estimates(self) -> dict[str, float]:
        """What capturing all graphs may take, on a dense model of 8B and on a GDN hybrid of 48 layers: `seconds`, `gib` of
        device memory, `seconds_hybrid`, `gib_hybrid`."""
        total, found = self.graphs.total, {}
        for model, (seconds, mib) in GRAPH_COST.items():
            found[f"seconds{model}"] = round(total * seconds, 1)
            found[f"gib{model}"] = round(total * mib / 1024, 2)
        return found


def digest(
    mode: str,
    draft_width: int,
    widths: Sequence[int],
    capture_sizes: Sequence[int],
    max_num_seqs: int,
    verification: str = "standard",
) -> str:
    """12 hex digits; every rank computes it from the configuration that it really runs with.

    mode: DFLASH_VERIFY_TOKENS as text. verification: vLLM's `rejection_sample_method`.
    """
    agreed = [__version__, mode, draft_width, list(widths), list(capture_sizes), max_num_seqs, verification]
    return hashlib.sha256(json.dumps(agreed).encode()).hexdigest()[:12]


def make_plan(settings: Settings, facts: EngineFacts) -> Plan:
    """The plan for an active width.

    Raises SettingsError when a listed width exceeds N, or when the graph budget cannot hold even full width.
    """
    wanted = settings.verify_tokens
    widths = _widths(settings, facts)
    notes = _without_effect(settings) + _plain_decoding_saves_little(settings, facts)
    if facts.user_capture_sizes is not None:
        sizes = tuple(sorted({size for size in facts.user_capture_sizes if size > 0}))
        notes += _uncovered(sizes, widths, facts)
        plan = _plan(str(wanted), widths, sizes, facts)
    else:
        plan, note = _within_budget(settings, facts, widths)
        notes += note
        notes += _beyond_token_budget(facts, widths)
    return replace(plan, notes=tuple(notes), sizes_are_ours=facts.user_capture_sizes is None)


def _without_effect(settings: Settings) -> list[str]:
    """What was set for an automatic width, and a static one never reads."""
    if settings.verify_tokens.mode == "auto":
        return []
    # A control file may say auto later; nothing is measured at start for it.
    of_auto = ["profile_seconds"] if settings.control_file else ["cost_table", "estimator", "profile_seconds"]
    unread = [
        f"DFLASH_{name.upper()}" for name in of_auto if name in settings.model_fields_set and getattr(settings, name)
    ]
    if not unread:
        return []
    return [
        f"DFLASH_VERIFY_TOKENS={settings.verify_tokens} is a static width, which reads no {' or '.join(unread)}: "
        "set it to auto, or unset what it does not read"
    ]


def _plain_decoding_saves_little(settings: Settings, facts: EngineFacts) -> list[str]:
    if 0 not in settings.verify_tokens.widths or facts.plain_decoding:
        return []
    return [
        f"DFLASH_VERIFY_TOKENS={settings.verify_tokens} lists width 0, at which vLLM before 0.33 runs the drafter all the same: "
        "leave it out, it saves little there"
    ]


def _widths(settings: Settings, facts: EngineFacts) -> tuple[int, ...]:
    wanted, n = settings.verify_tokens, facts.draft_width
    if wanted.mode == "stock":
        raise SettingsError(
            "DFLASH_VERIFY_TOKENS is unset or 0, which is stock vLLM and has no plan: set it to a width or to auto."
        )
    too_wide = [width for width in wanted.widths if width > n]
    if too_wide:
        raise SettingsError(
            f"DFLASH_VERIFY_TOKENS={wanted} asks to verify {too_wide[-1]} tokens but the drafter proposes {n}: "
            f"set it to {f'1 to {n}' if n > 1 else '1'}, auto, or 0 for stock vLLM."
        )
    if wanted.mode == "static":
        return wanted.widths
    chosen = wanted.widths or tuple(width for width in DEFAULT_WIDTHS if width < n)
    return tuple(sorted({*chosen, n}))


def _within_budget(settings: Settings, facts: EngineFacts, widths: tuple[int, ...]) -> tuple[Plan, list[str]]:
    """Coarsen the request grid first, then drop widths (N and the operator's static width always stay)."""
    budget = settings.max_graphs
    if budget is None:
        return _plan(str(settings.verify_tokens), widths, _capture_sizes(widths, facts, DENSE_REQUESTS), facts), []
    wanted = settings.verify_tokens
    candidates = [widths]
    # A narrow width carries most of the gain and the middle ones least, so the middle goes first: 1,3,5,7 -> 1,3,7.
    droppable = list(widths[:-1]) if wanted.mode == "auto" and not wanted.widths else []
    for width in sorted(droppable, key=lambda k: (-k, k)):
        if len(candidates[-1]) > 1:
            candidates.append(tuple(k for k in candidates[-1] if k != width))
    smallest = None
    for kept in candidates:
        for dense in (DENSE_REQUESTS, 16, 8, 4, 0):
            plan = _plan(str(wanted), kept, _capture_sizes(kept, facts, dense), facts)
            if plan.graphs.total <= budget:
                return plan, _budget_note(widths, kept, dense, budget, facts)
            if smallest is None or plan.graphs.total < smallest:
                smallest = plan.graphs.total
    raise SettingsError(
        f"DFLASH_MAX_GRAPHS={budget} is less than the {smallest} graphs that width {wanted} needs at "
        f"{facts.max_num_seqs} request slots: raise it to {smallest} or more, list fewer widths, or unset it."
    )


def _budget_note(
    widths: tuple[int, ...], kept: tuple[int, ...], dense: int, budget: int, facts: EngineFacts
) -> list[str]:
    if kept != widths:
        gone = ", ".join(str(k) for k in widths if k not in kept)
        return [f"a budget of {budget} graphs leaves out width {gone}; DFLASH_MAX_GRAPHS raises it"]
    if dense < min(DENSE_REQUESTS, facts.max_num_seqs):
        return [
            f"a budget of {budget} graphs pads request counts above {dense} to the next captured one; "
            "DFLASH_MAX_GRAPHS raises it"
        ]
    return []


def request_counts(max_num_seqs: int, dense: int = DENSE_REQUESTS) -> tuple[int, ...]:
    """Request counts that get graphs: every one up to `dense`, then vLLM's grid (1, 2, 4, then step 8, from 256 step
    16), and `max_num_seqs` itself."""
    grid = {1, 2, 4, *range(1, dense + 1), *range(8, 256, 8), *range(256, max_num_seqs + 1, 16), max_num_seqs}
    return tuple(sorted(n for n in grid if n <= max_num_seqs))


def _query_lens(widths: Iterable[int], facts: EngineFacts) -> tuple[int, ...]:
    """Rows per request of every uniform pass that needs graphs: target at each width, and the drafter."""
    return tuple(sorted({*(width + 1 for width in widths), facts.draft_query_len}))


def _stock_sizes(facts: EngineFacts) -> set[int]:
    """vLLM's own default grid for mixed batches: 1, 2, 4, then step 8, from 256 step 16, up to 2 (N + 1) tokens per
    request slot and at most 512 (`VllmConfig._set_cudagraph_sizes`)."""
    top = min(2 * facts.max_num_seqs * (facts.draft_width + 1), 512)
    return {size for size in (1, 2, 4, *range(8, 256, 8), *range(256, top + 1, 16)) if size <= top}


def _capture_sizes(widths: Iterable[int], facts: EngineFacts, dense: int) -> tuple[int, ...]:
    sizes = _stock_sizes(facts)
    for query_len in _query_lens(widths, facts):
        sizes |= {n * query_len for n in request_counts(facts.max_num_seqs, dense)}
    top = facts.max_num_batched_tokens
    return tuple(sorted(size for size in sizes if top is None or size <= top))


def _graphed_requests(sizes: Sequence[int], query_len: int, facts: EngineFacts) -> set[int]:
    """Request counts with a FULL graph of `query_len` rows each: vLLM rounds every capture size up to a multiple of
    the query length and keeps those that fit the slots and the largest size."""
    if not sizes:
        return set()
    counts = {-(-size // query_len) for size in sizes}
    return {n for n in counts if n <= facts.max_num_seqs and n * query_len <= sizes[-1]}


def _plan(mode: str, widths: tuple[int, ...], sizes: tuple[int, ...], facts: EngineFacts) -> Plan:
    # One batch size per width; vLLM carries the last width through all larger batches, so no slot count is needed.
    # N last: should a wrapper ever be missing, batches run at full width.
    schedule = tuple((i, i, width) for i, width in enumerate(widths, 1))
    graphs = GraphCount(
        target={width: len(_graphed_requests(sizes, width + 1, facts)) for width in widths},
        draft=len(_graphed_requests(sizes, facts.draft_query_len, facts)),
        piecewise=len(sizes),
    )
    return Plan(mode, facts.draft_width, widths, schedule, sizes, graphs, facts.max_num_seqs)


def _uncovered(sizes: tuple[int, ...], widths: tuple[int, ...], facts: EngineFacts) -> list[str]:
    """What the operator's own list leaves without FULL graphs, said once."""
    notes = []
    for who, query_len in [(f"width {width}", width + 1) for width in widths] + [
        ("the drafter", facts.draft_query_len)
    ]:
        graphed = _graphed_requests(sizes, query_len, facts)
        largest = max(graphed, default=0)
        if largest < facts.max_num_seqs:
            notes.append(
                f"your capture sizes leave {who} without FULL graphs above {largest} of {facts.max_num_seqs} requests "
                f"(add {query_len * facts.max_num_seqs})"
            )
    return notes


def _beyond_token_budget(facts: EngineFacts, widths: tuple[int, ...]) -> list[str]:
    top = facts.max_num_batched_tokens
    if top is None:
        return []
    passes = [(f"width {width}", width + 1) for width in widths] + [("the drafter", facts.draft_query_len)]
    return [
        f"{facts.max_num_seqs} requests of {query_len} rows exceed max_num_batched_tokens={top}: {who} runs without FULL "
        f"graphs above {top // query_len} requests"
        for who, query_len in passes
        if facts.max_num_seqs * query_len > top
    ]
