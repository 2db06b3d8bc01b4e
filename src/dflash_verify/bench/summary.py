"""Aggregates of the records: pure functions of manifest and records, so that an audit can repeat them."""

import itertools
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dflash_verify.bench.endpoint import Snapshot, by_position, by_width, snapshot_from_json
from dflash_verify.bench.records import Cell
from dflash_verify.bench.stats import Effect, Interval, effect, interval, weighted_percentile
from dflash_verify.bench.workloads import Workload


@dataclass(frozen=True, slots=True)
class RunFigures:
    """What one run measured.

    tok_s: tokens of all streams / (last chunk - first request sent), time to first token included.
    stream_tok_s: median over the streams of tokens after the first chunk / time after the first chunk.
    inter_token_ms: time per token between chunks, each chunk weighted with its tokens; pause_p99_ms: the 99th
    percentile of the time between chunks, what a reader sees as a pause.
    mean_width: verify width per step; from the plugin's steps if exported, else vLLM's draft tokens / drafts, which is
    lower when a grammar ruled out drafts.
    tokens_per_step: emitted tokens per request and verify step, 1 + accepted / drafts.
    step_ms: by width, from the plugin's timed steps.
    """

    tok_s: float
    stream_tok_s: float
    ttft_ms: float
    inter_token_p50_ms: float | None
    inter_token_p99_ms: float | None
    pause_p99_ms: float | None
    tokens: int
    tokens_per_step: float | None
    mean_width: float | None
    steps: dict[int, float]
    step_ms: dict[int, float]
    accepted: tuple[float, ...]
    verified: tuple[float, ...]
    drafts: float | None
    length_hits: int
    prefix_hits: float
    json_valid: int | None


def run_figures(run: dict[str, Any], requests: Sequence[dict[str, Any]], schema: dict[str, Any] | None) -> RunFigures:
    before, after = snapshot_from_json(run["before"]), snapshot_from_json(run["after"])
    tokens = sum(r["completion_tokens"] for r in requests)
    first_s = min(r["sent_unix_s"] for r in requests)
    last_s = max(r["sent_unix_s"] + r["events"][-1][0] / 1000 for r in requests)
    gaps: list[float] = []
    per_token: list[float] = []
    weights: list[float] = []
    rates: list[float] = []
    for r in requests:
        events = r["events"]
        for (t0, n0), (t1, n1) in itertools.pairwise(events):
            gaps.append(t1 - t0)
            per_token.append((t1 - t0) / (n1 - n0))
            weights.append(n1 - n0)
        if len(events) > 1:
            rates.append((events[-1][1] - events[0][1]) / (events[-1][0] - events[0][0]) * 1000)
    drafts = None if after.drafts is None else after.drafts - (before.drafts or 0)
    accepted_tokens = None if after.accepted_tokens is None else after.accepted_tokens - (before.accepted_tokens or 0)
    texts = [r["text"] for r in requests]
    return RunFigures(
        tok_s=tokens / (last_s - first_s),
        stream_tok_s=statistics.median(rates) if rates else math.nan,
        ttft_ms=statistics.median(r["events"][0][0] for r in requests),
        inter_token_p50_ms=weighted_percentile(per_token, weights, 0.50),
        inter_token_p99_ms=weighted_percentile(per_token, weights, 0.99),
        pause_p99_ms=weighted_percentile(gaps, [1.0] * len(gaps), 0.99),
        tokens=tokens,
        tokens_per_step=1 + accepted_tokens / drafts if drafts and accepted_tokens is not None else None,
        mean_width=mean_width(before, after),
        steps=by_width(after.steps, before.steps),
        step_ms=step_ms(before, after),
        accepted=by_position(after.accepted, before.accepted),
        verified=by_position(after.verified, before.verified),
        drafts=drafts,
        length_hits=sum(r["finish_reason"] == "length" for r in requests),
        prefix_hits=after.prefix_hits - before.prefix_hits,
        json_valid=None if schema is None else sum(json_problem(text, schema) is None for text in texts),
    )


def mean_width(before: Snapshot, after: Snapshot) -> float | None:
    """Verify width per decoding step between two snapshots; None when nothing was drafted."""
    steps = by_width(after.steps, before.steps)
    if steps:
        return sum(width * n for width, n in steps.items()) / sum(steps.values())
    drafts = (after.drafts or 0) - (before.drafts or 0)
    return ((after.draft_tokens or 0) - (before.draft_tokens or 0)) / drafts if drafts else None


def step_ms(before: Snapshot, after: Snapshot) -> dict[int, float]:
    """Mean duration of the timed steps by width."""
    seconds = by_width(after.step_seconds, before.step_seconds)
    timed = by_width(after.timed_steps, before.timed_steps)
    return {width: 1000 * seconds[width] / n for width, n in timed.items() if width in seconds}


def json_problem(text: str, schema: dict[str, Any]) -> str | None:
    """None if the text is JSON and fits the schema, else why not."""
    import jsonschema  # type: ignore[import-untyped]

    try:
        jsonschema.validate(json.loads(text), schema)
    except ValueError as error:
        return f"not JSON: {error}"
    except jsonschema.ValidationError as error:
        return f"does not fit the schema: {error.message}"
    return None


@dataclass(frozen=True, slots=True)
class Row:
    """One arm on one workload at one concurrency: medians over its runs, with intervals where a claim rests on them."""

    arm: str
    workload: str
    concurrency: int
    max_num_seqs: int
    runs: int
    tok_s: Interval | None
    stream_tok_s: Interval | None
    ttft_ms: Interval | None
    inter_token_p50_ms: float | None
    inter_token_p99_ms: float | None
    pause_p99_ms: float | None
    tokens_per_step: Interval | None
    mean_width: float | None
    width_source: str
    steps: dict[int, float]
    step_ms: dict[int, float]
    acceptance: tuple[float | None, ...]
    accepted: tuple[float, ...]
    verified: tuple[float, ...]
    length_hits: int
    requests: int
    prefix_hits: float
    json_valid: int | None
    text_hashes: dict[str, str]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One arm against the baseline of its bracket on one workload at one concurrency.

    texts: "equal" or which differ (temperature 0 only), else "sampled".
    """

    arm: str
    baseline: str
    workload: str
    concurrency: int
    max_num_seqs: int
    effect: Effect
    texts: str


@dataclass(frozen=True, slots=True)
class Summary:
    rows: tuple[Row, ...]
    comparisons: tuple[Comparison, ...]
    max_drift: float | None
    broken_attempts: int
    gpu: dict[str, Any] | None

    def as_json(self) -> dict[str, Any]:
        """As it is in summary.json: integer keys become text."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self), allow_nan=True))
        return plain


def counted_runs(
    records: Sequence[dict[str, Any]],
) -> list[tuple[Cell, dict[str, Any], list[dict[str, Any]]]]:
    """(cell, run record, its request records by stream) of every run that counts, in the order they were made."""
    requests: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        if record["kind"] == "request":
            requests[record["run"], record["attempt"]].append(record)
    counted = []
    for record in records:
        if record["kind"] == "run" and not record["problems"]:
            own = sorted(requests[record["run"], record["attempt"]], key=lambda r: r["stream"])
            counted.append((Cell(**record["cell"]), record, own))
    return counted


def workloads_of(manifest: dict[str, Any]) -> dict[str, Workload]:
    return {w["name"]: Workload.model_validate(w) for w in manifest["workloads"]}


def summarise(manifest: dict[str, Any], records: Sequence[dict[str, Any]]) -> Summary:
    """All aggregates of a run directory."""
    workloads = workloads_of(manifest)
    figures: dict[tuple[str, str, int, int], dict[tuple[int, int, int], RunFigures]] = defaultdict(dict)
    hashes: dict[tuple[str, str, int, int], dict[str, str]] = defaultdict(dict)
    gpu: list[dict[str, Any]] = []
    for cell, run, requests in counted_runs(records):
        group = (cell.arm, cell.workload, cell.concurrency, cell.max_num_seqs)
        workload = workloads[cell.workload]
        figures[group][cell.pair_key] = run_figures(run, requests, workload.schema_object)
        if workload.deterministic:
            for r in requests:
                key = f"p{cell.pass_index}.q{cell.prompt}.r{cell.repeat}.s{r['stream']}"
                hashes[group][key] = r["text_sha256"]
        if run["gpu"] is not None:
            gpu.append(run["gpu"])
    rows = tuple(
        _row(group, list(runs.values()), hashes.get(group, {}))
        for group, runs in sorted(figures.items(), key=_order(manifest))
    )
    comparisons = tuple(_compare(manifest, workloads, figures, hashes))
    drifts = [abs(c.effect.drift.median - 1) for c in comparisons if c.effect.drift is not None]
    return Summary(
        rows=rows,
        comparisons=comparisons,
        max_drift=max(drifts, default=None),
        broken_attempts=sum(r["kind"] == "run" and bool(r["problems"]) for r in records),
        gpu=None
        if not gpu
        else {
            "max_celsius": max(g["max_celsius"] for g in gpu),
            "min_sm_mhz": min((g["min_sm_mhz"] for g in gpu if g["min_sm_mhz"] is not None), default=None),
            "max_sm_mhz": max((g["max_sm_mhz"] for g in gpu if g["max_sm_mhz"] is not None), default=None),
            "throttled": any(g["throttled"] for g in gpu),
        },
    )


def _order(manifest: dict[str, Any]) -> Any:
    arms = [arm["name"] for arm in manifest["arms"]]
    names = [w["name"] for w in manifest["workloads"]]
    return lambda item: (item[0][3], names.index(item[0][1]), item[0][2], arms.index(item[0][0]))


def _sum_positions(runs: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    length = max((len(r) for r in runs), default=0)
    return tuple(sum(r[i] for r in runs if i < len(r)) for i in range(length))


def _median(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.median(known) if known else None


def _row(group: tuple[str, str, int, int], runs: list[RunFigures], text_hashes: dict[str, str]) -> Row:
    steps: dict[int, float] = {}
    time_ms: dict[int, float] = {}
    for run in runs:
        for width, n in run.steps.items():
            steps[width] = steps.get(width, 0) + n
    for width in sorted({w for run in runs for w in run.step_ms}):
        time_ms[width] = statistics.median(run.step_ms[width] for run in runs if width in run.step_ms)
    accepted = _sum_positions([r.accepted for r in runs])
    verified = _sum_positions([r.verified for r in runs])
    drafts = sum(r.drafts or 0 for r in runs)
    # Accepted / verified at each position is only known with the plugin. Without it every draft had all positions.
    tried = verified or tuple(drafts for _ in accepted)
    return Row(
        *group,
        runs=len(runs),
        tok_s=interval([r.tok_s for r in runs]),
        stream_tok_s=interval([r.stream_tok_s for r in runs]),
        ttft_ms=interval([r.ttft_ms for r in runs]),
        inter_token_p50_ms=_median([r.inter_token_p50_ms for r in runs]),
        inter_token_p99_ms=_median([r.inter_token_p99_ms for r in runs]),
        pause_p99_ms=_median([r.pause_p99_ms for r in runs]),
        tokens_per_step=interval([r.tokens_per_step for r in runs if r.tokens_per_step is not None]),
        mean_width=sum(w * n for w, n in steps.items()) / sum(steps.values())
        if steps
        else _median([r.mean_width for r in runs]),
        width_source="plugin" if steps else "vLLM's draft counters",
        steps=steps,
        step_ms=time_ms,
        acceptance=tuple(a / n if n else None for a, n in zip(accepted, tried, strict=True)),
        accepted=accepted,
        verified=verified,
        length_hits=sum(r.length_hits for r in runs),
        requests=len(runs) * group[2],
        prefix_hits=sum(r.prefix_hits for r in runs),
        json_valid=None if runs[0].json_valid is None else sum(r.json_valid or 0 for r in runs),
        text_hashes=text_hashes,
    )


def _compare(
    manifest: dict[str, Any],
    workloads: dict[str, Workload],
    figures: dict[tuple[str, str, int, int], dict[tuple[int, int, int], RunFigures]],
    hashes: dict[tuple[str, str, int, int], dict[str, str]],
) -> list[Comparison]:
    baselines: list[str] = manifest.get("baselines", [])
    if not baselines:
        return []
    first, second = baselines[0], baselines[-1]
    found = []
    for arm in (a["name"] for a in manifest["arms"]):
        if arm == first or (arm == second and first == second):
            continue
        for seqs in manifest["max_num_seqs"] or [0]:
            for workload in workloads.values():
                for concurrency in manifest["concurrency"]:
                    at = (workload.name, concurrency, seqs)
                    own, base, base2 = (figures.get((name, *at), {}) for name in (arm, first, second))
                    keys = sorted(own.keys() & base.keys() & base2.keys())
                    if arm == second:
                        pairs = [(own[k].tok_s, base[k].tok_s) for k in keys]
                    else:
                        pairs = [(own[k].tok_s, (base[k].tok_s + base2[k].tok_s) / 2) for k in keys]
                    drift_keys = sorted(base.keys() & base2.keys()) if first != second else []
                    judged = effect(pairs, [(base2[k].tok_s, base[k].tok_s) for k in drift_keys])
                    if judged is None:
                        continue
                    if arm == second:
                        # The second baseline is the drift; it cannot be faster or slower than itself.
                        judged = Effect(judged.ratio, judged.drift, "drift")
                    texts = _texts(workload, hashes.get((arm, *at), {}), hashes.get((first, *at), {}))
                    found.append(Comparison(arm, first, *at, effect=judged, texts=texts))
    return found


def _texts(workload: Workload, own: dict[str, str], base: dict[str, str]) -> str:
    if not workload.deterministic:
        return "sampled"
    shared = sorted(own.keys() & base.keys())
    different = sum(own[k] != base[k] for k in shared)
    return "equal" if not different else f"{different} of {len(shared)} differ"
