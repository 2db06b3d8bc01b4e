"""Which width the next step verifies: the captured one with the best expected goodput for this batch."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dflash_verify.width.acceptance import ESTIMATORS, PRIOR_ROW, AcceptanceEstimator, IntArray
from dflash_verify.width.cost import CostModel, CostTable

Array = np.ndarray[Any, np.dtype[np.float64]]
SQRT_2 = math.sqrt(2.0)
SQRT_2PI = math.sqrt(2.0 * math.pi)


class Decision(NamedTuple):
    """One step's width and why.

    expected_tokens: over the batch, this step. step_ms: what the step is expected to take. probe: the width was chosen
    to learn (acceptance one width up, or a cost), not because it is the best known.
    """

    width: int
    expected_tokens: float
    step_ms: float
    probe: bool
    why: str  # "best", "warm-up", "probe", "explore", "idle"
    best: tuple[int, float, float]  # width, tokens, ms of what is believed best
    against: tuple[int, float, float]  # ... of the best other width

    @property
    def reason(self) -> str:
        """In words, e.g. `3: 2.74 tok / 98.4 ms beats 7: 3.33 / 121.0`. Tokens are those the decision compares: over
        the batch, weighted so that a slow request counts as much as a fast one."""
        if self.why == "idle":
            return f"{self.width}: nothing is running"
        if self.why == "warm-up":
            return f"{self.width}: full width until acceptance is known"
        width, tokens, ms = self.best
        other, other_tokens, other_ms = self.against
        text = f"{width}: {tokens:.2f} tok / {ms:.1f} ms"
        if other != width:
            verb = "beats" if tokens * other_ms >= other_tokens * ms else "stays within hysteresis of"
            text += f" {verb} {other}: {other_tokens:.2f} / {other_ms:.1f}"
        if self.why == "probe":
            return f"{self.width}: probes whether wider pays; {text}"
        if self.why == "explore":
            return f"{self.width}: tries what it costs; {text}"
        return text


class WidthController:
    """Per step one width for the whole batch. The same object serves vLLM's scheduler and `dflash-verify simulate`.

    Order of calls per step: `observe` and `observe_step` for what has come back, `forget` for what has ended, `decide`
    for what runs. Requests are introduced by `decide` and live until `forget`; observations of others teach only the
    shared prior. Numbers and ablations: docs/width.md.
    """

    HYSTERESIS = 1.005
    WARM_UP = 16  # request-observations of the engine, not per request
    PROBE_SHARE = 0.002  # of step time, paid for looking one width up
    PROBE_CAP_STEPS = 0.8
    PROBE_EVERY = 16
    BLIND_STEPS = 64  # width 0 observes nothing: look again at least this often,
    NEWS_SHARE = 0.5  # ... and once so much of the batch has never been observed,
    NEWS_STEPS = 16  # ... though not more often than this, and half as often after each such look that changed nothing
    LOOK_STEPS = 4  # decisions until a look's result is known
    EXPLORE_START_STEPS = 3.0
    EXPLORE_SHARE = 0.005
    EXPLORE_CAP_STEPS = 9.0
    EXPLORE_HORIZON = 1000.0  # steps that a better width would serve
    EXPLORE_SAMPLES = (1, 4, 16)
    EXPLORE_SDS = 4.0  # not worth a computation beyond
    KEEP_REQUESTS = 1024  # requests never forgotten by the caller are dropped beyond this many (or 4 x the batch)

    def __init__(
        self,
        widths: Sequence[int],
        draft_width: int,
        cost: CostTable | CostModel | None = None,
        *,
        estimator: str = "class",
    ) -> None:
        """widths: captured ones; the draft width is added if missing. cost: None learns step times from full width on.

        Raises CostTableError for widths out of range or not in the table, ValueError for an unknown estimator.
        """
        if estimator not in ESTIMATORS:
            raise ValueError(f"estimator {estimator!r} is unknown; expected one of {', '.join(ESTIMATORS)}")
        self.widths = tuple(sorted({*widths, draft_width}))
        self.draft_width = draft_width
        self.cost = cost if isinstance(cost, CostModel) else CostModel(self.widths, draft_width, cost)
        if self.cost.widths != self.widths:
            raise ValueError(f"the cost model has widths {self.cost.widths}; expected {self.widths}")
        self._acceptance: AcceptanceEstimator = ESTIMATORS[estimator](self.widths, draft_width)
        self._widest = len(self.widths) - 1
        self._last = self._widest
        self._credit_ms = 0.0
        self._since = 0
        self._blind = 0
        self._unlooked = self._news_wait = (
            self.NEWS_STEPS
        )  # steps since a look from width 0, and until the next one at new requests
        self._explore_ms: float | None = None
        self._seen = 0
        self._rows: dict[str, int] = {}  # live requests; PRIOR_ROW until first observed
        self._free: list[int] = []
        self._top = PRIOR_ROW
        self._batch_ids: list[str] = []
        self._batch_rows: IntArray = np.empty(0, dtype=np.intp)
        self._batch_has_new = False  # requests that were not observed yet
        self._unseen: set[str] = set()  # live requests that had no draft verified yet, where there is a width 0
        self._ones: dict[int, Array] = {}
        self.steps = dict.fromkeys(self.widths, 0)
        self.probes = 0
        self.explorations = 0
        self._decision: Decision | None = None

    # -- what has come back ------------------------------------------------------------------------------------------

    def observe(
        self,
        request_ids: Sequence[str],
        width: int,
        accepted: Sequence[int],
        drafted: Sequence[int] | None = None,
    ) -> None:
        """Accepted drafts of one step at `width`, per request.

        drafted: drafts that were valid, at most `width`: fewer where a grammar rejected the rest. What it rejected was
        never offered to the target and counts as not seen.
        """
        if not request_ids:
            return
        ids = request_ids if type(request_ids) is list else list(request_ids)
        rows = self._rows_to_learn(ids)
        if width == 0:
            self._acceptance.pass_step(rows)
            return
        if self._unseen:
            self._unseen.difference_update(ids)
        took = np.array(accepted, dtype=np.intp)
        self._acceptance.observe(rows, took, width if drafted is None else np.array(drafted, dtype=np.intp))
        self._seen += len(ids)

    def observe_step(self, batch: int, width: int, step_ms: float) -> None:
        """Time of one clean step: uniform width, no prefill, no idle."""
        self.cost.observe(batch, width, step_ms)

    def interrupted(self) -> None:
        """The next step observed does not follow the last one: a step with prompts, or without a clean time, was between them."""
        self.cost.interrupted()

    def forget(self, request_ids: Sequence[str]) -> None:
        """Finished, aborted or preempted: nothing of them is kept but what the shared prior learned."""
        if self._unseen:
            self._unseen.difference_update(request_ids)
        for request_id in request_ids:
            row = self._rows.pop(request_id, None)
            if row is None:
                continue
            if row != PRIOR_ROW:
                self._free.append(row)
            if request_id in self._batch_ids:
                place = self._batch_ids.index(request_id)
                del self._batch_ids[place]
                rows = self._batch_rows
                self._batch_rows = np.concatenate([rows[:place], rows[place + 1 :]])

    def _rows_to_learn(self, ids: list[str]) -> IntArray:
        """Rows of these requests; live ones without one get one, ended ones are read and written at the prior."""
        known = self._rows
        if ids == self._batch_ids:
            if self._batch_has_new:
                rows = self._batch_rows.copy()  # a new array, since the estimator knows the old one by identity
                for i in np.flatnonzero(rows == PRIOR_ROW).tolist():
                    rows[i] = known[ids[i]] = self._new_row()
                self._batch_rows = rows
                self._batch_has_new = False
            return self._batch_rows
        found = [known.get(request_id, -1) for request_id in ids]
        if PRIOR_ROW in found:
            found = [self._first_row(i) if row == PRIOR_ROW else row for i, row in zip(ids, found, strict=True)]
            current = [known[request_id] for request_id in self._batch_ids]
            self._batch_rows = np.array(current, dtype=np.intp)
            self._batch_has_new = PRIOR_ROW in current
        rows = np.array(found, dtype=np.intp)
        np.maximum(rows, PRIOR_ROW, out=rows)
        return rows

    def _first_row(self, request_id: str) -> int:
        row = self._rows[request_id] = self._new_row()
        return row

    def _new_row(self) -> int:
        if self._free:
            row = self._free.pop()
        else:
            self._top += 1
            row = self._top
        self._acceptance.admit(row)
        return row

    def _rows_to_read(self, ids: list[str]) -> IntArray:
        """Rows of the batch. It is mostly the last one, less what was forgotten, with new requests at its end."""
        have = len(self._batch_ids)
        if ids == self._batch_ids:
            return self._batch_rows
        known = self._rows
        appended = have > 0 and ids[:have] == self._batch_ids
        if self.widths[0] == 0:
            self._unseen.update(request_id for request_id in ids[have * appended :] if request_id not in known)
        if appended:
            fresh = [known.setdefault(request_id, PRIOR_ROW) for request_id in ids[have:]]
            self._batch_rows = np.concatenate([self._batch_rows, np.array(fresh, dtype=np.intp)])
            self._batch_ids.extend(ids[have:])
            self._batch_has_new = self._batch_has_new or PRIOR_ROW in fresh
        else:
            rows = [known.setdefault(request_id, PRIOR_ROW) for request_id in ids]
            self._batch_rows = np.array(rows, dtype=np.intp)
            self._batch_ids = ids.copy()
            self._batch_has_new = PRIOR_ROW in rows
        if len(known) > max(self.KEEP_REQUESTS, 4 * len(ids)):
            running = set(ids)
            self.forget([request_id for request_id in known if request_id not in running])
        return self._batch_rows

    # -- what runs next ----------------------------------------------------------------------------------------------

    def decide(self, request_ids: Sequence[str]) -> Decision:
        """The width for this batch."""
        ids = request_ids if type(request_ids) is list else list(request_ids)
        batch = len(ids)
        if batch == 0:
            width = self.widths[self._last]
            nothing = (width, 0.0, 0.0)
            return Decision(width, 0.0, 0.0, False, "idle", nothing, nothing)
        rows = self._rows_to_read(ids)
        expected = self._acceptance.expected(rows)
        plain, tokens = self._sums(expected, batch)
        ms, cov = self.cost.row(batch)
        last = self._last
        goodput = [t / c for t, c in zip(tokens, ms, strict=True)]
        best = self._best_known(goodput) if cov is not None else goodput.index(max(goodput))
        if self._seen < self.WARM_UP:
            chosen, why, best = self._widest, "warm-up", self._widest
        else:
            if goodput[best] < self.HYSTERESIS * goodput[last]:
                best = last
            chosen, why = self._look_around(batch, best, tokens, ms, goodput, cov)
        self._last = best
        width = self.widths[chosen]
        self.steps[width] += 1
        goodput[best], reached = -1.0, goodput[best]
        other = goodput.index(max(goodput))
        goodput[best] = reached
        decision = Decision(
            width,
            plain[chosen],
            ms[chosen],
            chosen != best,
            why,
            (self.widths[best], tokens[best], ms[best]),
            (self.widths[other], tokens[other], ms[other]),
        )
        self._decision = decision
        return decision

    def _sums(self, expected: Array, batch: int) -> tuple[list[float], list[float]]:
        """Expected tokens per width over the batch: plain, and with each request weighted by 1 / its own tokens.

        Every request has a fixed number of tokens to emit, so a token for a request that emits few is worth more of a
        slot's time; maximising the plain sum over-serves the fast ones (docs/width.md).
        """
        if batch == 1:
            row = expected[0].tolist()[:-1]
            return row, row
        weights = self._ones.get(batch)
        if weights is None:
            if len(self._ones) > 1024:
                self._ones.clear()
            weights = self._ones[batch] = np.ones((2, batch))
        np.divide(1.0, expected[:, self._last], out=weights[1])
        plain, fair = (weights @ expected).tolist()
        scale = batch / fair[-1]
        return plain[:-1], [t * scale for t in fair[:-1]]

    def _best_known(self, goodput: list[float]) -> int:
        """The best width among those that were timed: no width is chosen on a guess of its cost."""
        best = self._widest
        for j, rate in enumerate(goodput):
            if rate > goodput[best] and self.cost.known(j):
                best = j
        return best

    def _look_around(
        self,
        batch: int,
        best: int,
        tokens: list[float],
        ms: list[float],
        goodput: list[float],
        cov: list[list[float]] | None,
    ) -> tuple[int, str]:
        """The width to run: the best, or now and then another one, paid from a bounded credit."""
        rate = tokens[best] / ms[best]
        if cov is not None and self.cost.known(self._widest):
            tried = self._worth_trying(best, tokens, ms, goodput, cov)
            if tried is not None:
                self.explorations += 1
                return tried, "explore"
        self._unlooked += 1
        if self.widths[best] > 0 and self._unlooked <= self.LOOK_STEPS:
            self._news_wait = self.NEWS_STEPS
        if best == self._widest:
            self._since = self._blind = 0
            return best, "best"
        self._since += 1
        self._blind = self._blind + 1 if self.widths[best] == 0 else 0
        news = self.widths[best] == 0 and self._unlooked >= self._news_wait
        news = news and len(self._unseen) >= self.NEWS_SHARE * batch
        self._credit_ms = min(self._credit_ms + self.PROBE_SHARE * ms[best], self.PROBE_CAP_STEPS * ms[best])
        wider = best + 1
        if self.widths[best] == 0:
            # Width 1 shows one draft, too little to judge the others by when nothing else is seen.
            timed = (j for j in range(1, len(goodput)) if self.cost.known(j))
            wider = max(timed, key=goodput.__getitem__, default=self._widest)
        loss = ms[wider] - tokens[wider] / rate
        due = self._since >= self.PROBE_EVERY and self._credit_ms >= loss
        if due or news or self._blind >= self.BLIND_STEPS:
            if self.widths[best] == 0:
                self._unlooked = 0
            if news:
                self._news_wait = min(2 * self._news_wait, self.BLIND_STEPS)
            self._credit_ms = max(0.0, self._credit_ms - max(0.0, loss))
            self._since = self._blind = 0
            self.probes += 1
            return wider, "probe"
        return best, "best"

    def _worth_trying(
        self, best: int, tokens: list[float], ms: list[float], goodput: list[float], cov: list[list[float]]
    ) -> int | None:
        """A width whose cost is worth knowing better, if the credit pays for it.

        The knowledge gradient: what m more timings are expected to gain over the horizon, less what they lose. A near-tie
        that is well known gains nothing and is left alone, which a confidence bound would keep trying.
        """
        full_ms = ms[self._widest]
        if self._explore_ms is None:
            self._explore_ms = self.EXPLORE_START_STEPS * full_ms
        cap = self.EXPLORE_CAP_STEPS * full_ms
        self._explore_ms = min(self._explore_ms + self.EXPLORE_SHARE * ms[best], cap)
        noise = self.cost.noise_var
        choice, most = None, 0.0
        for j, beside in enumerate(cov[best]):
            if j == best:
                continue
            variance = cov[j][j]
            shared = variance - beside  # what timing j says about the ratio of j to the best
            gap = math.log(goodput[best] / goodput[j])
            if shared <= 0.0 or gap * math.sqrt(variance) > self.EXPLORE_SDS * shared:
                continue
            loss = max(0.0, 1.0 - goodput[j] / goodput[best]) * ms[j] / ms[best]
            for samples in self.EXPLORE_SAMPLES:
                learned = shared / math.sqrt(variance + noise / samples)
                z = gap / learned
                gain = learned * (math.exp(-0.5 * z * z) / SQRT_2PI - z * 0.5 * math.erfc(z / SQRT_2))
                value = self.EXPLORE_HORIZON * gain - samples * loss
                if value > most and loss * ms[best] <= self._explore_ms:
                    choice, most = j, value
        if choice is not None:
            self._explore_ms -= max(0.0, 1.0 - goodput[choice] / goodput[best]) * ms[choice]
        return choice

    @property
    def reason(self) -> str:
        """Why the last decision was taken, in words."""
        return self._decision.reason if self._decision is not None else f"{self.draft_width}: no step yet"

    def snapshot(self) -> dict[str, Any]:
        """For the live view and metrics: the last decision, what is believed, how often each width was decided."""
        decision = self._decision
        return {
            "width": decision.width if decision else self.widths[self._widest],
            "reason": self.reason,
            "expected_tokens": decision.expected_tokens if decision else None,
            "step_ms": decision.step_ms if decision else None,
            "decisions": dict(self.steps),
            "probes": self.probes,
            "explorations": self.explorations,
            "survival": [round(s, 4) for s in self._acceptance.survival().tolist()],
            "cost": "measured" if self.cost.trusted else "doubted" if self.cost.table is not None else "learned",
            "observed_steps": self.cost.observed_steps,
            "requests": len(self._rows),
        }
