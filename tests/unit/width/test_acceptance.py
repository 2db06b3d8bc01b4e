"""What an estimator may conclude from accepted counts, and what it must not."""

import numpy as np
import pytest

from dflash_verify.width.acceptance import ESTIMATORS, PRIOR_ROW, ClassFilter

N = 7
WIDTHS = (1, 3, 5, 7)
PROSE = np.array([0.75, 0.58, 0.41, 0.28, 0.16, 0.09, 0.06])


def array(values):
    return np.array(values, dtype=np.intp)


def draw(rng, survival, count):
    return (rng.random((count, 1)) < survival).sum(axis=1)


@pytest.fixture(params=sorted(ESTIMATORS))
def estimator(request):
    return ESTIMATORS[request.param](WIDTHS, N)


def test_expected_tokens_grow_with_the_width_and_carry_a_column_of_ones(estimator):
    expected = estimator.expected(array([PRIOR_ROW]))
    assert expected.shape == (1, len(WIDTHS) + 1)
    assert (np.diff(expected[0, :-1]) > 0).all()
    assert expected[0, 0] > 1.0
    assert expected[0, -2] <= 1.0 + N
    assert expected[0, -1] == pytest.approx(1.0)


def test_the_estimate_of_a_request_approaches_its_survival(estimator):
    """Over 1000 steps at full width the expected tokens are those of the true curve on average. An estimate with a memory
    of about 50 steps has 20 independent values there, each with an error of 1.8 / sqrt(50) tokens: 0.06, four allowed."""
    rng = np.random.default_rng(1)
    row = array([1])
    estimator.admit(1)
    errors = []
    for step, accepted in enumerate(draw(rng, PROSE, 2000)):
        estimator.observe(row, array([accepted]), N)
        if step >= 1000:
            errors.append(estimator.expected(row)[0, :-1] - (1.0 + np.cumsum(PROSE)[np.array(WIDTHS) - 1]))
    assert np.abs(np.mean(errors, axis=0)).max() < 0.25


def test_a_saturated_narrow_step_is_no_rejection_of_what_lies_beyond(estimator):
    estimator.admit(1)
    row = array([1])
    for _ in range(30):
        estimator.observe(row, array([3]), 3)
    assert estimator.expected(row)[0, 3] > 4.0


def test_a_run_of_full_acceptance_at_a_narrow_width_speaks_for_the_wide_one(estimator):
    """Censoring is not blindness: after prose, saturation at width 3 must raise what width 7 is expected to give."""
    rng = np.random.default_rng(2)
    estimator.admit(1)
    row = array([1])
    for accepted in draw(rng, PROSE, 200):
        estimator.observe(row, array([accepted]), N)
    before = estimator.expected(row)[0, 3]
    for _ in range(20):
        estimator.observe(row, array([3]), 3)
    assert estimator.expected(row)[0, 3] > before + 1.0


def test_what_a_grammar_rejected_counts_as_not_seen():
    """Two of five drafts valid and both accepted: the same as two of two, not a rejection at position 3."""
    censored, same, rejected = (ClassFilter(WIDTHS, N) for _ in range(3))
    for estimator in (censored, same, rejected):
        estimator.admit(1)
    row = array([1])
    for _ in range(20):
        censored.observe(row, array([2]), array([2]))
        same.observe(row, array([2]), 2)
        rejected.observe(row, array([2]), 5)
    assert np.array_equal(censored.expected(row), same.expected(row))
    assert censored.expected(row)[0, 3] > 2 * rejected.expected(row)[0, 3] - 2


def test_a_request_with_no_valid_draft_shows_nothing():
    shown, idle = ClassFilter(WIDTHS, N), ClassFilter(WIDTHS, N)
    for estimator in (shown, idle):
        estimator.admit(1)
        estimator.observe(array([1]), array([0]), 3)
    shown.observe(array([1]), array([0]), array([0]))
    idle.pass_step(array([1]))
    assert shown.expected(array([1])) == pytest.approx(idle.expected(array([1])), rel=0.02)


def test_a_new_request_starts_from_what_others_showed(estimator):
    rng = np.random.default_rng(3)
    estimator.admit(1)
    fresh = estimator.expected(array([PRIOR_ROW]))[0, 3]
    for accepted in draw(rng, PROSE * 0.3, 300):
        estimator.observe(array([1]), array([accepted]), N)
    estimator.admit(2)
    assert estimator.expected(array([2]))[0, 3] < fresh - 0.5
    assert estimator.expected(array([2]))[0, 3] == pytest.approx(estimator.expected(array([PRIOR_ROW]))[0, 3])


def test_a_reused_row_remembers_nothing_of_the_request_before(estimator):
    estimator.admit(1)
    estimator.admit(2)
    rows = array([1, 2])
    for _ in range(50):
        estimator.observe(rows, array([0, 7]), N)
    estimator.admit(1)
    assert estimator.expected(array([1]))[0] == pytest.approx(estimator.expected(array([PRIOR_ROW]))[0])
    assert estimator.expected(array([2]))[0, 3] > 6.0


def test_an_ended_request_teaches_the_prior_only(estimator):
    estimator.admit(1)
    for _ in range(5):
        estimator.observe(array([1]), array([7]), N)
    before, prior = estimator.expected(array([1]))[0].copy(), estimator.expected(array([PRIOR_ROW]))[0].copy()
    estimator.observe(array([PRIOR_ROW]), array([0]), N)
    assert estimator.expected(array([PRIOR_ROW]))[0, 3] < prior[3]
    # The class filter touches the request not at all, the hazard only through the pool.
    assert estimator.expected(array([1]))[0, 3] == pytest.approx(before[3], rel=0.05)


def test_rows_beyond_the_first_allocation_are_independent(estimator):
    rows = array(range(1, 300))
    for row in rows.tolist():
        estimator.admit(row)
    for _ in range(30):
        estimator.observe(rows, array([7 if row % 2 else 0 for row in rows.tolist()]), N)
    tokens = estimator.expected(rows)[:, 3]
    assert (tokens[::2] > 6.0).all()
    assert (tokens[1::2] < 3.0).all()


def test_the_shape_learns_a_cliff_that_no_class_has():
    """Three drafts nearly always accepted, the fourth nearly never: outside every class, so only the shape can say it.
    Width 5 gains over width 3 less than 0.2 tokens in truth."""
    rng = np.random.default_rng(4)
    cliff = np.array([0.95, 0.92, 0.90, 0.10, 0.05, 0.02, 0.01])
    estimator = ClassFilter(WIDTHS, N)
    estimator.admit(1)
    gains = []
    for step, accepted in enumerate(draw(rng, cliff, 600)):
        estimator.observe(array([1]), array([accepted]), N)
        if step >= 300:
            expected = estimator.expected(array([1]))[0]
            gains.append(expected[2] - expected[1])
    assert np.mean(gains) < 0.3
    assert estimator.shape[0] == 0.0


def steps_until(rate, *, batch, changed, fresh):
    """Steps at width 3 until a batch that had accepted at `rate` is expected to gain from width 7 what it then gains."""
    rng = np.random.default_rng(3)
    learner = ClassFilter(WIDTHS, 7)
    rows = np.arange(1, batch + 1)
    for row in rows.tolist():
        learner.admit(row)
    for _ in range(60):
        learner.observe(rows, runs(rng, rate, batch, 3), 3)
    if fresh:
        rows = rows + batch
        for row in rows.tolist():
            learner.admit(row)
    narrow, wide = WIDTHS.index(3), WIDTHS.index(7)
    true = sum(changed**i for i in range(8)) / sum(changed**i for i in range(4))
    for step in range(1, 100):
        learner.observe(rows, runs(rng, changed, batch, 3), 3)
        tokens = learner.expected(rows).sum(axis=0)
        if tokens[wide] / tokens[narrow] > 1.0 + 0.8 * (true - 1.0):
            return step
    return 100


def runs(rng, rate, batch, width):
    """Drafts accepted of `width` by each of `batch` requests, every one with probability `rate`."""
    return (rng.random((batch, width)) < rate).cumprod(axis=1).sum(axis=1)


@pytest.mark.parametrize("fresh", [False, True])
def test_a_large_batch_that_changes_all_at_once_is_believed_at_once(monkeypatch, fresh):
    """The same requests, or new ones unlike those before. Request by request it takes five steps or more."""
    assert steps_until(0.5, batch=128, changed=0.97, fresh=fresh) <= 2
    monkeypatch.setattr(ClassFilter, "COMMON_BATCH", 1000)
    assert steps_until(0.5, batch=128, changed=0.97, fresh=fresh) >= 5


def test_a_mixed_batch_whose_requests_are_told_apart_is_left_alone():
    """Half of 128 requests accept nearly everything, half hardly anything: no step of it is a change of all."""
    rng = np.random.default_rng(4)
    learner = ClassFilter(WIDTHS, 7)
    rows = np.arange(1, 129)
    for row in rows.tolist():
        learner.admit(row)
    rates = np.where(rows % 2 == 0, 0.95, 0.3)[:, None]
    for _ in range(200):
        learner.observe(rows, (rng.random((128, 7)) < rates).cumprod(axis=1).sum(axis=1), 7)
    tokens = learner.expected(rows)[:, WIDTHS.index(7)]
    assert tokens[rows % 2 == 0].min() > 2 * tokens[rows % 2 == 1].max()


def believed_changes(monkeypatch, steps):
    """Of each step (acceptance rate, requests, width), whether the batch was believed to have changed as a whole."""
    found = []
    check = ClassFilter._common_change

    def recorded(self, *args):
        found.append(check(self, *args))
        return found[-1]

    monkeypatch.setattr(ClassFilter, "_common_change", recorded)
    rng = np.random.default_rng(5)
    learner = ClassFilter(WIDTHS, 7)
    batch = 0
    for rate, count, width in steps:
        rows = np.arange(1, count + 1)
        if count > batch:
            for row in range(batch + 1, count + 1):
                learner.admit(row)
            batch = count
        learner.observe(rows, runs(rng, rate, count, width), width)
    return [change is not None for change in found]


@pytest.mark.parametrize("batch", [4, 32, 128])
def test_a_batch_that_stays_is_not_believed_to_have_changed(monkeypatch, batch):
    """Of 400 steps at most one, after the 20 in which the requests become known; without the margin it would be many."""
    steps = [(0.6, batch, 3)] * 420
    assert sum(believed_changes(monkeypatch, steps)[20:]) <= 1
    monkeypatch.undo()
    monkeypatch.setattr(ClassFilter, "COMMON_MARGIN", 0.0)
    monkeypatch.setattr(ClassFilter, "COMMON_MARGIN_EACH", 0.0)
    assert sum(believed_changes(monkeypatch, steps)[20:]) > 10


def test_a_change_of_all_is_seen_while_widths_alternate(monkeypatch):
    before = [(0.4, 16, width) for width in (3, 7) * 40]
    after = [(0.97, 16, width) for width in (3, 7) * 3]
    changes = believed_changes(monkeypatch, before + after)
    assert not any(changes[20:80])
    assert any(changes[80:])


def test_a_small_batch_after_a_large_one_speaks_for_itself(monkeypatch):
    """What 256 requests showed in the step before must not outvote 16 that are another kind of text now."""
    changes = believed_changes(monkeypatch, [(0.4, 256, 3)] * 60 + [(0.97, 16, 3)] * 3)
    assert any(changes[60:])


def test_survival_is_a_survival_curve(estimator):
    curve = estimator.survival()
    assert curve.shape == (N,)
    assert (np.diff(curve) <= 0).all()
    assert curve[-1] > 0.0
    assert curve[0] < 1.0
