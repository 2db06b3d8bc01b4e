"""Recompute a run directory from its raw records and say what does not fit."""

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dflash_verify.bench.bracket import Arm
from dflash_verify.bench.endpoint import snapshot_from_json
from dflash_verify.bench.errors import BenchError
from dflash_verify.bench.mixed import recompute
from dflash_verify.bench.records import Cell, broken_links, read_manifest, read_records
from dflash_verify.bench.runner import cells_of
from dflash_verify.bench.summary import counted_runs, mean_width, summarise, workloads_of
from dflash_verify.bench.workloads import body_sha256, stream_seed, text_sha256

# A static width's mean is exact up to the division; anything that would print as another two-digit number is a finding.
_WIDTH_TOLERANCE = 0.005


def audit(directory: Path) -> list[str]:
    """Everything that is wrong with a run directory, as sentences; empty when it passes.

    Checked: the aggregates of summary.json, that no line was changed, removed or added, coverage of the plan, seeds,
    prompts and request bodies, text hashes, token counts against the server's counters, that no server was restarted
    during an arm, that static arms had the width they claim, that arms differ only in the named setting, and a mixed probe beside it.
    """
    try:
        manifest, records = read_manifest(directory), read_records(directory)
    except BenchError as error:
        return [str(error)]
    checks: dict[str, Callable[[], list[str]]] = {
        "aggregates": lambda: _aggregates(directory, manifest, records),
        "lines": lambda: _chain(records),
        "coverage": lambda: _coverage(manifest, records),
        "requests": lambda: _requests(manifest, records),
        "servers": lambda: _servers(manifest, records),
        "arms": lambda: _arms(manifest),
        "mixed probe": lambda: _probe(directory),
    }
    findings: list[str] = []
    for name, check in checks.items():
        try:
            findings += check()
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, ZeroDivisionError) as error:
            # An edited record may lack anything; what cannot be checked has not passed.
            findings.append(f"The {name} cannot be checked: {type(error).__name__}: {error}.")
    return findings


def _probe(directory: Path) -> list[str]:
    path = directory / "mixed.json"
    return recompute(json.loads(path.read_text())) if path.exists() else []


def _aggregates(directory: Path, manifest: dict[str, Any], records: list[dict[str, Any]]) -> list[str]:
    path = directory / "summary.json"
    if not path.exists():
        return ["summary.json is missing: the run was not finished, resume it."]
    # Compared as text, so that NaN equals NaN and no tolerance is needed: the same code reads the same records.
    now = summarise(manifest, records).as_json()
    found = json.loads(path.read_text())
    return [
        f"summary.json: {where} is {old}, the records give {new}." for where, old, new in _differences(found, now, "")
    ][:20]


def _differences(old: Any, new: Any, where: str) -> list[tuple[str, str, str]]:
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            d
            for key in sorted({*old, *new})
            for d in _differences(old.get(key), new.get(key), f"{where}.{key}".lstrip("."))
        ]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [d for i, (a, b) in enumerate(zip(old, new, strict=True)) for d in _differences(a, b, f"{where}[{i}]")]
    a, b = json.dumps(old), json.dumps(new)
    return [] if a == b else [(where, a[:80], b[:80])]


def _chain(records: list[dict[str, Any]]) -> list[str]:
    return [f"records.jsonl:{number} is not the line that was written there." for number in broken_links(records)]


def planned_cells(manifest: dict[str, Any]) -> list[Cell]:
    workloads = tuple(workloads_of(manifest).values())
    return [
        cell
        for seqs in manifest["max_num_seqs"] or [0]
        for pass_index in range(manifest["passes"])
        for arm in manifest["arms"]
        for cell in cells_of(
            workloads,
            tuple(manifest["concurrency"]),
            arm=arm["name"],
            pass_index=pass_index,
            max_num_seqs=seqs,
        )
    ]


def _coverage(manifest: dict[str, Any], records: list[dict[str, Any]]) -> list[str]:
    counted: dict[str, int] = defaultdict(int)
    for cell, _, _ in counted_runs(records):
        counted[cell.id] += 1
    planned = [cell.id for cell in planned_cells(manifest)]
    missing = [run for run in planned if not counted[run]]
    findings = [f"{run} was measured {n} times." for run, n in counted.items() if n > 1]
    findings += [f"{run} is not in the plan." for run in counted.keys() - set(planned) if counted[run]]
    if missing:
        findings.append(f"{len(missing)} of {len(planned)} planned runs are missing, the first is {missing[0]}.")
    return findings


def _requests(manifest: dict[str, Any], records: list[dict[str, Any]]) -> list[str]:
    workloads = workloads_of(manifest)
    findings = []
    for cell, run, requests in counted_runs(records):
        workload = workloads.get(cell.workload)
        if workload is None:
            continue  # reported by coverage
        if [r["stream"] for r in requests] != list(range(cell.concurrency)):
            findings.append(f"{cell.id} has requests of streams {[r['stream'] for r in requests]}.")
            continue
        for r in requests:
            where = f"{cell.id} stream {r['stream']}"
            prompt = workload.prompt_index(cell.prompt, cell.repeat, r["stream"])
            seed = stream_seed(
                manifest["options"]["seed"], cell.workload, cell.pass_index, cell.prompt, cell.repeat, r["stream"]
            )
            if r["seed"] != seed:
                findings.append(f"{where}: seed {r['seed']}, the plan says {seed}.")
            if r["prompt"] != prompt or r["prompt_sha256"] != text_sha256(workload.prompts[prompt]):
                findings.append(f"{where}: another prompt than the plan's number {prompt}.")
            if r["body_sha256"] != body_sha256(workload.body(prompt, seed)):
                findings.append(f"{where}: another request body than the plan's.")
            if r["text_sha256"] != text_sha256(r["text"]):
                findings.append(f"{where}: the text does not have the hash it was recorded with.")
            if not r["events"] or r["events"][-1][1] != r["completion_tokens"]:
                findings.append(f"{where}: {r['completion_tokens']} tokens, but the chunks end at another count.")
            if any(b[0] < a[0] or b[1] <= a[1] for a, b in zip(r["events"], r["events"][1:], strict=False)):
                findings.append(f"{where}: times or token counts of its chunks go backwards.")
        before, after = snapshot_from_json(run["before"]), snapshot_from_json(run["after"])
        usage = sum(r["completion_tokens"] for r in requests)
        generated = after.generation_tokens - before.generation_tokens
        if generated != usage:
            findings.append(f"{cell.id}: its requests received {usage} tokens, the server generated {generated:.0f}.")
        if after.identity != before.identity:
            findings.append(f"{cell.id}: the server was restarted during the run.")
    return findings


def _servers(manifest: dict[str, Any], records: list[dict[str, Any]]) -> list[str]:
    findings = []
    visits = [r for r in records if r["kind"] == "visit"]
    facts = {json.dumps(v["server"], sort_keys=True) for v in visits}
    if len(facts) > 1:
        findings.append(f"The arms ran on different servers: {' and '.join(sorted(facts))}.")
    infos: dict[str, set[str]] = defaultdict(set)
    for visit in visits:
        infos[visit["arm"]].add(json.dumps(visit["info"], sort_keys=True))
    findings += [
        f"Arm {arm} was measured on servers with different plugin settings: {' and '.join(sorted(found))}."
        for arm, found in infos.items()
        if len(found) > 1
    ]
    arms = {arm["name"]: arm for arm in manifest["arms"]}
    identity: float | None = None
    live_identity: float | None = None
    for r in records:
        if r["kind"] == "visit":
            identity = r["identity"]
            if arms.get(r["arm"], {}).get("width") is not None:
                if live_identity not in (None, identity):
                    findings.append(f"The server was restarted before visit {r['visit']} although its arms are live.")
                live_identity = identity
        elif r["kind"] == "run" and not r["problems"] and r["before"]["identity"] != identity:
            findings.append(f"{r['run']} ran on another start of the server than its arm's visit.")
    for cell, run, _ in counted_runs(records):
        arm = arms.get(cell.arm)
        claimed = Arm.model_construct(**arm).claimed_width if arm and arm.get("kind") != "as is" else None
        if claimed is None:
            continue
        width = mean_width(snapshot_from_json(run["before"]), snapshot_from_json(run["after"]))
        # Without the plugin a width of 0 drafts nothing, and grammars lower the count of valid drafts.
        plain = workloads_of(manifest)[cell.workload].json_schema is None or bool(run["after"]["steps"])
        if plain and abs((width or 0.0) - claimed) > _WIDTH_TOLERANCE:
            findings.append(
                f"{cell.id}: mean width {width if width is None else round(width, 3)}, the arm says {claimed}."
            )
    return findings


def _arms(manifest: dict[str, Any]) -> list[str]:
    """Arms may differ only in what `differs_in` names."""
    arms = [arm for arm in manifest["arms"] if arm.get("kind") != "as is"]
    allowed = set(manifest.get("differs_in", ()))
    findings = []
    for arm in arms[1:]:
        first = arms[0]
        for key in ("start", "restart", "url"):
            if arm[key] != first[key]:
                findings.append(f"Arms {first['name']} and {arm['name']} differ in their {key}, not only in a setting.")
        if arm["width"] != first["width"] and "width" not in allowed:
            findings.append(f"Arms {first['name']} and {arm['name']} differ in width, which differs_in does not name.")
        names = {n for n in {*arm["env"], *first["env"]} if arm["env"].get(n) != first["env"].get(n)}
        findings += [
            f"Arms {first['name']} and {arm['name']} differ in {name}, which differs_in does not name."
            for name in sorted(names - allowed)
        ]
    return findings
