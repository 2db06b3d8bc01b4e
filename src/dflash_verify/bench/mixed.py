"""Mixed-batch probe: ordinary and guided requests that provably decode together.

An ordinary stream runs three times: alone, beside ordinary companions and beside guided ones that ask the same. The
second run is the control: a companion costs something whatever it is, and only the rest is the price of the grammar.
"Together" is counted only between the companion's first and last token, while the ordinary stream emitted before and
after; a probe whose overlap is too short fails, it does not report.
"""

import asyncio
import bisect
import json
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dflash_verify.bench.endpoint import Endpoint, Snapshot, Stream, by_width
from dflash_verify.bench.errors import BenchError
from dflash_verify.bench.stats import Effect, effect
from dflash_verify.bench.summary import json_problem
from dflash_verify.bench.workloads import Workload, stream_seed, text_sha256

PHASES = ("alone", "ordinary companion", "guided companion")


@dataclass(frozen=True, slots=True)
class MixedOptions:
    """lead_tokens: what the ordinary stream has emitted before a companion is sent.

    The probe passes when every guided repeat overlaps for at least min_overlap_s or min_overlap_steps.
    """

    repeats: int = 6
    lead_tokens: int = 16
    min_overlap_s: float = 5.0
    min_overlap_steps: int = 50
    sample_s: float = 0.2
    seed: int = 0


@dataclass(frozen=True, slots=True)
class PhaseFigures:
    """One repeat of one phase.

    overlap_steps: chunks of the ordinary stream inside the overlap. A step gives the stream at most one chunk, and the
    front end may join two, so this many steps at least were shared.
    ordinary_tok_s: of the ordinary stream, inside the overlap (alone: from first to last token).
    widths: steps by verify width between the first and last sample inside each overlap, from the plugin's counters.
    """

    phase: str
    repeat: int
    companions: int
    overlap_s: float
    overlap_steps: int
    ordinary_tok_s: float
    widths: dict[int, float]
    json_valid: int
    json_invalid: tuple[str, ...]
    cut_off: int
    ordinary_end: str
    ordinary_sha256: str


@dataclass(frozen=True, slots=True)
class MixedResult:
    """All repeats, the verdict, and why it fails (empty: passed).

    companion: the ordinary stream's rate beside an ordinary companion / alone; grammar: beside a guided companion /
    beside an ordinary one. Pairs are repeats.
    """

    phases: tuple[PhaseFigures, ...]
    companion: Effect | None
    grammar: Effect | None
    mean_width_ordinary: float | None
    mean_width_guided: float | None
    problems: tuple[str, ...]
    records: tuple[dict[str, Any], ...]
    guided: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


async def probe(endpoint: Endpoint, ordinary: Workload, guided: Workload, options: MixedOptions) -> MixedResult:
    """Run all phases; the order alternates per repeat."""
    if guided.json_schema is None:
        raise BenchError(f"Workload {guided.name!r} has no schema; the probe needs a guided one.")
    phases: list[PhaseFigures] = []
    records: list[dict[str, Any]] = []
    # Compile both kinds of request before anything is timed.
    short = ordinary.model_copy(update={"max_tokens": min(ordinary.max_tokens, 4 * options.lead_tokens)})
    await _phase(endpoint, short, guided, options, "guided companion", repeat=-1)
    for repeat in range(options.repeats):
        for phase in PHASES[::-1] if repeat % 2 else PHASES:
            main, companions, samples = await _phase(endpoint, ordinary, guided, options, phase, repeat)
            phases.append(_figures(phase, repeat, main, companions, samples, guided))
            records.append(
                {
                    "phase": phase,
                    "repeat": repeat,
                    "ordinary": asdict(main),
                    "companions": [asdict(c) for c in companions],
                }
            )
    return _judge(phases, records, options, guided)


async def _phase(
    endpoint: Endpoint, ordinary: Workload, guided: Workload, options: MixedOptions, phase: str, repeat: int
) -> tuple[Stream, list[Stream], list[Snapshot]]:
    await endpoint.wait_idle()
    led = asyncio.Event()
    # Grammar-free companions ask the same for the same number of tokens.
    companion = guided if phase == "guided companion" else guided.model_copy(update={"json_schema": None})
    samples: list[Snapshot] = []

    def on_tokens(_: float, tokens: int) -> None:
        if tokens >= options.lead_tokens:
            led.set()

    async def sample() -> None:
        while True:
            samples.append(await endpoint.snapshot())
            await asyncio.sleep(options.sample_s)

    seed = stream_seed(options.seed, ordinary.name, 0, 0, repeat, 0)
    main_task = asyncio.create_task(
        # The stream must last: an end that the model chooses would shorten the overlap, not change what a step costs.
        endpoint.stream(
            {**ordinary.body(0, seed), "ignore_eos": True}, cache_salt=uuid.uuid4().hex, on_tokens=on_tokens
        )
    )
    sampler = asyncio.create_task(sample())
    companions: list[Stream] = []
    try:
        if phase != "alone":
            led_task = asyncio.create_task(led.wait())
            await asyncio.wait({main_task, led_task}, return_when=asyncio.FIRST_COMPLETED)
            led_task.cancel()
            while led.is_set() and not main_task.done():
                number = len(companions)
                body = companion.body(
                    companion.prompt_index(0, number, 0),
                    stream_seed(options.seed, guided.name, 0, 0, repeat, number),
                )
                companions.append(await endpoint.stream(body, cache_salt=uuid.uuid4().hex))
                if companions[-1].error:
                    break
        main = await main_task
    finally:
        sampler.cancel()
        main_task.cancel()
        await asyncio.gather(sampler, main_task, return_exceptions=True)
    for name, stream in [("ordinary", main), *((f"companion {i}", c) for i, c in enumerate(companions))]:
        if stream.error:
            raise BenchError(f"The {name} request of phase {phase!r} failed: {stream.error}.")
    return main, companions, samples


def span(stream: Stream) -> tuple[float, float]:
    """Unix seconds of the first and the last token."""
    return (
        stream.sent_unix_s + stream.events[0][0] / 1000,
        stream.sent_unix_s + stream.events[-1][0] / 1000,
    )


def overlaps(main: Stream, companions: Sequence[Stream]) -> list[tuple[float, float]]:
    """Intervals of unix seconds in which the main stream and a companion were both between first and last token."""
    first, last = span(main)
    found = []
    for companion in companions:
        start, end = span(companion)
        start, end = max(start, first), min(end, last)
        if end > start:
            found.append((start, end))
    return found


def _figures(
    phase: str,
    repeat: int,
    main: Stream,
    companions: list[Stream],
    samples: list[Snapshot],
    guided: Workload,
) -> PhaseFigures:
    windows = [span(main)] if phase == "alone" else overlaps(main, companions)
    times = [main.sent_unix_s + ms / 1000 for ms, _ in main.events]
    counts = [tokens for _, tokens in main.events]
    steps = tokens = 0
    widths: dict[int, float] = {}
    for start, end in windows:
        low, high = bisect.bisect_right(times, start), bisect.bisect_right(times, end)
        if high > low:
            steps += high - low
            tokens += counts[high - 1] - (counts[low - 1] if low else 0)
        inside = [s for s in samples if start <= s.unix_s <= end]
        if len(inside) > 1:
            for width, n in by_width(inside[-1].steps, inside[0].steps).items():
                widths[width] = widths.get(width, 0) + n
    overlap_s = sum(end - start for start, end in windows)
    schema = guided.schema_object
    assert schema is not None
    checked = [c for c in companions if phase == "guided companion" and c.finish_reason == "stop"]
    broken = [problem for c in checked if (problem := json_problem(c.text, schema)) is not None]
    return PhaseFigures(
        phase=phase,
        repeat=repeat,
        companions=len(companions),
        overlap_s=0.0 if phase == "alone" else overlap_s,
        overlap_steps=0 if phase == "alone" else steps,
        ordinary_tok_s=tokens / overlap_s if overlap_s else 0.0,
        widths=dict(sorted(widths.items())),
        json_valid=len(checked) - len(broken),
        json_invalid=tuple(broken),
        cut_off=sum(phase == "guided companion" and c.finish_reason != "stop" for c in companions),
        ordinary_end=f"{main.completion_tokens} tokens ({main.finish_reason})",
        ordinary_sha256=main.text_sha256,
    )


def _judge(
    phases: list[PhaseFigures], records: list[dict[str, Any]], options: MixedOptions, guided_workload: Workload
) -> MixedResult:
    problems = []
    guided = [p for p in phases if p.phase == "guided companion"]
    for p in phases:
        if p.phase == "alone":
            continue
        if p.overlap_s < options.min_overlap_s and p.overlap_steps < options.min_overlap_steps:
            problems.append(
                f"{p.phase}, repeat {p.repeat}: together for {p.overlap_s:.1f} s and {p.overlap_steps} steps, needed "
                f"{options.min_overlap_s:g} s or {options.min_overlap_steps} steps. The ordinary stream ended after "
                f"{p.ordinary_end}; raise --max-tokens or ask for a text that does not end (--ordinary)."
            )
    for p in guided:
        if p.json_invalid:
            problems.append(f"repeat {p.repeat}: {len(p.json_invalid)} guided answers are invalid: {p.json_invalid[0]}")
        if not p.json_valid:
            problems.append(
                f"repeat {p.repeat}: no guided answer was complete and valid ({p.cut_off} cut off at the token limit)."
            )

    def cost(phase: str, base: str) -> Effect | None:
        rates = {(p.phase, p.repeat): p.ordinary_tok_s for p in phases if p.ordinary_tok_s}
        pairs = [
            (rates[phase, repeat], rates[base, repeat])
            for repeat in range(options.repeats)
            if (phase, repeat) in rates and (base, repeat) in rates
        ]
        return effect(pairs, [])

    def width(phase: str) -> float | None:
        steps: dict[int, float] = {}
        for p in phases:
            if p.phase == phase:
                for w, n in p.widths.items():
                    steps[w] = steps.get(w, 0) + n
        return sum(w * n for w, n in steps.items()) / sum(steps.values()) if steps else None

    alone, companion, with_guided = PHASES
    return MixedResult(
        phases=tuple(phases),
        companion=cost(companion, alone),
        grammar=cost(with_guided, companion),
        mean_width_ordinary=width("ordinary companion"),
        mean_width_guided=width("guided companion"),
        problems=tuple(problems),
        records=tuple(records),
        guided=guided_workload.model_dump(by_alias=True),
    )


def recompute(mixed: dict[str, Any]) -> list[str]:
    """What in a mixed.json does not follow from its raw streams; empty when all does.

    Widths are counted by the server while it runs and cannot be recomputed.
    """
    guided = Workload.model_validate(mixed["guided"])
    findings = []
    for told, record in zip(mixed["phases"], mixed["records"], strict=True):
        main = Stream(**record["ordinary"])
        companions = [Stream(**c) for c in record["companions"]]
        where = f"mixed.json: {record['phase']}, repeat {record['repeat'] + 1}"
        if any(s.text_sha256 != text_sha256(s.text) for s in (main, *companions)):
            findings.append(f"{where}: a text does not have the hash it was recorded with.")
        found = asdict(_figures(record["phase"], record["repeat"], main, companions, [], guided))
        findings += [
            f"{where}: {key} is {told[key]}, the records give {value}."
            for key, value in json.loads(json.dumps(found)).items()
            if key != "widths" and told[key] != value
        ]
    return findings
