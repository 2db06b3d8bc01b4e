"""The raw records of a run directory: JSON lines that are only ever added to.

    manifest.json   what was planned: tool version, arms, workloads, concurrency, seeds
    records.jsonl   one line per visit of an arm, per request and per run
    summary.json    aggregates of the records (recomputed by `report --audit`)

Every line carries a hash over itself and the line before (`chain`), so an edited, missing or added line shows. A run
counts when its `run` line is there; requests of a run that was broken off stay in the file and are told apart by their
attempt number.
"""

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from pydantic import BaseModel, Field, ValidationError

from dflash_verify.bench.errors import BenchError
from dflash_verify.bench.workloads import Workload


class _Named(BaseModel):
    name: str


class _Options(BaseModel):
    seed: int
    warmups: int
    keep_prefix_cache: bool


class _Manifest(BaseModel):
    """What every reader of a manifest relies on; a run directory comes from elsewhere as often as from here."""

    created: float
    arms: list[_Named] = Field(min_length=1)
    baselines: list[str]
    passes: int
    max_num_seqs: list[int]
    concurrency: list[int]
    workloads: list[Workload] = Field(min_length=1)
    options: _Options


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of the plan: `concurrency` simultaneous streams of one workload on one arm.

    max_num_seqs: of the server of that arm, 0 where the bracket does not set it.
    """

    pass_index: int
    max_num_seqs: int
    arm: str
    workload: str
    concurrency: int
    prompt: int
    repeat: int

    @property
    def id(self) -> str:
        seqs = f".m{self.max_num_seqs}" if self.max_num_seqs else ""
        return f"p{self.pass_index}{seqs}.{self.arm}.{self.workload}.c{self.concurrency}.q{self.prompt}.r{self.repeat}"

    @property
    def pair_key(self) -> tuple[int, int, int]:
        """What the arms of one comparison have in common."""
        return (self.pass_index, self.prompt, self.repeat)


def line_of(record: dict[str, Any]) -> str:
    return json.dumps(record, separators=(",", ":"))


def chain_of(previous: str, record: dict[str, Any]) -> str:
    """The hash that a record without its `chain` gets after a line whose chain is `previous` (empty at the start)."""
    return hashlib.sha256((previous + line_of(record)).encode()).hexdigest()[:16]


def broken_links(records: list[dict[str, Any]]) -> list[int]:
    """Line numbers from 1 of records that are not what was written after the record before them."""
    broken, previous = [], ""
    for number, record in enumerate(records, 1):
        rest = {key: value for key, value in record.items() if key != "chain"}
        if record.get("chain") != chain_of(previous, rest):
            broken.append(number)
        previous = record.get("chain", "")
    return broken


class Store:
    """One run directory, open for adding."""

    def __init__(self, directory: Path, manifest: dict[str, Any]) -> None:
        """Create the directory, or open it again when its manifest is the same plan (then it is resumed)."""
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "manifest.json"
        # Through JSON and back: tuples become lists.
        plan = json.loads(json.dumps(manifest))
        if path.exists():
            found = _json_object(path)
            changed = sorted(k for k in {*found, *plan} - {"created", "url"} if found.get(k) != plan.get(k))
            if changed:
                raise BenchError(
                    f"{directory} holds another plan (it differs in {', '.join(changed)}); "
                    "resume it with the plan it was started with, or choose another --out."
                )
        else:
            temporary = path.with_suffix(".tmp")
            temporary.write_text(json.dumps(plan, indent=1, ensure_ascii=False) + "\n")
            temporary.replace(path)
        records_path = directory / "records.jsonl"
        _drop_torn_line(records_path)
        existing = read_records(directory)
        self.complete = {r["run"] for r in existing if r["kind"] == "run" and not r["problems"]}
        self._attempts: dict[str, int] = {}
        for r in existing:
            if r["kind"] in ("request", "run"):
                self._attempts[r["run"]] = max(self._attempts.get(r["run"], 0), r["attempt"])
        self.visits = sum(r["kind"] == "visit" for r in existing)
        self._chain = existing[-1]["chain"] if existing else ""
        self._file: TextIO = records_path.open("a", encoding="utf-8")

    def next_attempt(self, run_id: str) -> int:
        self._attempts[run_id] = self._attempts.get(run_id, 0) + 1
        return self._attempts[run_id]

    def add(self, record: dict[str, Any]) -> None:
        """Write one line and hand it to the operating system."""
        record = json.loads(line_of(record))  # what a reader will see: text keys, lists
        self._chain = chain_of(self._chain, record)
        self._file.write(line_of({**record, "chain": self._chain}) + "\n")
        self._file.flush()

    def add_run(self, cell: Cell, attempt: int, record: dict[str, Any]) -> None:
        """Write the line that completes a run; on disk when this returns."""
        self.add(
            {
                "kind": "run",
                "run": cell.id,
                "attempt": attempt,
                "cell": asdict(cell),
                **record,
            }
        )
        os.fsync(self._file.fileno())
        if not record["problems"]:
            self.complete.add(cell.id)

    def close(self) -> None:
        self._file.close()


def write_summary(directory: Path, summary: dict[str, Any]) -> None:
    path = directory / "summary.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(summary, indent=1) + "\n")
    temporary.replace(path)


def _drop_torn_line(path: Path) -> None:
    """A kill in the middle of a write leaves half a line at the end; it held nothing complete."""
    if not path.exists():
        return
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(data.rfind(b"\n") + 1)


def read_manifest(directory: Path) -> dict[str, Any]:
    path = directory / "manifest.json"
    if not path.exists():
        raise BenchError(
            f"{directory} is no run directory: it has no manifest.json. Pass the --out of bench or bracket."
        )
    manifest = _json_object(path)
    try:
        _Manifest.model_validate(manifest)
    except ValidationError as error:
        lacking = [str(e["loc"][0]) for e in error.errors() if e["type"] == "missing" and len(e["loc"]) == 1]
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        found = f"it lacks {', '.join(lacking)}" if lacking else f"{where}: {first['msg']}"
        raise BenchError(
            f"{path} is not that of a run: {found}. Pass the --out of bench or bracket, with the manifest it wrote."
        ) from None
    return manifest


def _json_object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise BenchError(f"{path} is not JSON ({error}); it was damaged after the run wrote it.") from None
    if not isinstance(found, dict):
        raise BenchError(f"{path} is not that of a run: found a {type(found).__name__}, expected an object.")
    return found


def read_lines(directory: Path) -> list[str]:
    path = directory / "records.jsonl"
    try:
        return path.read_text(encoding="utf-8").split("\n")[:-1]
    except UnicodeDecodeError as error:
        raise BenchError(f"{path} is not UTF-8 (byte {error.start}); it was damaged after the run wrote it.") from None


def read_records(directory: Path) -> list[dict[str, Any]]:
    """All records; BenchError naming the line that is not JSON."""
    if not (directory / "records.jsonl").exists():
        return []
    records = []
    for number, line in enumerate(read_lines(directory), 1):
        try:
            record = json.loads(line)
            record["kind"]
        except (ValueError, KeyError, TypeError) as error:
            raise BenchError(f"{directory / 'records.jsonl'}:{number} is not a record: {error}.") from error
        records.append(record)
    return records
