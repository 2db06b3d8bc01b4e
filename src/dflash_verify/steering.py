"""One engine's verify width, step by step: static, automatic, or what a control file says. Knows nothing of vLLM; the
scheduler tells it what was scheduled and what came back."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from dflash_verify.settings import VerifyTokens
from dflash_verify.width.controller import WidthController

CONTROL_PERIOD_S = 0.2  # how old a look at the control file may be
WAITED = 1.5  # a step that took so many times what it should, with a prefill launched behind it, waited for that launch
LEFT_MS = 0.06  # by how much a step is longer per request that left before it, on an H200's host (docs/results.md)
LEFT_SHARE = 0.02  # of a step's time: more is no longer what its batch and width cost
STARVED = 32  # timed steps in a row of which none was clean: what is not known is then learned from these


class ControlError(ValueError):
    """A control file that is refused; one sentence."""


@dataclass(slots=True)
class Step:
    """A step between `schedule` and `update_from_output`.

    width: K that was published for it. next_width: K that it publishes for the step behind it; its drafter's pass is left
    out where that is 0 (None: not known, taken as width). scheduled_s: when it was scheduled. batch: its requests. uniform: every request
    verifies exactly K drafts and nothing is prefilled, so its duration is that of a (batch, K) cell. cold: the first uniform
    step of its batch and width: its graph may be launched for the first time, which takes longer.
    """

    width: int
    scheduled_s: float
    batch: int
    uniform: bool
    decodes: int
    next_width: int | None = None
    cold: bool = False
    left: int = 0  # requests fewer than in the step before
    step_ms: float | None = None
    # Whether step_ms is that of a (batch, width) cell, which no launch that is known to be slow has moved (`arrived`).
    exact: bool = True
    prefill_behind: bool = False  # a step with a prefill was launched before this one's output was looked at
    ids: list[str] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)

    @property
    def steady(self) -> bool:
        """Whether it runs the drafter as every step at its width does. Between width 0 and another one, a step verifies as
        at one of them and drafts as at the other: the last step at 0 runs the drafter, the last wider one before 0 does not."""
        return self.next_width is None or (self.width > 0) == (self.next_width > 0)

    def observe(self, request_id: str, accepted: int, drafted: int) -> None:
        """One request's result: drafts accepted out of those that were valid."""
        self.ids.append(request_id)
        self.accepted.append(accepted)
        self.drafted.append(drafted)


class Control:
    """The live switch: a JSON file `{"width": "auto" | "stock" | K}`, read when it changes.

    Whole and valid or without effect: a half-written or wrong file is reported once and changes nothing, and a file
    that disappears returns the server to what it was started with.
    """

    def __init__(self, path: Path, draft_width: int, widths: Sequence[int], log: logging.Logger) -> None:
        self._path, self._draft_width, self._widths, self._log = path, draft_width, tuple(widths), log
        self._seen: tuple[int, int, int] | None = None
        self._next_look_s = 0.0
        self.choice: str | int | None = None  # None: as started

    def poll(self, now_s: float) -> None:
        """Look at the file if it was not looked at lately; `choice` is then current."""
        if now_s < self._next_look_s:
            return
        self._next_look_s = now_s + CONTROL_PERIOD_S
        try:
            stat = self._path.stat()
            mark = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        except OSError:
            if self._seen is not None:
                self._seen, self.choice = None, None
                self._log.info("dflash-verify: control file %s is gone: the width is as started.", self._path)
            return
        if mark == self._seen:
            return
        self._seen = mark
        try:
            choice = self._parse(self._path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, ControlError) as error:
            self._log.error("dflash-verify: control file %s is ignored: %s", self._path, error)
            return
        if choice != self.choice:
            self._log.info("dflash-verify: control file %s sets the width to %s.", self._path, choice)
            self.choice = choice

    def _parse(self, text: str) -> str | int:
        try:
            data = json.loads(text)
        except ValueError:
            raise ControlError(f'it is not JSON ({text[:40]!r}); write {{"width": "auto"}}.') from None
        if not isinstance(data, dict) or set(data) != {"width"}:
            raise ControlError(f'it holds {text.strip()[:60]!r}; expected one key, as in {{"width": 3}}.')
        value = data["width"]
        captured = ", ".join(map(str, self._widths))
        if value == "auto":
            return "auto"
        if value == "stock":
            value = self._draft_width
        if type(value) is not int or value not in self._widths:
            raise ControlError(f"width {data['width']!r} has no graphs here; captured are {captured}, or auto.")
        return "stock" if data["width"] == "stock" else value


class Steering:
    """Which width the next step gets.

    widths: captured ones. make_controller: builds the automatic controller when it is first needed, so that a static
    server pays nothing for it.
    """

    def __init__(
        self,
        verify_tokens: VerifyTokens,
        draft_width: int,
        widths: Sequence[int],
        make_controller: Callable[[], WidthController],
        *,
        control_file: Path | None = None,
        trace_file: Path | None = None,
        log: logging.Logger | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.draft_width = draft_width
        self.widths = tuple(widths)
        self.clock = clock
        self._start: str | int = "auto" if verify_tokens.mode == "auto" else verify_tokens.widths[0]
        self._make_controller = make_controller
        self.controller: WidthController | None = make_controller() if self._start == "auto" else None
        self._log = log or logging.getLogger(__name__)
        self._control = Control(control_file, draft_width, widths, self._log) if control_file else None
        self._trace: TextIO | None = open(trace_file, "a", buffering=1, encoding="utf-8") if trace_file else None  # noqa: SIM115
        self.published = draft_width if self._start == "auto" else int(self._start)
        # Set while measuring (profile.py).
        self.forced: int | None = None
        self.on_step: Callable[[Step], Any] | None = None
        self._ended: list[str] = []
        self._controller_s = 0.0  # since the last trace record
        self._last_end_s = 0.0
        self._busy = False
        self._after_mixed = False
        self._last_batch = 0  # of the step scheduled last
        self._unclean = 0  # timed steps in a row that were not
        self._warm: set[tuple[int, int]] = set()  # (batch, width) that have run

    # -- a step's way ------------------------------------------------------------------------------------------------

    def decide(self, running: Iterable[str]) -> int:
        """The width of the next step; asked once per scheduled step, after that step was put together."""
        if self._trace is None:
            self.published = self._width(running)
        else:
            began_s = time.perf_counter()
            self.published = self._width(running)
            self._controller_s += time.perf_counter() - began_s
        return self.published

    def _width(self, running: Iterable[str]) -> int:
        if self.forced is not None:
            return self.forced
        choice = self._choice()
        if choice == "stock":
            return self.draft_width
        if choice != "auto":
            return int(choice)
        if self.controller is None:
            self.controller = self._make_controller()
        return self.controller.decide(list(running)).width

    def _choice(self) -> str | int:
        if self._control is None:
            return self._start
        self._control.poll(self.clock())
        return self._start if self._control.choice is None else self._control.choice

    @property
    def policy_active(self) -> bool:
        """Whether the width is what the server was started with (False: the control file or a measurement decides)."""
        return self.forced is None and (self._control is None or self._control.choice is None)

    def scheduled(self, step: Step) -> None:
        """The step is about to be launched."""
        step.left = max(0, self._last_batch - step.batch)
        self._last_batch = step.batch
        if step.uniform:
            pair = step.batch, step.width
            step.cold = pair not in self._warm
            self._warm.add(pair)

    def arrived(self, step: Step, following: Step | None = None) -> None:
        """The step's output is here: how long did it take? Call before its results are observed.

        A step runs from the end of the one before, or, when the engine had nothing to do then, from its scheduling.
        following: the step in flight behind it, under asynchronous scheduling: it is launched before this one's output is
        looked at. A launch that outlasts the step before it (a cold graph, kernels of a prefill one by one) makes that step
        seem longer and its own shorter. A step with a prefill ends with its own launch, before the one behind it is
        launched: its output is looked at late, and the one behind it seems shorter.
        """
        now_s = self.clock()
        ahead = step.scheduled_s < self._last_end_s  # launched before the output of the one before was looked at
        begin_s = self._last_end_s if self._busy else max(self._last_end_s, step.scheduled_s)
        step.step_ms = (now_s - begin_s) * 1e3 if step.uniform and begin_s > 0.0 else None
        slow_launch = step.cold or (ahead and self._after_mixed) or (following is not None and following.cold)
        step.exact = step.steady and not slow_launch
        step.prefill_behind = following is not None and not following.uniform
        self._last_end_s = now_s
        self._after_mixed = not step.uniform

    def finished(self, step: Step, *, busy: bool) -> None:
        """The step's results are in. busy: whether requests remain, so that the next step follows at once."""
        self._busy = busy
        if self.on_step is not None:
            self.on_step(step)
        began_s = time.perf_counter()
        controller = self.controller if self.forced is None else None
        taught = False
        if controller is not None:
            if step.ids:
                controller.observe(step.ids, step.width, step.accepted, step.drafted)
            if step.step_ms is None or not self._teaches(step, controller):
                controller.interrupted()
            else:
                taught = True
                trusted = controller.cost.trusted
                controller.observe_step(step.batch, step.width, step.step_ms)
                if trusted and not controller.cost.trusted:
                    self._log.warning(
                        "dflash-verify: %s: the table is a guess from now on, and widths are timed while serving. If this "
                        "comes again after a restart, measure anew: dflash-verify profile --again -- MODEL ...",
                        controller.cost.contradiction,
                    )
            if self._ended:
                controller.forget(self._ended)
        self._ended.clear()
        if self._trace is not None:
            self._controller_s += time.perf_counter() - began_s
            self._write_trace(step, taught)

    def _teaches(self, step: Step, controller: WidthController) -> bool:
        """Whether the cost model may see the step's time. Where every second step has a prefill none would ever be clean:
        what is not known otherwise is then learned from them as they are."""
        if step.exact and not self._moved(step, controller):
            self._unclean = 0
            return True
        self._unclean += 1
        return self._unclean > STARVED and controller.cost.learning

    @staticmethod
    def _moved(step: Step, controller: WidthController) -> bool:
        """Whether the step's time is that of something else: launching a prefill behind it, without a graph, keeps the
        process from looking at this step's output, for up to 0.2 s on a hybrid model; and where many requests have left since the
        step before, the next one that verifies is longer: 125 of them made one of 20 ms last 30."""
        if step.step_ms is None or not (step.left or step.prefill_behind):
            return False
        expected_ms = controller.cost.expected_ms(step.batch, step.width)
        if step.width > 0 and step.left * LEFT_MS > LEFT_SHARE * (expected_ms or step.step_ms):
            return True
        return step.prefill_behind and (expected_ms is None or step.step_ms > WAITED * expected_ms)

    def restart(self) -> None:
        """As after start: a controller that has seen nothing, with the cost table that is stored now."""
        if self.controller is not None:
            self.controller = self._make_controller()
        self.published = self.draft_width if self._start == "auto" else int(self._start)

    def ended(self, request_id: str) -> None:
        """Finished, aborted or preempted: nothing of the request stays once this step's results are in."""
        self._ended.append(request_id)

    @property
    def explains(self) -> bool:
        """Whether anybody reads `reason`: it is exported only where a control file says that the server is being measured."""
        return self._control is not None

    @property
    def reason(self) -> str:
        """The controller's last sentence, or what else decides."""
        if self.controller is not None and self._choice() == "auto":
            return self.controller.reason
        return f"{self.published}: {'set' if self.policy_active else 'control file'}"

    def _write_trace(self, step: Step, taught: bool) -> None:
        """taught: whether the cost model was given the step's time."""
        assert self._trace is not None
        record: dict[str, Any] = {
            "t": round(time.time(), 4),
            "width": step.width,
            "batch": step.batch,
            "decodes": step.decodes,
            "uniform": step.uniform,
            "step_ms": None if step.step_ms is None else round(step.step_ms, 3),
            "taught": taught,
            "drafted": step.drafted,
            "accepted": step.accepted,
            "next_width": self.published,
            "controller_us": round(self._controller_s * 1e6, 1),
        }
        self._controller_s = 0.0
        self._trace.write(json.dumps(record) + "\n")
