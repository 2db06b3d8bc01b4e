"""One self-contained HTML page and one PNG from a run directory."""

import json
from collections import Counter
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from dflash_verify.bench.charts import DARK, LIGHT, charts, png, svg_data_url
from dflash_verify.bench.errors import BenchError
from dflash_verify.bench.records import broken_links, read_manifest, read_records
from dflash_verify.bench.stats import Interval
from dflash_verify.bench.summary import Comparison, Row, Summary, summarise
from dflash_verify.bench.verdict import arm_labels, percent, sentences


def write_report(directory: Path, mixed_file: Path | None = None) -> tuple[Path, Path]:
    """Write report.html and report.png into the run directory; returns both paths.

    mixed_file: result of `dflash-verify mixed`, default mixed.json in the directory if it is there.
    """
    manifest, records = read_manifest(directory), read_records(directory)
    try:
        return _write(directory, mixed_file, manifest, records)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, ZeroDivisionError):
        if broken := broken_links(records):
            raise BenchError(
                f"{directory / 'records.jsonl'}:{broken[0]} was changed after it was written, and no report can be made "
                "of it; `dflash-verify report --audit` names all that does not fit."
            ) from None
        raise


def _write(
    directory: Path, mixed_file: Path | None, manifest: dict[str, Any], records: list[dict[str, Any]]
) -> tuple[Path, Path]:
    summary = summarise(manifest, records)
    if not summary.rows:
        raise BenchError(f"{directory} has no complete run to report; resume the measurement first.")
    mixed_file = mixed_file or directory / "mixed.json"
    mixed = _read_mixed(mixed_file) if mixed_file.exists() else None
    html_path, png_path = directory / "report.html", directory / "report.png"
    drawn = charts(manifest, records, summary)
    html_path.write_text(_html(manifest, records, summary, drawn, mixed), encoding="utf-8")
    verdict = sentences(manifest, summary)
    facts = _facts(records)
    png_path.write_bytes(
        png(drawn, "\n".join(_wrapped(verdict[:4])), f"{facts['model']} on vLLM {facts['version']}, {_day(manifest)}")
    )
    return html_path, png_path


def _read_mixed(path: Path) -> dict[str, Any]:
    """What the page shows of a mixed.json, or BenchError."""
    try:
        mixed: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        _mixed(mixed)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise BenchError(
            f"{path} is not a result of `dflash-verify mixed` ({type(error).__name__}: {error}); measure it again."
        ) from None
    return mixed


def _wrapped(paragraphs: list[str], width: int = 140) -> list[str]:
    import textwrap

    return [line for paragraph in paragraphs for line in textwrap.wrap(paragraph, width)]


def _facts(records: list[dict[str, Any]]) -> dict[str, Any]:
    for record in records:
        if record["kind"] == "visit":
            server: dict[str, Any] = record["server"]
            return server
    return {"model": "?", "version": "?", "max_model_len": None, "root": None}


def _day(manifest: dict[str, Any]) -> str:
    return datetime.fromtimestamp(manifest["created"], UTC).strftime("%Y-%m-%d %H:%M UTC")


def _html(
    manifest: dict[str, Any],
    records: list[dict[str, Any]],
    summary: Summary,
    drawn: list[Any],
    mixed: dict[str, Any] | None,
) -> str:
    import jinja2

    labels = arm_labels(manifest)
    facts = _facts(records)
    verdict = sentences(manifest, summary)
    arms = len({c.arm for c in summary.comparisons if c.effect.verdict != "drift"}) or len(summary.rows)
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string(files("dflash_verify.bench").joinpath("report.html.j2").read_text())
    return template.render(
        title=f"{'Bracket' if len(labels) > 1 else 'Benchmark'}: {facts['model']}",
        subtitle=f"{_day(manifest)} · vLLM {facts['version']} · {' · '.join(labels.values())}",
        verdict=verdict,
        arm_sentences=arms,
        slots=bool(manifest["max_num_seqs"]),
        guided=any(row.json_valid is not None for row in summary.rows),
        comparisons=_comparisons(summary, labels),
        rows=_rows(summary, labels),
        positions=max((len(row.accepted) for row in summary.rows), default=0),
        charts=[
            {
                "title": chart.title,
                "reading": chart.reading,
                "light": svg_data_url(chart, LIGHT),
                "dark": svg_data_url(chart, DARK),
            }
            for chart in drawn
        ],
        conditions=_conditions(manifest, records, summary, facts),
        mixed=None if mixed is None else _mixed(mixed),
    )


def _mark_groups(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    previous = None
    for row in rows:
        key = (row["workload"], row["concurrency"], row["seqs"])
        row["first"] = previous is not None and key != previous
        previous = key
    return rows


def _comparisons(summary: Summary, labels: dict[str, str]) -> list[dict[str, Any]]:
    def cells(c: Comparison) -> dict[str, Any]:
        e = c.effect
        return {
            "workload": c.workload,
            "concurrency": c.concurrency,
            "seqs": c.max_num_seqs,
            "arm": labels[c.arm],
            "change": percent(e.ratio.median),
            "interval": f"{percent(e.ratio.low)} … {percent(e.ratio.high)}",
            "verdict": e.verdict,
            "css": e.verdict if e.verdict in ("faster", "slower") else "",
            "drift": percent(e.drift.median) if e.drift else "unknown",
            "texts": c.texts,
            "differ": c.texts not in ("equal", "sampled"),
            "pairs": e.ratio.n,
        }

    order = {(r.workload, r.concurrency, r.max_num_seqs): i for i, r in enumerate(summary.rows)}
    ranked = sorted(summary.comparisons, key=lambda c: order[c.workload, c.concurrency, c.max_num_seqs])
    return _mark_groups([cells(c) for c in ranked])


def _number(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _middle(value: Interval | None, digits: int = 1) -> str:
    return "–" if value is None else f"{value.median:.{digits}f}"


def _rows(summary: Summary, labels: dict[str, str]) -> list[dict[str, Any]]:
    def cells(r: Row) -> dict[str, Any]:
        tried: tuple[float | None, ...] = r.verified or (None,) * len(r.accepted)
        counts = Counter(h[:12] for h in r.text_hashes.values())
        return {
            "workload": r.workload,
            "concurrency": r.concurrency,
            "seqs": r.max_num_seqs,
            "arm": labels[r.arm],
            "tok_s": _middle(r.tok_s),
            "interval": f"{r.tok_s.low:.1f} … {r.tok_s.high:.1f}" if r.tok_s else "–",
            "stream_tok_s": _middle(r.stream_tok_s),
            "ttft": _middle(r.ttft_ms, 0),
            "itl": f"{_number(r.inter_token_p50_ms)} / {_number(r.inter_token_p99_ms)}",
            "pause": _number(r.pause_p99_ms),
            "width": _number(r.mean_width, 2),
            "per_step": _middle(r.tokens_per_step, 2),
            "capped": f"{r.length_hits} of {r.requests}",
            "json": "–" if r.json_valid is None else f"{r.json_valid} of {r.requests}",
            "runs": r.runs,
            "positions": " · ".join(
                "–" if v == 0 else f"{a:.0f}/{'?' if v is None else f'{v:.0f}'}"
                for a, v in zip(r.accepted, tried, strict=True)
            ),
            "hashes": sorted(counts.items(), key=lambda item: (-item[1], item[0])),
        }

    return _mark_groups([cells(r) for r in summary.rows])


def _conditions(
    manifest: dict[str, Any], records: list[dict[str, Any]], summary: Summary, facts: dict[str, Any]
) -> list[tuple[str, str]]:
    infos = {json.dumps(r["info"], sort_keys=True) for r in records if r["kind"] == "visit" and r["info"]}
    plugin = "; ".join(
        f"mode {i['mode']}, overlays {i['overlays'].replace(',', ', ') or 'none'}"
        for i in map(json.loads, sorted(infos))
    )
    options = manifest["options"]
    prefix_hits = sum(row.prefix_hits for row in summary.rows)
    sources = sorted({row.width_source for row in summary.rows})
    gpu = summary.gpu
    return [
        (
            "server",
            f"vLLM {facts['version']}, {facts['root'] or facts['model']}, max_model_len {facts['max_model_len']}",
        ),
        ("plugin", plugin or "its counters were not exported"),
        ("widths from", " and ".join(sources)),
        ("workloads", "; ".join(f"{w['name']}: {w['about']}, {w['max_tokens']} tokens" for w in manifest["workloads"])),
        (
            "runs",
            f"{manifest['passes']} pass(es), {options['warmups']} warm-up run(s) before each workload, seed {options['seed']}, "
            f"the same seeds in every arm; {summary.broken_attempts} attempt(s) did not count and were repeated",
        ),
        ("idle", "no other request before or after any run; tokens generated equal tokens received in every run"),
        (
            "prefix cache",
            "requests could hit it"
            if options["keep_prefix_cache"]
            else f"excluded by a salt of its own for every request; {prefix_hits:.0f} tokens hit",
        ),
        ("server restarts", "0 during the runs that count; one that was interrupted does not"),
        (
            "GPU",
            f"at most {gpu['max_celsius']} C, SM clock {gpu['min_sm_mhz']} to {gpu['max_sm_mhz']} MHz, "
            f"{'throttled' if gpu['throttled'] else 'not throttled'}"
            if gpu
            else "temperature and clocks were not readable from here",
        ),
    ]


def _mixed(mixed: dict[str, Any]) -> dict[str, Any]:
    return {
        "verdict": mixed_verdict(mixed),
        "phases": [
            {
                "phase": {"alone": "nothing"}.get(p["phase"], p["phase"]),
                "repeat": p["repeat"] + 1,
                "overlap_s": _number(p["overlap_s"]),
                "overlap_steps": p["overlap_steps"],
                "tok_s": _number(p["ordinary_tok_s"]),
                "widths": ", ".join(f"{w}: {n:.0f}" for w, n in p["widths"].items()) or "–",
                "valid": p["json_valid"] if p["phase"] == "guided companion" else "–",
                "cut_off": p["cut_off"] if p["phase"] == "guided companion" else "–",
            }
            for p in mixed["phases"]
        ],
    }


def mixed_verdict(mixed: dict[str, Any]) -> str:
    """The probe's outcome in one or two sentences; `mixed` is MixedResult.as_json()."""
    if mixed["problems"]:
        return "The probe failed: " + " ".join(mixed["problems"])
    guided = [p for p in mixed["phases"] if p["phase"] == "guided companion"]
    together = f"{min(p['overlap_s'] for p in guided):.1f} s and {min(p['overlap_steps'] for p in guided)} steps"
    said = f"Guided and ordinary requests decoded together for at least {together} in each of {len(guided)} repeats"
    said += f"; all {sum(p['json_valid'] for p in guided)} complete guided answers are valid."
    for name, what in (("companion", "A companion"), ("grammar", "Its grammar")):
        cost = mixed[name]
        if cost is not None:
            ratio = cost["ratio"]
            interval = f"{percent(ratio['median'])} [{percent(ratio['low'])}, {percent(ratio['high'])}]"
            said += f" {what} changes the ordinary stream's rate by {interval}: {cost['verdict']}."
    if mixed["mean_width_ordinary"] is not None and mixed["mean_width_guided"] is not None:
        said += (
            f" Mean width {mixed['mean_width_ordinary']:.2f} beside an ordinary companion, "
            f"{mixed['mean_width_guided']:.2f} beside a guided one."
        )
    return said
