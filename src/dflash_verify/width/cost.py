"""What a step costs: milliseconds by batch size and verify width.

`CostTable` is what was measured, one cell per (batch, width), never a straight line over widths: padded graphs make
step time a staircase and it need not even grow with the width. `CostModel` is what the controller asks: the table if
there is one, corrected by the steps that were served; without a table, or with one that is not trusted, it learns.
"""

import json
import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

FORMAT = 1
MAX_DIGITS = 9  # of a batch size in a file
AUDIT_WINDOW = 8  # steps before and after a change of width that are compared: others may be under another clock
MAX_STEP_MS = 1e9  # twelve days: a longer step is a mistake, and sums of shorter ones stay finite


class CostTableError(ValueError):
    """A cost table that cannot be used; the message is one sentence for the operator."""


@dataclass(frozen=True, slots=True)
class CostKey:
    """What a measured table is valid for. Any difference makes it another server's table."""

    gpu: str
    tensor_parallel_size: int
    target_config: str  # digest
    draft_config: str  # digest
    engine_version: str
    dtype: str
    compilation: str  # vLLM's compilation mode: NONE, VLLM_COMPILE, ...
    capture_sizes: tuple[int, ...]

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "CostKey":
        if not isinstance(data, Mapping):
            raise CostTableError("the cost table's key is no object; measure it again with `profile`")
        names = [part.name for part in fields(cls)]
        missing = [name for name in names if name not in data]
        if missing:
            raise CostTableError(f"the cost table's key lacks {', '.join(missing)}; measure it again with `profile`")
        values = {name: data[name] for name in names}
        values["capture_sizes"] = tuple(values["capture_sizes"])
        return cls(**values)

    def difference(self, other: "CostKey") -> str | None:
        """The first field that differs, as `name: mine here, theirs there`; None if nothing does."""
        for part in fields(self):
            mine, theirs = getattr(self, part.name), getattr(other, part.name)
            if mine != theirs:
                return f"{part.name} is {_short(theirs)} there and {_short(mine)} here"
        return None


def _short(value: object) -> str:
    text = str(list(value)) if isinstance(value, tuple) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass(frozen=True)
class CostTable:
    """Measured step times.

    widths: ascending, the last is the draft width. cells: {batch: (ms per width, ...)}.
    capture_sizes: token counts for which FULL graphs exist. With them, n requests at width K are priced as the graph
    they run in: n (K + 1) tokens padded up to the next capture size. Without them step time is linear between listed
    batches.
    """

    draft_width: int
    widths: tuple[int, ...]
    cells: Mapping[int, tuple[float, ...]]
    capture_sizes: tuple[int, ...] = ()
    key: CostKey | None = None

    def __post_init__(self) -> None:
        _check_widths(self.widths, self.draft_width)
        if not self.cells:
            raise CostTableError("the cost table lists no batch size; expected step_ms for at least one")
        for batch, row in self.cells.items():
            if batch < 1:
                raise CostTableError(f"the cost table lists batch {batch}; expected batch sizes of 1 and more")
            if len(row) != len(self.widths):
                raise CostTableError(f"the cost table lists {len(row)} times for batch {batch}; expected one per width")
            for width, ms in zip(self.widths, row, strict=True):
                if isinstance(ms, bool) or not isinstance(ms, int | float) or not 0 < ms <= MAX_STEP_MS:
                    raise CostTableError(
                        f"the cost table has {_short(ms)} ms for batch {batch}, width {width}; "
                        f"expected a positive number up to {MAX_STEP_MS:g}"
                    )
        object.__setattr__(self, "_curves", [self._curve(j) for j in range(len(self.widths))])
        object.__setattr__(self, "_rows", {})

    def _padded(self, batch: float, width: int) -> float:
        """Requests that the step is priced as: those that its graph has room for."""
        if not self.capture_sizes:
            return float(batch)
        rows = batch * (width + 1)
        at = int(np.searchsorted(self.capture_sizes, rows))
        # Above the largest graph the step runs eagerly, unpadded; the cells measured there say what that costs.
        return (self.capture_sizes[at] if at < len(self.capture_sizes) else rows) / (width + 1)

    def _curve(self, j: int) -> tuple[Array, Array]:
        points: dict[float, list[float]] = {}
        for batch in sorted(self.cells):
            points.setdefault(self._padded(batch, self.widths[j]), []).append(self.cells[batch][j])
        x = sorted(points)
        return np.array(x), np.array([sum(points[at]) / len(points[at]) for at in x])

    def row(self, batch: int) -> tuple[float, ...]:
        """Step time in ms for each width at this batch size: linear between listed batches and beyond the last,
        constant below the first."""
        rows: dict[int, tuple[float, ...]] = self._rows  # type: ignore[attr-defined]
        row = rows.get(batch)
        if row is None:
            row = rows[batch] = tuple(self._at(j, batch) for j in range(len(self.widths)))
        return row

    def _at(self, j: int, batch: int) -> float:
        x, y = self._curves[j]  # type: ignore[attr-defined]
        at = self._padded(batch, self.widths[j])
        if len(x) > 1 and at > x[-1]:
            slope = float((y[-1] - y[-2]) / (x[-1] - x[-2]))
            return max(float(y[-1]) + slope * (at - float(x[-1])), float(y.min()))  # never extrapolated below zero
        return float(np.interp(at, x, y))

    def step_ms(self, batch: int, width: int) -> float:
        return self.row(batch)[self.widths.index(width)]

    def restrict(self, widths: Iterable[int]) -> "CostTable":
        """The same table over fewer widths."""
        widths = tuple(sorted(set(widths)))
        unknown = [w for w in widths if w not in self.widths]
        if unknown:
            raise CostTableError(
                f"the cost table has no times for width {unknown[0]}: measure it again with `profile`, or choose among widths "
                f"{_listed(self.widths)}"
            )
        columns = [self.widths.index(w) for w in widths]
        cells = {batch: tuple(row[c] for c in columns) for batch, row in self.cells.items()}
        return CostTable(self.draft_width, widths, cells, self.capture_sizes, self.key)

    @classmethod
    def from_json(cls, data: object, source: str = "the cost table") -> "CostTable":
        """Build from `{"draft_width", "widths", "step_ms": {batch: {width: ms}}}`, with or without `key` and
        `capture_sizes`."""
        try:
            if not isinstance(data, Mapping):
                raise CostTableError("found no JSON object; expected draft_width, widths and step_ms")
            missing = [name for name in ("draft_width", "widths", "step_ms") if name not in data]
            if missing:
                raise CostTableError(f"lacks {', '.join(missing)}; expected draft_width, widths and step_ms")
            widths, draft_width, step_ms = data["widths"], data["draft_width"], data["step_ms"]
            if not isinstance(widths, list) or not all(type(w) is int for w in widths):
                raise CostTableError(f"has widths {widths!r}; expected a list of integers")
            if type(draft_width) is not int:
                raise CostTableError(f"has draft_width {draft_width!r}; expected an integer")
            if not isinstance(step_ms, Mapping):
                raise CostTableError("has a step_ms that is no object; expected {batch: {width: ms}}")
            widths = tuple(sorted(widths))
            _check_widths(widths, draft_width)
            cells: dict[int, tuple[float, ...]] = {}
            for batch, row in step_ms.items():
                if not str(batch).isdecimal() or len(str(batch)) > MAX_DIGITS:
                    raise CostTableError(
                        f"has a batch size {_short(batch)} in step_ms; expected an integer of 1 or more"
                    )
                if int(batch) in cells:
                    raise CostTableError(f"lists batch {int(batch)} twice in step_ms; expected every batch size once")
                if not isinstance(row, Mapping):
                    raise CostTableError(f"has no object for batch {batch}; expected {{width: ms}}")
                absent = [w for w in widths if str(w) not in row]
                if absent:
                    raise CostTableError(
                        f"has no time for batch {batch}, width {absent[0]}; every cell must be measured"
                    )
                cells[int(batch)] = tuple(row[str(w)] for w in widths)
            key = CostKey.from_json(data["key"]) if data.get("key") is not None else None
            capture_sizes = data.get("capture_sizes") or []
            if not isinstance(capture_sizes, list | tuple) or not all(type(size) is int for size in capture_sizes):
                raise CostTableError(f"has capture_sizes {_short(capture_sizes)}; expected a list of integers")
            return cls(draft_width, widths, cells, tuple(capture_sizes), key)
        except CostTableError as error:
            raise CostTableError(f"{source}: {error}") from None

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {
            "format": FORMAT,
            "draft_width": self.draft_width,
            "widths": list(self.widths),
            "capture_sizes": list(self.capture_sizes),
            "step_ms": {
                str(batch): {str(w): ms for w, ms in zip(self.widths, self.cells[batch], strict=True)}
                for batch in sorted(self.cells)
            },
        }
        if self.key is not None:
            data["key"] = asdict(self.key)
        return data

    def save(self, path: Path) -> None:
        """Write the table; a reader sees the old one or the new one, never half of it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps(self.to_json(), indent=1) + "\n")
        part.replace(path)

    @classmethod
    def load(cls, path: Path, key: CostKey | None = None) -> "CostTable":
        """Read a table; with `key`, refuse one that was measured for anything else."""
        table = cls.from_json(read_json(path), str(path))
        if key is not None:
            if table.key is None:
                raise CostTableError(f"{path}: has no key that says where it was measured; measure it with `profile`")
            difference = key.difference(table.key)
            if difference is not None:
                raise CostTableError(
                    f"{path}: measured for another server: {difference}; measure it again with `profile`"
                )
        return table


def read_json(path: Path) -> object:
    """JSON from a file, or one sentence that says why not."""
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise CostTableError(f"{path}: cannot be read ({error.strerror or error})") from None
    except (ValueError, RecursionError) as error:  # also integers too long and arrays too deep to be read
        raise CostTableError(f"{path}: is not JSON ({error})") from None


def _listed(values: Iterable[int]) -> str:
    return ", ".join(str(v) for v in values)


def _check_widths(widths: Sequence[int], draft_width: int) -> None:
    if draft_width < 1:
        raise CostTableError(f"draft_width is {draft_width}; expected 1 or more")
    if not widths or list(widths) != sorted(set(widths)):
        raise CostTableError(f"widths are {_listed(widths) or 'missing'}; expected distinct integers")
    if widths[0] < 0 or widths[-1] != draft_width:
        raise CostTableError(
            f"widths are {_listed(widths)}; expected values from 0 to the draft width {draft_width}, itself included"
        )


@dataclass(frozen=True, slots=True)
class Doubt:
    """Standard deviations of log step time that a model starts with, by what may be wrong.

    level: every cell alike. batch: smooth in log2 batch, all widths alike. slope: what a narrower width saves.
    width: one width against the others, at all batches. cell: one (batch, width) alone.
    """

    level: float
    batch: float
    slope: float
    width: float
    cell: float


NO_CELL = (0, -1)


@dataclass(slots=True)
class Run:
    """Steps in a row in one cell, (batch group, width number): their number and the log times of the last ones beside the table's."""

    cell: tuple[int, int]
    steps: int = 0
    last: deque[float] = field(default_factory=lambda: deque(maxlen=AUDIT_WINDOW))


class Change(NamedTuple):
    """One width followed another: median log times beside the table's, and of how many steps."""

    before: float
    after: float
    steps_before: int
    steps_after: int

    @property
    def apart(self) -> float:
        return self.after - self.before

    def turned(self) -> "Change":
        return Change(self.after, self.before, self.steps_after, self.steps_before)


class CostModel:
    """Step time by (batch, width), learned in the log domain from served steps.

    A Gaussian process over the cells that occur, updated one step at a time (a Kalman filter): a step at one width
    says something about the level of all, about its neighbours in batch size, and little about other widths' own
    offsets. The controller needs only how widths compare at one batch: it asks the sd of a ratio, not of a level.
    """

    # A table measured here: corrected, hardly doubted. A table from elsewhere: wrong by a third per width. None: the
    # saving per width is a guess, the level unknown.
    MEASURED = Doubt(level=0.10, batch=0.05, slope=0.02, width=0.02, cell=0.01)
    FOREIGN = Doubt(level=0.30, batch=0.15, slope=0.10, width=0.30, cell=0.05)
    ABSENT = Doubt(level=0.50, batch=0.30, slope=0.25, width=0.20, cell=0.05)
    GUESS_PER_WIDTH = 0.04  # without a table: log step time saved per width at batch 1 ...
    GUESS_BATCH = 0.15  # ... and how that grows per doubling of the batch
    NOISE = 0.12  # sd of log step time until it is known better
    NOISE_RANGE = (0.02, 0.20)
    PLAIN = 0.5  # sd of log step time that is width 0's own, whatever the table: how much of the host's work shows (docs/width.md)
    OUTLIER = 2.5  # predictive sds beyond which a step's influence stops growing (Huber)
    EARLY = 3  # a width's first steps are believed together: any single one may be a spike ...
    EARLY_SPREAD = 0.35  # ... so they are clipped to this much around their median
    FORGET = 2e-5  # per step, towards the starting doubt
    FORGET_EVERY = 16  # updates
    COLLECT = 8  # steps of a well-known cell per update
    # A trusted table is distrusted when two widths compare other than it says by more than AUDIT_ERROR in log time and by more
    # than the host's work for requests that come and go, both by AUDIT_SDS standard errors.
    AUDIT_ERROR = 0.12
    AUDIT_HOST_MS = 1.5
    AUDIT_SDS = 3.0
    AUDIT_CHANGE_SD = 0.03  # of log time, what else changes with a width at least,
    AUDIT_CHANGES = 4  # ... and it may be any amount, so that fewer changes show nothing,
    AUDIT_MEMORY = 8  # ... nor those of one direction alone: so many of each are remembered
    WALK = 2e-5  # variance that the level of all widths gains per step: clocks, contexts, other work on the machine
    JUMP_STEPS = 4  # so many outliers in a row on one side are no spikes: the level has jumped,
    JUMP = 0.3  # by about this much in log time
    JUMP_CELL = 0.1  # ... and a cell without a trusted table may be off by this much alone
    REACH = 4.0  # doublings of the batch over which width offsets stay alike
    FINE = 8  # batches up to here have cells of their own, larger ones share half-octaves

    def __init__(
        self, widths: Sequence[int], draft_width: int, table: CostTable | None = None, *, trusted: bool = True
    ) -> None:
        _check_widths(widths, draft_width)
        self.widths = tuple(widths)
        self.draft_width = draft_width
        self.table = table.restrict(widths) if table is not None else None
        self.trusted = trusted and table is not None
        self._doubt = self.MEASURED if self.trusted else self.FOREIGN if table is not None else self.ABSENT
        self._groups: dict[int, int] = {}  # batch group -> its first cell
        self._where = np.empty((0, 2))  # per cell: log2 batch, width index
        self._mean = np.empty(0)
        self._cov = np.empty((0, 0))
        self._start = np.empty((0, 0))
        self._noise_var = self.NOISE**2
        self._early: dict[int, list[tuple[int, float]]] = {} if self.trusted else {j: [] for j in range(len(widths))}
        self._levelled = self.trusted
        self._level = 0.0
        self.observed_steps = 0
        self._updates = self._forgotten_at = self._walked_at = 0
        self._believed: dict[int, tuple[float, float]] = {}  # per cell since the last update: variance, mean
        # Per well-known cell: sum and number of its log residuals since its last update, and the step of the last one.
        self._collected: dict[int, tuple[float, int, int]] = {}
        self._guesses: dict[int, list[float]] = {}
        # Audit of a trusted table: the steps in a row of one cell, those before them, and per group the changes from one width number to
        # another.
        self._run = self._run_before = Run(NO_CELL)
        self._changes: dict[tuple[int, int, int], deque[Change]] = {}
        self.contradiction = ""  # why the table lost the trust, one sentence
        self._outliers = 0  # in a row, signed
        self._cache: dict[int, tuple[list[float], list[list[float]] | None]] = {}

    @property
    def learning(self) -> bool:
        """Whether narrower and wider widths must be tried to know what they cost."""
        return not self.trusted

    def known(self, j: int) -> bool:
        """Whether width number j has been timed at all, here or in the table that is trusted."""
        return j not in self._early

    @property
    def noise_var(self) -> float:
        """Variance of one step's log time around what was expected."""
        return self._noise_var

    def group(self, batch: int) -> int:
        """The batch size whose cells this one shares."""
        if batch <= self.FINE:
            return batch
        octaves: float = round(2.0 * math.log2(batch)) / 2.0
        return round(math.exp2(octaves))

    def _guess(self, batch: int) -> list[float]:
        """Log step time per width before any step was served."""
        guess = self._guesses.get(batch)
        if guess is None:
            if self.table is not None:
                guess = [math.log(ms) for ms in self.table.row(batch)]
            else:
                per_width = self.GUESS_PER_WIDTH * (1.0 + self.GUESS_BATCH * math.log2(batch))
                guess = [-per_width * (self.draft_width - w) for w in self.widths]
            self._guesses[batch] = guess
        return guess

    def _kernel(self, a: Array, b: Array) -> Array:
        doubt = self._doubt
        far = np.abs(a[:, None, 0] - b[None, :, 0])
        same = (a[:, None, 1] == b[None, :, 1]).astype(np.float64)
        widths = np.asarray(self.widths, dtype=np.float64)
        cut = 1.0 - widths / self.draft_width
        saved = cut[a[:, 1].astype(np.intp)][:, None] * cut[b[:, 1].astype(np.intp)][None, :]
        near = np.exp(-far / self.REACH)
        kernel: Array = (
            doubt.level**2
            + doubt.batch**2 * near
            + doubt.slope**2 * saved * near
            + doubt.width**2 * same * near
            + doubt.cell**2 * same * (far == 0.0)
            + self.PLAIN**2 * same * near * (cut[a[:, 1].astype(np.intp)] == 1.0)[:, None]
        )
        return kernel

    def _cells(self, batch: int) -> int:
        """The first cell of this batch's group, created from what its neighbours have shown."""
        group = self.group(batch)
        at = self._groups.get(group)
        if at is not None:
            return at
        count = len(self.widths)
        new = np.column_stack([np.full(count, math.log2(group)), np.arange(count, dtype=np.float64)])
        own = self._kernel(new, new)
        at = len(self._mean)
        if at == 0:
            self._where, self._mean, self._cov, self._start = new, np.zeros(count), own.copy(), own
        else:
            cross = self._kernel(new, self._where)
            weight = np.linalg.solve(self._start + 1e-9 * np.eye(at), cross.T).T
            beside = weight @ self._cov
            inside = own - weight @ (self._start - self._cov) @ weight.T
            self._mean = np.concatenate([self._mean, weight @ self._mean])
            self._cov = np.block([[self._cov, beside.T], [beside, inside]])
            self._start = np.block([[self._start, cross.T], [cross, own]])
            self._where = np.vstack([self._where, new])
        self._groups[group] = at
        return at

    def expected_ms(self, batch: int, width: int) -> float | None:
        """What a step is expected to take; None if this width was never timed."""
        j = self.widths.index(width)
        return self.row(batch)[0][j] if self.known(j) else None

    def row(self, batch: int) -> tuple[list[float], list[list[float]] | None]:
        """(ms per width, covariance of their logs [W, W]); the covariance is None for a trusted table."""
        cached = self._cache.get(batch)
        if cached is not None:
            return cached
        if self.trusted and self.observed_steps == 0 and self.table is not None:
            result: tuple[list[float], list[list[float]] | None] = (list(self.table.row(batch)), None)
        else:
            at = self._cells(batch)
            end = at + len(self.widths)
            level = self._level
            mean = self._mean[at:end].tolist()
            if self.trusted and self.table is not None:
                ms = [t * math.exp(m) for t, m in zip(self.table.row(batch), mean, strict=True)]
            else:
                ms = [math.exp(g + level + m) for g, m in zip(self._guess(batch), mean, strict=True)]
            result = (ms, self._cov[at:end, at:end].tolist() if self.learning else None)
        self._cache[batch] = result
        return result

    def observe(self, batch: int, width: int, step_ms: float) -> None:
        """Learn from one served step. Only clean ones: uniform width, no prefill, no idle time."""
        if batch < 1 or width not in self.widths or not step_ms > 0.0 or not math.isfinite(step_ms):
            return
        j = self.widths.index(width)
        x = math.log(step_ms)
        self.observed_steps += 1
        early = self._early.get(j)
        if early is not None:
            self._cache.clear()
            early.append((batch, x))
            residuals = sorted(y - self._guess(b)[j] for b, y in early)
            middle = residuals[len(residuals) // 2]
            if not self._levelled:
                self._level = middle
            if len(early) < self.EARLY:
                return
            del self._early[j]
            self._levelled = True
            for b, y in early:
                guess = self._guess(b)[j] + middle
                self._learn(b, j, min(max(y, guess - self.EARLY_SPREAD), guess + self.EARLY_SPREAD))
            return
        if self.trusted and self._contradicted((self.group(batch), j), x - self._guess(batch)[j]):
            self._lose_trust()
        self._learn(batch, j, x)
        if not self._cache:
            self.row(batch)  # here rather than in the next decision, which has a budget

    def interrupted(self) -> None:
        """What is observed next does not follow what was observed last: prompts, idle time or another text were between them."""
        self._run = self._run_before = Run(NO_CELL)

    def _contradicted(self, cell: tuple[int, int], residual: float) -> bool:
        """Whether served steps say that the trusted table is wrong about how two widths compare.

        Context growth, clocks and other work on the machine move all widths together, at any time. So two widths are
        compared only where one follows the other at a batch size: the last steps of one with the first of the other.
        """
        contradicted = False
        if cell != self._run.cell:
            if self._run.steps < AUDIT_WINDOW:
                contradicted = self._compare()
            self._run_before, self._run = self._run, Run(cell)
        run = self._run
        run.steps += 1
        run.last.append(residual)
        if run.steps == AUDIT_WINDOW:
            contradicted = self._compare()
        return contradicted

    def _compare(self) -> bool:
        """Compare the width that runs with the one before it; whether this, with earlier changes, contradicts the table."""
        before, run = self._run_before, self._run
        (group, j), (group_before, i) = run.cell, before.cell
        # What the host adds to width 0 is not known: nothing is compared with it.
        if group != group_before or min(i, j) < 0 or self.widths[min(i, j)] == 0:
            return False
        changes = self._changes.setdefault((group, i, j), deque(maxlen=self.AUDIT_MEMORY))
        changes.append(Change(statistics.median(before.last), statistics.median(run.last), len(before.last), run.steps))
        back = [change.turned() for change in self._changes.get((group, j, i), ())]
        both = [*changes, *back]
        if not back or len(both) < self.AUDIT_CHANGES:
            return False
        # A level that grows while a width runs and falls as it changes looks like one width upwards and the other downwards.
        there, again = (statistics.median(change.apart for change in way) for way in (changes, back))
        if there * again <= 0.0:
            return False
        apart = min(there, again, key=abs)
        middle = statistics.median(change.apart for change in both)
        spread = max(self.AUDIT_CHANGE_SD, statistics.median(abs(change.apart - middle) for change in both))
        steps = sum(change.steps_before for change in both), sum(change.steps_after for change in both)
        variance = self._noise_var * (1.0 / steps[0] + 1.0 / steps[1]) + spread**2 / len(both)
        surely = abs(apart) - self.AUDIT_SDS * math.sqrt(variance)
        slower, at = (j, [change.after for change in both]) if apart > 0.0 else (i, [change.before for change in both])
        took_ms = math.exp(self._guess(group)[slower] + statistics.median(at))
        if surely <= self.AUDIT_ERROR or took_ms * -math.expm1(-surely) <= self.AUDIT_HOST_MS:
            return False
        more = apart if j > i else -apart
        self.contradiction = (
            f"at about {group} requests width {self.widths[max(i, j)]} takes {math.exp(more):.2f} times what the cost table says, "
            f"compared with width {self.widths[min(i, j)]}"
        )
        return True

    def _lose_trust(self) -> None:
        """Start over: the table is what is guessed, and widths are timed as far as knowing them better pays."""
        self.trusted = False
        self._doubt = self.FOREIGN
        self._level = statistics.median(max(self._run_before, self._run, key=lambda run: len(run.last)).last)
        self._groups.clear()
        self._where, self._mean, self._cov, self._start = (
            np.empty((0, 2)),
            np.empty(0),
            np.empty((0, 0)),
            np.empty((0, 0)),
        )
        for held in (self._believed, self._collected, self._cache, self._changes):
            held.clear()

    def _learn(self, batch: int, j: int, x: float) -> None:
        """One step's log time. A cell that is known well collects several before it is updated with their mean."""
        cell = self._cells(batch) + j
        believed = self._believed.get(cell)
        if believed is None:
            believed = self._believed[cell] = float(self._cov[cell, cell]), float(self._mean[cell])
        variance, expected = believed
        error = x - self._guess(batch)[j] - self._level - expected
        spread = math.sqrt(variance + self._noise_var)
        limit = self.OUTLIER * spread
        size = abs(error)
        if self._jumped(cell, error, limit):
            return
        if variance < self._noise_var:  # only a known cell's errors are noise
            clipped = min(size, limit)
            var = self._noise_var + 0.02 * (clipped * clipped - self._noise_var)
            low, high = self.NOISE_RANGE
            self._noise_var = min(max(var, low * low), high * high)
            total, count, last = self._collected.get(cell, (0.0, 0, 0))
            if self.observed_steps - last > 2 * self.COLLECT:  # under a level that may be gone
                total, count = 0.0, 0
            total, count = total + expected + math.copysign(clipped, error), count + 1
            if count < self.COLLECT and variance < 0.1 * self._noise_var:
                self._collected[cell] = total, count, self.observed_steps
                return
            self._collected.pop(cell, None)
            self._update(cell, total / count - expected, self._noise_var / count)
        elif size > limit:
            # Huber: the further out, the noisier it is taken to be, so that its pull stops growing.
            self._update(cell, error, (variance + self._noise_var) * size / limit - variance)
        else:
            self._update(cell, error, self._noise_var)

    def _jumped(self, cell: int, error: float, limit: float) -> bool:
        """Outliers in a row on one side are a new level of all widths: it is doubted, so that the next steps find it.

        Without a table that is trusted it may as well be this cell alone; the next change of width tells.
        """
        if abs(error) <= limit:
            self._outliers = 0
            return False
        side = 1 if error > 0.0 else -1
        self._outliers = self._outliers + side if self._outliers * side > 0 else side
        if abs(self._outliers) < self.JUMP_STEPS:
            return False
        self._outliers = 0
        self._cov += self.JUMP**2
        if not self.trusted:
            self._cov[cell, cell] += self.JUMP_CELL**2
        self._believed.clear()
        self._collected.clear()
        self._cache.clear()
        return True

    def _update(self, cell: int, error: float, noise: float) -> None:
        """Kalman update: `error` is how far the cell is from its mean, seen with variance `noise`."""
        self._cov += self.WALK * (self.observed_steps - self._walked_at)
        self._walked_at = self.observed_steps
        column = self._cov[cell]
        gain = column / (float(column[cell]) + noise)
        self._mean += gain * error
        self._cov -= gain[:, None] * column
        self._updates += 1
        if self._updates % self.FORGET_EVERY == 0:
            self._cov += self.FORGET * (self.observed_steps - self._forgotten_at) * (self._start - self._cov)
            self._forgotten_at = self.observed_steps
        self._believed.clear()
        self._cache.clear()
