"""How many drafts the target will accept: two estimators behind one interface.

Both see, per request and step, only `accepted = min(a, drafted)`: what lies beyond the verified prefix is censored, not
rejected. Row 0 of every estimator is the shared prior: requests that have shown nothing yet are read there, and what a
request shows after it has ended is learned there and nowhere else.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.intp]

PRIOR_ROW = 0
MIN_ROWS = 64


class AcceptanceEstimator(Protocol):
    """What the controller asks of an estimator. W = number of widths, N = draft width, B = requests of a step."""

    def expected(self, rows: IntArray) -> Array:
        """Tokens that each request emits at each width, [B, W + 1]; the last column is 1 (so that sums of weights fall
        out of the same matrix product)."""

    def observe(self, rows: IntArray, accepted: IntArray, drafted: int | IntArray) -> None:
        """Learn from one step. accepted: [B]; drafted: drafts that were offered, for all or [B]. Both 0 .. N; more
        accepted than drafted counts as all of them, drafted 0 shows nothing."""

    def pass_step(self, rows: IntArray) -> None:
        """A step that verified nothing (width 0): time passed, beliefs fade towards the shared prior."""

    def admit(self, row: int) -> None:
        """Start a request in `row`, informed by the shared prior."""

    def survival(self) -> Array:
        """The shared prior's survival curve, [N]: P(first i drafts accepted)."""


def _outcome_table(draft_width: int) -> IntArray:
    """Row of the outcome tables by [drafted, accepted]: `accepted` where a draft was rejected, N + 1 further on where all
    that were offered were accepted."""
    drafted, accepted = np.indices((draft_width + 1, draft_width + 1))
    shown = np.minimum(accepted, drafted)
    table: IntArray = shown + (draft_width + 1) * (shown == drafted)
    return table


class _Outcomes:
    """Looks up outcomes for a step, all requests at one width or each at its own."""

    def __init__(self, draft_width: int) -> None:
        self._table = _outcome_table(draft_width)
        self._by_width = list(self._table)
        self._flat = self._table.ravel()
        self._stride = draft_width + 1

    def __call__(self, accepted: IntArray, drafted: int | IntArray) -> IntArray:
        if isinstance(drafted, int):
            uniform: IntArray = self._by_width[drafted].take(accepted)
            return uniform
        mixed: IntArray = self._flat.take(drafted * self._stride + accepted)
        return mixed


def _outcome_masks(draft_width: int) -> tuple[Array, Array]:
    """Trials and successes by outcome, [2 (N + 1), N]: a rejection at o tries o + 1 positions, a censored run o."""
    position = np.arange(1, draft_width + 1)
    count = np.arange(draft_width + 1)[:, None]
    success = (position <= count).astype(np.float64)
    trial = (position <= count + 1).astype(np.float64)
    return np.vstack([trial, success]), np.vstack([success, success])


def _x_log_x(values: Array) -> float:
    """Sum of x log x, 0 for x = 0."""
    return float((values * np.log(np.maximum(values, 1e-12))).sum())


class ClassFilter:
    """A switching Bayes filter per request over acceptance classes, with a shared per-position shape.

    Ten classes accept every draft with one conditional probability, four are "all or nothing": the first draft decides.
    Tying positions together is what lets a run of full acceptances at a narrow width speak about the wide one.
    Constants and ablations: docs/width.md.
    """

    GEOMETRIC = (0.15, 0.35, 0.5, 0.62, 0.72, 0.80, 0.87, 0.93, 0.97, 0.995)
    ALL_OR_NOTHING = (0.3, 0.5, 0.7, 0.87)
    ALL_OR_NOTHING_TAIL = 0.97
    ALL_OR_NOTHING_MASS = 0.3
    SWITCH = 0.02  # a request changes its class about every 50 steps
    FLAT = 0.1  # share of a switch that ignores what was learned, so that no class ever dies out
    POOL = 0.98  # memory of the shared prior per request-observation
    POOL_MAX = 16  # ... but a large batch counts as this many
    SHAPE_YOUNG = 3  # steps before a request speaks about shape: its level must be known first
    SHAPE_INERTIA = 2.0
    SHAPE_MEMORY = 400.0  # cap of the accumulated information: the shape keeps moving
    SHAPE_LIMIT = 5.0
    REBUILD_FIRST = 16  # the shape is learned and the tables follow it at each of the first updates,
    REBUILD_EARLY = 8  # then every 8th,
    REBUILD_LATE = 16  # and once the shape has settled every 16th
    SETTLED = 256
    COMMON_BATCH = 2  # requests that can show together that all of them changed
    COMMON_MEMORY = 0.9  # of what they showed, per step: small batches need several,
    COMMON_ALONE = 32  # so many requests none but the last
    COMMON_MARGIN = 10.0  # log odds against that, before a step,
    COMMON_MARGIN_EACH = 0.1  # and more for each request: what a filter in its own noise loses against any mixture
    COMMON_ROUNDS = 12  # of expectation maximisation, from flat
    LARGE_BATCH = 64  # from here on tokens are written to the rows when observed, not when a decision asks for them

    def __init__(self, widths: Sequence[int], draft_width: int) -> None:
        n = draft_width
        self._n = n
        self._widths = np.asarray(widths, dtype=np.intp)
        hazard = np.array(
            [[h] * n for h in self.GEOMETRIC]
            + [[h] + [self.ALL_OR_NOTHING_TAIL] * (n - 1) for h in self.ALL_OR_NOTHING]
        )
        self._logit = np.log(hazard / (1.0 - hazard))
        self.classes = classes = len(hazard)
        geometric = len(self.GEOMETRIC)
        self._flat = np.empty(classes)
        self._flat[:geometric] = (1.0 - self.ALL_OR_NOTHING_MASS) / geometric
        self._flat[geometric:] = self.ALL_OR_NOTHING_MASS / len(self.ALL_OR_NOTHING)
        self._switch_flat = self.SWITCH * self.FLAT * self._flat
        self.prior = self._flat.copy()
        self._all_classes = np.ones(classes)
        self.shape = np.zeros(n)  # delta, added to the logits; position 1 stays 0: it defines the level
        self._information = np.zeros(n)
        self._outcome = _Outcomes(n)
        self._trial, self._success = _outcome_masks(n)
        # Outcomes of the last steps by drafts offered, [N + 1, 2 (N + 1)], and the log evidence of what was believed of them.
        self._seen = np.zeros((n + 1, 2 * (n + 1)))
        self._seen_total = 0.0
        self._evidence = 0.0
        self._updates = 0
        self._posterior = np.tile(self.prior, (MIN_ROWS, 1))
        self._born = np.zeros(MIN_ROWS, dtype=np.intp)  # update at which the row's request came
        # Steps since the last rebuild: rows, update, beliefs before, outcomes.
        self._shape_steps: list[tuple[IntArray, int, Array, IntArray]] = []
        # The batch of the last step stays gathered while it stays the same array: no copy to and from the rows.
        self._rows = np.zeros(1, dtype=np.intp)
        self._belief = self._posterior[:1].copy()
        self._rebuild()
        self._tokens = self._belief @ self._gain
        self._row_tokens = np.tile(self._tokens, (MIN_ROWS, 1))
        self._tokens_written = True
        self._averages: dict[int, Array] = {}

    def _rebuild(self) -> None:
        hazard = 1.0 / (1.0 + np.exp(-(self._logit + self.shape)))
        self._survival = np.ones((self.classes, self._n + 1))
        np.cumprod(hazard, axis=1, out=self._survival[:, 1:])
        s = self._survival.T  # [N + 1, C]
        self._likelihood = np.concatenate([s, s])
        self._likelihood[: self._n] -= s[1:]
        tokens = np.cumsum(self._survival, axis=1)  # sum over S_0 .. S_i = 1 + expected accepted at width i
        self._gain = np.ones((self.classes, len(self._widths) + 1))
        self._gain[:, :-1] = tokens[:, self._widths]

    def admit(self, row: int) -> None:
        have = len(self._posterior)
        if row >= have:
            size = max(row + 1, 2 * have)
            self._posterior = np.resize(self._posterior, (size, self.classes))
            self._row_tokens = np.resize(self._row_tokens, (size, self._row_tokens.shape[1]))
            self._born = np.resize(self._born, size)
        if (self._rows == row).any():  # the row of a request that has ended: do not write it back
            self._gather(np.zeros(1, dtype=np.intp))
        self._posterior[row] = self.prior
        self._row_tokens[row] = self.prior @ self._gain
        self._born[row] = self._updates

    def _write_back(self) -> None:
        self._posterior[self._rows] = self._belief
        self._posterior[PRIOR_ROW] = self.prior

    def _write_tokens(self) -> None:
        self._row_tokens[self._rows] = self._tokens
        self._row_tokens[PRIOR_ROW] = self.prior @ self._gain
        self._tokens_written = True

    def _gather(self, rows: IntArray) -> None:
        if not self._tokens_written:
            self._write_tokens()
        self._write_back()
        self._rows = rows
        self._belief = self._posterior.take(rows, axis=0)
        self._tokens = self._row_tokens.take(rows, axis=0)

    def _keep(self, belief: Array) -> None:
        """The gathered batch's new beliefs, with where a switch may have led each request."""
        belief += self.SWITCH * (1.0 - self.FLAT) * self.prior + self._switch_flat
        self._belief = belief
        self._tokens = belief @ self._gain
        self._tokens_written = False
        if len(belief) > self.LARGE_BATCH:
            self._write_tokens()

    def expected(self, rows: IntArray) -> Array:
        if rows is self._rows:
            return self._tokens
        if not self._tokens_written:
            self._write_tokens()
        tokens: Array = self._row_tokens.take(rows, axis=0)
        return tokens

    def survival(self) -> Array:
        curve: Array = (self.prior @ self._survival)[1:]
        return curve

    def observe(self, rows: IntArray, accepted: IntArray, drafted: int | IntArray) -> None:
        if rows is not self._rows:
            self._gather(rows)
        belief = self._belief
        outcome = self._outcome(accepted, drafted)
        self._shape_steps.append((rows, self._updates, belief, outcome))
        belief = belief * self._likelihood.take(outcome, axis=0)
        evidence = belief @ self._all_classes
        count = len(rows)
        common = None
        if count >= self.COMMON_BATCH:
            common = self._common_change(outcome, drafted, evidence)
        elif self._seen_total:
            self._forget_steps()
        if common is not None:
            self.prior = common
            belief = common * self._likelihood.take(outcome, axis=0)
            evidence = belief @ self._all_classes
        # .98 of what was concluded stays; the rest is what a switch leads to.
        belief *= ((1.0 - self.SWITCH) / evidence)[:, None]
        average = self._averages.get(count)
        if average is None:
            if len(self._averages) > 1024:
                self._averages.clear()
            average = self._averages[count] = np.full(count, 1.0 / (count * (1.0 - self.SWITCH)))
        step = 1.0 - self.POOL ** min(count, self.POOL_MAX)
        self.prior += step * (average @ belief - self.prior)
        self._updates += 1
        every = self.REBUILD_EARLY if self._updates <= self.SETTLED else self.REBUILD_LATE
        if self._updates <= self.REBUILD_FIRST or self._updates % every == 0:
            self._learn_shape()
            self._rebuild()
        self._keep(belief)

    def _common_change(self, outcome: IntArray, drafted: int | IntArray, evidence: Array) -> Array | None:
        """The mixture of classes that the last steps suggest, if it explains them so much better than what is believed of
        each request that all of them must have changed at once: new text, or new requests unlike the ones before.

        Each request's own filter needs several steps to say so, since one step of one request says little; those of a
        large batch say it together. Beliefs that tell requests apart explain a mixed batch better than any one mixture
        does, so these are left alone.
        """
        count = len(outcome)
        memory = max(0.0, self.COMMON_MEMORY * (1.0 - count / self.COMMON_ALONE))
        if self._seen_total > 0.0:  # what a larger batch left behind must not outweigh this one
            memory = min(memory, memory * count / ((1.0 - memory) * self._seen_total))
        self._seen *= memory
        seen = np.bincount(outcome + drafted * self._seen.shape[1], minlength=self._seen.size)
        self._seen += seen.reshape(self._seen.shape)
        self._seen[0] = 0.0  # no draft was offered: nothing was seen
        self._evidence = memory * self._evidence + float(np.log(evidence).sum())
        by_width = self._seen.sum(axis=1)
        self._seen_total = total = float(by_width.sum())
        believed = self._evidence + self.COMMON_MARGIN + self.COMMON_MARGIN_EACH * total
        # No mixture explains them better than their own frequencies at each width: nothing to look for.
        if _x_log_x(self._seen) - _x_log_x(by_width) <= believed:
            return None
        counts = self._seen.sum(axis=0)
        mixture = self._flat
        for _ in range(self.COMMON_ROUNDS):
            share = self._likelihood * mixture
            mixture = ((counts / share.sum(axis=1)) @ share) / total
        if float(counts @ np.log(self._likelihood @ mixture)) <= believed:
            return None
        self._forget_steps()
        return mixture

    def _forget_steps(self) -> None:
        """The last steps say nothing about the next: everyone starts anew, or a step was of one request or of none."""
        self._seen[:] = 0.0
        self._seen_total = 0.0
        self._evidence = 0.0

    def pass_step(self, rows: IntArray) -> None:
        if rows is not self._rows:
            self._gather(rows)
        self._forget_steps()
        self._keep((1.0 - self.SWITCH) * self._belief)

    def _learn_shape(self) -> None:
        """What the steps since the last rebuild say about shape, from requests whose level is known: not the young, not the
        ended."""
        kept = self._shape_steps
        if not kept:
            return
        rows = np.concatenate([step[0] for step in kept])
        age = np.repeat([step[1] for step in kept], [len(step[0]) for step in kept]) - self._born.take(rows)
        settled = np.flatnonzero((age >= self.SHAPE_YOUNG) & (rows != PRIOR_ROW))
        belief = np.concatenate([step[2] for step in kept])[settled]
        outcome = np.concatenate([step[3] for step in kept])[settled]
        kept.clear()
        if not len(settled):
            return
        survival = belief @ self._survival
        predicted = survival[:, 1:] / survival[:, :-1]
        predicted *= self._trial.take(outcome, axis=0)
        hits = np.bincount(outcome, minlength=len(self._success)) @ self._success
        total = predicted.sum(axis=0)
        self._information += total - np.einsum("ij,ij->j", predicted, predicted)
        np.minimum(self._information, self.SHAPE_MEMORY, out=self._information)
        self.shape += (hits - total) / (self._information + self.SHAPE_INERTIA)
        np.clip(self.shape, -self.SHAPE_LIMIT, self.SHAPE_LIMIT, out=self.shape)
        self.shape[0] = 0.0


class PositionHazard:
    """Per request and position, how often draft i is accepted once draft i - 1 was; positions not seen follow the pool.

    An unseen position keeps the pool's odds ratio to the position before it. Relaxing towards the previous position's
    level instead underestimates all-or-nothing text.
    """

    REQUEST_MEMORY = 0.97  # per observation
    POOL_MEMORY = 0.999  # per step
    POOL_TRIALS = 300.0
    POOL_INERTIA = 4.0
    FIRST_HAZARD = 0.85  # before anything was seen: optimistic, since the start is at full width
    REQUEST_INERTIA = 3.0
    CARRY = 0.7  # how much of a request's deviation at one position is expected at the next
    LOW, HIGH = 0.01, 0.995

    def __init__(self, widths: Sequence[int], draft_width: int) -> None:
        self._n = draft_width
        self._widths = np.asarray(widths, dtype=np.intp)
        self._outcome = _Outcomes(draft_width)
        self._trial, self._success = _outcome_masks(draft_width)
        self._pool_trials = np.zeros(draft_width)
        self._pool_hits = np.zeros(draft_width)
        self._trials = np.zeros((MIN_ROWS, draft_width))
        self._hits = np.zeros((MIN_ROWS, draft_width))
        self._tokens = np.zeros((MIN_ROWS, len(self._widths) + 1))
        self._refresh_pool()

    def _refresh_pool(self) -> None:
        pool: list[float] = []
        before = self.FIRST_HAZARD
        for hits, trials in zip(self._pool_hits.tolist(), self._pool_trials.tolist(), strict=True):
            before = (hits + self.POOL_INERTIA * before) / (trials + self.POOL_INERTIA)
            pool.append(before)
        self._pool = np.array(pool)
        clipped = np.clip(self._pool, self.LOW, self.HIGH)
        self._pool_odds = clipped / (1.0 - clipped)
        self._tokens[PRIOR_ROW] = self._count(self._pool[None])[0]

    def _count(self, hazard: Array) -> Array:
        """Tokens at each width and the column of ones, from hazards [B, N]."""
        tokens = np.ones((len(hazard), self._n + 1))
        np.cumprod(hazard, axis=1, out=tokens[:, 1:])
        np.cumsum(tokens, axis=1, out=tokens)
        return np.concatenate([tokens[:, self._widths], np.ones((len(hazard), 1))], axis=1)

    def admit(self, row: int) -> None:
        if row >= len(self._trials):
            size = max(row + 1, 2 * len(self._trials))
            self._trials = np.resize(self._trials, (size, self._n))
            self._hits = np.resize(self._hits, (size, self._n))
            self._tokens = np.resize(self._tokens, (size, self._tokens.shape[1]))
        self._trials[row] = 0.0
        self._hits[row] = 0.0
        self._tokens[row] = self._tokens[PRIOR_ROW]

    def expected(self, rows: IntArray) -> Array:
        tokens: Array = self._tokens.take(rows, axis=0)
        return tokens

    def survival(self) -> Array:
        return np.cumprod(self._pool)

    def observe(self, rows: IntArray, accepted: IntArray, drafted: int | IntArray) -> None:
        outcome = self._outcome(accepted, drafted)
        trial = self._trial.take(outcome, axis=0)
        success = self._success.take(outcome, axis=0)
        self._pool_trials = self._pool_trials * self.POOL_MEMORY + trial.sum(axis=0)
        self._pool_hits = self._pool_hits * self.POOL_MEMORY + success.sum(axis=0)
        shrink = np.minimum(1.0, self.POOL_TRIALS / np.maximum(self._pool_trials, 1e-9))
        self._pool_trials *= shrink
        self._pool_hits *= shrink
        trials = self.REQUEST_MEMORY * self._trials[rows] + trial
        hits = self.REQUEST_MEMORY * self._hits[rows] + success
        self._trials[rows] = trials
        self._hits[rows] = hits
        self._refresh_pool()
        self._tokens[rows] = self._count(self._hazard(trials, hits))
        self._trials[PRIOR_ROW] = 0.0
        self._hits[PRIOR_ROW] = 0.0
        self._tokens[PRIOR_ROW] = self._count(self._pool[None])[0]

    def pass_step(self, rows: IntArray) -> None:
        self._trials[rows] *= self.REQUEST_MEMORY
        self._hits[rows] *= self.REQUEST_MEMORY
        self._tokens[rows] = self._count(self._hazard(self._trials[rows], self._hits[rows]))
        self._tokens[PRIOR_ROW] = self._count(self._pool[None])[0]

    def _hazard(self, trials: Array, hits: Array) -> Array:
        hazard = np.empty_like(trials)
        prior = np.full(len(trials), self._pool[0])
        for i in range(self._n):
            hazard[:, i] = (hits[:, i] + self.REQUEST_INERTIA * prior) / (trials[:, i] + self.REQUEST_INERTIA)
            if i + 1 < self._n:
                level = np.clip(hazard[:, i], self.LOW, self.HIGH)
                odds = self._pool_odds[i + 1] * (level / (1.0 - level) / self._pool_odds[i]) ** self.CARRY
                prior = np.clip(odds / (1.0 + odds), self.LOW, self.HIGH)
        return hazard


ESTIMATORS: dict[str, type[ClassFilter] | type[PositionHazard]] = {"class": ClassFilter, "hazard": PositionHazard}
