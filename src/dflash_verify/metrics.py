"""Prometheus counters of verify widths, from the scheduler in the engine process to `/metrics` in the API server.

The way of the data
-------------------
The scheduler runs in the EngineCore process, Prometheus is exported by the API server. vLLM sends one `SchedulerStats`
per step to exactly one API server, as msgpack decoded against the dataclass: a field that a subclass adds is dropped, a
key in a dictionary field survives. `attach` therefore puts one `WidthStats` as one key into `waiting_lora_adapters`
(`dict[str, int]` in 0.28 to 0.33), which the engine process leaves empty and the API server fills later; `detach` takes
it out again before any stat logger sees it. That dictionary and not `kv_connector_stats`, because a server whose front
end lacks the *metrics* overlay ignores it there, while an unknown connector statistic fails an assertion.
Verified and accepted counts per position are not sent twice: they are in vLLM's own `SpecDecodingStats`, without the
drafts a grammar ruled out; upstream keeps both and exports only the accepted ones.

What the scheduler calls
------------------------
Once per step, before `super().update_from_output(...)`::

    self._width_stats = WidthStats.of_step(map(len, scheduler_output.scheduled_spec_decode_tokens.values()),
                                           width, policy_active=..., step_ms=..., reason=...)

and in its own `make_stats`::

    stats = super().make_stats(*args, **kwargs)
    if stats is not None and self._width_stats is not None:   # None: statistics are off, and stay off
        attach(stats, self._width_stats)
        self._width_stats = None
    return stats

What the *metrics* overlay calls
--------------------------------
`manager_init(original, info)` and `manager_record(original)` return replacements for `StatLoggerManager.__init__` and
`.record` that call the original. vLLM builds that class only when statistics are on, so nothing is forced on.

Several API servers: each step reaches one of them, and prometheus_client's multi-process files add the counters up, so
nothing is counted twice. Several engines (not supported with a width) would add up in the same way.
"""

import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Self

# Also tells our key from an adapter's name: a LoRA name with a NUL cannot be given on a command line.
_KEY = "\0dflash_verify "
_REASON_PERIOD_S = 1.0


@dataclass(frozen=True, slots=True)
class WidthStats:
    """What one engine step did about widths.

    width: verify width K that the step was scheduled with, 0 <= K <= N.
    nonuniform: some request of the step carried fewer drafts than K (vLLM shortens near max_model_len, after a resume).
    policy_active: what DFLASH_VERIFY_TOKENS asks for (a static width or auto) decided K; false while a control file or
        vLLM's own schedule does.
    step_ms: measured duration of the step, or None where it is not comparable (first step, prefill in the batch).
    reason: the controller's sentence for this choice.
    """

    width: int
    nonuniform: bool = False
    policy_active: bool = True
    step_ms: float | None = None
    reason: str = ""

    @classmethod
    def of_step(
        cls,
        draft_counts: Iterable[int],
        width: int,
        *,
        policy_active: bool,
        step_ms: float | None = None,
        reason: str = "",
    ) -> Self:
        """The record of a step from the number of drafts scheduled for each of its decoding requests."""
        counts = set(draft_counts)  # one C loop, whatever the batch
        return cls(width, bool(counts) and counts != {width}, policy_active, step_ms, reason)

    def encode(self) -> str:
        """One string that survives as a dictionary key."""
        return _KEY + json.dumps(
            [self.width, int(self.nonuniform), int(self.policy_active), self.step_ms, self.reason],
            separators=(",", ":"),
        )

    @classmethod
    def decode(cls, key: str) -> Self:
        """The inverse of `encode`; ValueError for any other string."""
        if not key.startswith(_KEY):
            raise ValueError(f"not a width record: {key!r}")
        width, nonuniform, active, step_ms, reason = json.loads(key[len(_KEY) :])
        return cls(width, bool(nonuniform), bool(active), step_ms, reason)


def attach(scheduler_stats: Any, record: WidthStats) -> None:
    """Put the record into vLLM's SchedulerStats of this step (engine process)."""
    scheduler_stats.waiting_lora_adapters[record.encode()] = 0


def detach(scheduler_stats: Any) -> WidthStats | None:
    """Take the record out of SchedulerStats, which is then as stock vLLM would have sent it (API server)."""
    adapters = scheduler_stats.waiting_lora_adapters
    if not adapters:
        return None
    for key in adapters:
        if key.startswith(_KEY):
            del adapters[key]
            return WidthStats.decode(key)
    return None


@dataclass(frozen=True, slots=True)
class WidthInfo:
    """The labels of `dflash_verify_info`: mode as set ("3", "auto", "auto:1,3,7"), vLLM release, applied overlays."""

    mode: str
    release: str
    overlays: tuple[str, ...]


class WidthExporter:
    """The Prometheus series of one API server process.

    `export_reason` adds `dflash_verify_last_decision_info{reason}`. A label that changes with every decision would
    grow a production Prometheus without bound, so it is on only when the server has a control file, that is when
    somebody is measuring it, and it is refreshed at most once a second.
    """

    def __init__(self, info: WidthInfo, *, export_reason: bool = False, registry: Any = None) -> None:
        import prometheus_client as prom

        where: dict[str, Any] = {} if registry is None else {"registry": registry}
        # prometheus_client appends _total to counters.
        self._steps = prom.Counter(
            "dflash_verify_steps", "Engine steps that decoded, by verify width.", ["width"], **where
        )
        self._nonuniform = prom.Counter(
            "dflash_verify_nonuniform_steps", "Steps in which vLLM shortened some request below the width.", **where
        )
        self._verified = prom.Counter(
            "dflash_verify_verified_tokens", "Draft tokens verified, by position from 0.", ["position"], **where
        )
        self._accepted = prom.Counter(
            "dflash_verify_accepted_tokens", "Draft tokens accepted, by position from 0.", ["position"], **where
        )
        self._timed_steps = prom.Counter(
            "dflash_verify_timed_steps", "Steps whose duration is comparable, by width.", ["width"], **where
        )
        self._step_seconds = prom.Counter(
            "dflash_verify_step_seconds", "Duration of the timed steps, by width.", ["width"], **where
        )
        self._info = prom.Gauge(
            "dflash_verify_info",
            "Mode, vLLM release and overlays.",
            ["mode", "release", "overlays"],
            multiprocess_mode="max",
            **where,
        )
        self._active = prom.Gauge(
            "dflash_verify_policy_active",
            "1 while the configured mode decides the width, 0 while something else does.",
            multiprocess_mode="mostrecent",
            **where,
        )
        self._reason = None
        # Multi-process files cannot forget a label, so several API servers do without the sentence.
        if export_reason and "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
            self._reason = prom.Gauge(
                "dflash_verify_last_decision_info", "The controller's last reason.", ["reason"], **where
            )
        self._last_reason = ""
        self._next_reason_s = 0.0
        self._by_width: dict[int, tuple[Any, Any, Any]] = {}
        self._by_position: list[tuple[Any, Any]] = []
        self._info.labels(info.mode, info.release, ",".join(info.overlays)).set(1)

    def observe(self, record: WidthStats, spec_decoding_stats: Any = None) -> None:
        """Count one step; `spec_decoding_stats` is vLLM's SpecDecodingStats of the same step, or None (no drafts)."""
        series = self._by_width.get(record.width)
        if series is None:
            label = str(record.width)
            series = self._by_width[record.width] = (
                self._steps.labels(label),
                self._timed_steps.labels(label),
                self._step_seconds.labels(label),
            )
        steps, timed_steps, step_seconds = series
        steps.inc()
        if record.step_ms is not None:
            timed_steps.inc()
            step_seconds.inc(record.step_ms / 1000)
        if record.nonuniform:
            self._nonuniform.inc()
        self._active.set(int(record.policy_active))
        if spec_decoding_stats is not None:
            verified = spec_decoding_stats.num_draft_tokens_per_pos
            accepted = spec_decoding_stats.num_accepted_tokens_per_pos
            while len(self._by_position) < len(verified):
                # From 0 as in vllm:spec_decode_num_accepted_tokens_per_pos: PromQL joins the two on (position).
                position = str(len(self._by_position))
                self._by_position.append((self._verified.labels(position), self._accepted.labels(position)))
            for (verified_series, accepted_series), n, a in zip(self._by_position, verified, accepted, strict=False):
                if n:
                    verified_series.inc(n)
                if a:
                    accepted_series.inc(a)
        if self._reason is not None and record.reason != self._last_reason:
            now_s = time.monotonic()
            if now_s >= self._next_reason_s:
                self._reason.clear()
                self._reason.labels(record.reason).set(1)
                self._last_reason, self._next_reason_s = record.reason, now_s + _REASON_PERIOD_S


# prometheus_client's registry is one per process, and vLLM builds a new StatLoggerManager when it rescales.
_exporter: WidthExporter | None = None


def _process_exporter(info: WidthInfo) -> WidthExporter:
    global _exporter  # noqa: PLW0603  the registry behind it is global as well
    if _exporter is None:
        _exporter = WidthExporter(info, export_reason=bool(os.environ.get("DFLASH_CONTROL_FILE")))
    return _exporter


def manager_init(original: Callable[..., None], info: Callable[[], WidthInfo]) -> Callable[..., None]:
    """`StatLoggerManager.__init__` that also registers the series; `info` is asked then, when the plan is known."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _process_exporter(info())

    return __init__


def manager_record(original: Callable[..., None]) -> Callable[..., None]:
    """`StatLoggerManager.record` that first takes the width record out of the statistics and counts it."""

    def record(self: Any, scheduler_stats: Any, *args: Any, **kwargs: Any) -> None:
        if scheduler_stats is not None:
            width_stats = detach(scheduler_stats)
            if width_stats is not None and _exporter is not None:
                _exporter.observe(width_stats, scheduler_stats.spec_decoding_stats)
        original(self, scheduler_stats, *args, **kwargs)

    return record
