"""Step time tables: what they say between their cells, when they are refused, and how served steps correct them."""

import dataclasses
import json

import numpy as np
import pytest

from dflash_verify.width.cost import CostKey, CostModel, CostTable, CostTableError

WIDTHS = (1, 3, 7)
CELLS = {1: (10.0, 12.0, 16.0), 4: (13.0, 18.0, 28.0), 8: (20.0, 30.0, 24.0)}
KEY = CostKey("NVIDIA H200", 1, "aa", "bb", "0.33.0", "bfloat16", "VLLM_COMPILE", (1, 2, 4, 8, 16, 32, 64))


def table(**changes):
    return CostTable(**{"draft_width": 7, "widths": WIDTHS, "cells": CELLS, **changes})


def test_listed_cells_are_returned_as_they_are():
    for batch, row in CELLS.items():
        assert table().row(batch) == row


def test_linear_between_listed_batches_constant_below_linear_beyond():
    measured = table(cells={2: (10.0, 12.0, 16.0), 4: (14.0, 18.0, 28.0)})
    assert measured.row(3) == (12.0, 15.0, 22.0)
    assert measured.row(1) == (10.0, 12.0, 16.0)
    assert measured.row(6) == (18.0, 24.0, 40.0)


def test_a_single_batch_holds_everywhere():
    assert table(cells={4: (1.0, 2.0, 3.0)}).row(100) == (1.0, 2.0, 3.0)


def test_step_time_need_not_grow_with_the_width():
    assert table().step_ms(8, 7) < table().step_ms(8, 3)


def test_extrapolation_never_reaches_zero():
    assert table(cells={1: (9.0, 9.0, 9.0), 2: (5.0, 5.0, 5.0)}).row(100) == (5.0, 5.0, 5.0)


def test_padded_graphs_are_priced_as_they_run():
    """5 requests at width 1 are 10 tokens, which run in the graph of 16: the same step as 8 requests. At width 3 they are
    20 tokens in the graph of 32, again 8 requests."""
    cells = {1: (1.0, 2.0, 3.0), 2: (2.0, 3.0, 4.0), 4: (4.0, 6.0, 8.0), 8: (8.0, 12.0, 16.0)}
    padded = table(cells=cells, capture_sizes=KEY.capture_sizes)
    for batch in (5, 6, 7, 8):
        assert padded.step_ms(batch, 1) == 8.0
        assert padded.step_ms(batch, 3) == 12.0
    assert padded.step_ms(3, 7) == 8.0  # 24 tokens in the graph of 32
    assert padded.step_ms(4, 7) == 8.0
    assert padded.step_ms(3, 1) == 4.0


def test_steps_above_the_largest_graph_are_not_padded():
    cells = {8: (8.0, 12.0, 16.0), 16: (20.0, 30.0, 40.0), 32: (40.0, 60.0, 80.0)}
    eager = table(cells=cells, capture_sizes=(16, 32, 64))
    assert eager.step_ms(12, 7) == pytest.approx(28.0)  # 96 tokens: no graph, between what 64 and 128 tokens took
    assert eager.step_ms(12, 1) == 20.0  # 24 tokens in the graph of 32


def test_a_table_survives_saving(tmp_path):
    path = tmp_path / "cache" / "table.json"
    saved = table(key=KEY, capture_sizes=KEY.capture_sizes)
    saved.save(path)
    loaded = CostTable.load(path, KEY)
    assert loaded.to_json() == saved.to_json()
    assert loaded.key == KEY
    assert [loaded.row(b) for b in range(1, 40)] == [saved.row(b) for b in range(1, 40)]
    assert [p.name for p in path.parent.iterdir()] == ["table.json"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("gpu", "NVIDIA GB10"),
        ("tensor_parallel_size", 2),
        ("target_config", "cc"),
        ("draft_config", "cc"),
        ("engine_version", "0.32.0"),
        ("dtype", "float16"),
        ("compilation", "NONE"),
        ("capture_sizes", (1, 2, 4)),
    ],
)
def test_a_table_of_another_server_is_refused_naming_the_difference(tmp_path, field, value):
    path = tmp_path / "table.json"
    table(key=KEY).save(path)
    with pytest.raises(CostTableError, match=field) as refused:
        CostTable.load(path, dataclasses.replace(KEY, **{field: value}))
    assert "\n" not in str(refused.value)
    assert "profile" in str(refused.value)


def test_a_table_without_a_key_is_refused_where_one_is_needed(tmp_path):
    path = tmp_path / "table.json"
    table().save(path)
    with pytest.raises(CostTableError, match="no key"):
        CostTable.load(path, KEY)


GOOD = {"draft_width": 7, "widths": [1, 7], "step_ms": {"1": {"1": 1.0, "7": 2.0}}}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"widths": [1, 3]}, "draft width 7"),
        ({"widths": [1, 1, 7]}, "distinct"),
        ({"widths": "1,7"}, "list of integers"),
        ({"widths": [-1, 7]}, "from 0"),
        ({"draft_width": "7"}, "integer"),
        ({"draft_width": 0, "widths": [0]}, "1 or more"),
        ({"step_ms": {}}, "at least one"),
        ({"step_ms": [1]}, "no object"),
        ({"step_ms": {"1": {"1": 1.0}}}, "batch 1, width 7"),
        ({"step_ms": {"1": {"1": 1.0, "7": 0.0}}}, "positive"),
        ({"step_ms": {"1": {"1": 1.0, "7": float("inf")}}}, "positive"),
        ({"step_ms": {"1": {"1": 1.0, "7": "x"}}}, "positive"),
        ({"step_ms": {"1": {"1": 1.0, "7": 1e308}}}, "positive"),
        ({"step_ms": {"1": {"1": 1.0, "7": 10**400}}}, "positive"),
        ({"step_ms": {"1": {"1": 1.0, "7": True}}}, "positive"),
        ({"step_ms": {"1": {"1": 1.0, "7": 2.0}, "01": {"1": 1.0, "7": 3.0}}}, "batch 1 twice"),
        ({"step_ms": {"9" * 5000: {"1": 1.0, "7": 2.0}}}, "batch size"),
        ({"capture_sizes": 5}, "capture_sizes"),
        ({"capture_sizes": ["a"]}, "capture_sizes"),
        ({"key": 5}, "key"),
        ({"step_ms": {"one": {"1": 1.0, "7": 2.0}}}, "batch size"),
        ({"step_ms": {"0": {"1": 1.0, "7": 2.0}}}, "batch 0"),
        ({"step_ms": {"1": 3}}, "batch 1"),
    ],
)
def test_a_bad_table_is_refused_in_one_sentence(change, says):
    with pytest.raises(CostTableError, match=says) as refused:
        CostTable.from_json({**GOOD, **change}, "cost.json")
    assert str(refused.value).startswith("cost.json: ")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("text", ["", "[1]", "{}", "{", "[" * 100_000, "9" * 5000])
def test_a_file_that_is_no_table_is_refused(tmp_path, text):
    path = tmp_path / "cost.json"
    path.write_text(text)
    with pytest.raises(CostTableError, match=r"cost\.json"):
        CostTable.load(path)
    with pytest.raises(CostTableError, match="cannot be read"):
        CostTable.load(tmp_path / "absent.json")


def test_restricting_to_unlisted_widths_is_refused():
    assert table().restrict([7, 1]).row(4) == (13.0, 28.0)
    with pytest.raises(CostTableError, match="width 5"):
        table().restrict([5, 7])


# -- learning ----------------------------------------------------------------------------------------------------------


def served(rng, batch, width, percent=5.0, spikes=0.01):
    ms = table().step_ms(batch, width) * float(np.exp(percent / 100.0 * rng.standard_normal()))
    return 3.0 * ms if rng.random() < spikes else ms


def ratios(model, batch):
    """Modelled step time of each width over the last one's."""
    row, _ = model.row(batch)
    return np.array(row) / row[-1]


TRUE = {batch: np.array(row) / row[-1] for batch, row in CELLS.items()}


def test_without_steps_a_trusted_table_is_the_table():
    row, doubt = CostModel(WIDTHS, 7, table()).row(4)
    assert row == list(CELLS[4])
    assert doubt is None


@pytest.mark.parametrize("start", ["none", "wrong"])
def test_step_times_are_learned_from_served_steps(start):
    """600 steps at each width and batch: the standard error of a mean of 5 % noise is 0.2 %, spikes and what is shared
    with neighbours add to it; 2 % decides every width that matters."""
    rng = np.random.default_rng(5)
    wrong = table(cells={b: (row[0] * 1.3, row[1] * 0.7, row[2] * 1.3) for b, row in CELLS.items()})
    model = CostModel(WIDTHS, 7, None if start == "none" else wrong, trusted=False)
    for _ in range(600):
        for batch in CELLS:
            for width in WIDTHS:
                model.observe(batch, width, served(rng, batch, width))
    for batch, row in CELLS.items():
        assert ratios(model, batch) == pytest.approx(TRUE[batch], rel=0.02)
        assert model.row(batch)[0] == pytest.approx(list(row), rel=0.03)


def test_one_stalled_step_moves_little():
    model = CostModel(WIDTHS, 7, table())
    for _ in range(50):
        for width in WIDTHS:
            model.observe(4, width, table().step_ms(4, width))
    model.observe(4, 3, 50 * table().step_ms(4, 3))
    for _ in range(model.COLLECT):
        model.observe(4, 3, table().step_ms(4, 3))
    assert ratios(model, 4) == pytest.approx(TRUE[4], rel=0.02)


def test_a_width_whose_first_step_stalls_is_still_known_after_three():
    model = CostModel(WIDTHS, 7, None)
    for _ in range(20):
        model.observe(4, 7, 28.0)
    for ms in (3 * 18.0, 18.0, 18.0):
        assert not model.known(1)
        model.observe(4, 3, ms)
    assert model.known(1)
    assert ratios(model, 4)[1] == pytest.approx(18.0 / 28.0, rel=0.15)


def test_a_server_that_slows_as_a_whole_keeps_its_ratios_and_the_trust():
    model = CostModel(WIDTHS, 7, table())
    rng = np.random.default_rng(6)
    for step in range(3000):
        slower = 1.0 + step / 3000  # to twice the time, as with growing contexts
        width = int(rng.choice(WIDTHS))
        model.observe(4, width, slower * served(rng, 4, width, percent=2.0))
    assert model.trusted
    assert ratios(model, 4) == pytest.approx(TRUE[4], rel=0.03)
    assert model.row(4)[0][2] > 1.7 * 28.0


@pytest.mark.parametrize("slower", [1.6, 3.0])
@pytest.mark.parametrize("right", [True, False])
def test_a_level_that_jumps_is_not_what_a_width_costs(slower, right):
    """Clocks and other work on the machine come and go, whatever width runs. 20 servers, 3000 steps that change width every 20 to
    60 and level every 30 to 150, at any moment: every sixth change of width is then near one of the level. 2 % noise; 3 %
    decides every width that matters."""
    start = table() if right else table(cells={b: (row[0], row[1] * 1.4, row[2]) for b, row in CELLS.items()})
    trusted, off = 0, []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        model = CostModel(WIDTHS, 7, start)
        level, width, level_until, width_until = 1.0, 7, 0, 0
        for step in range(3000):
            if step == level_until:
                level, level_until = (slower if level == 1.0 else 1.0), step + int(rng.integers(30, 150))
            if step == width_until:
                width, width_until = int(rng.choice(WIDTHS)), step + int(rng.integers(20, 60))
            model.observe(4, width, level * served(rng, 4, width, percent=2.0))
        trusted += model.trusted
        off.append(float(np.abs(ratios(model, 4) / TRUE[4] - 1.0).max()))
    assert trusted >= 19 if right else trusted == 0
    assert np.median(off) < 0.03


def test_a_level_that_rose_while_one_width_ran_is_not_what_the_next_width_saves():
    """Contexts grow to twice the step time while only width 7 is served; then width 3 is."""
    model = CostModel(WIDTHS, 7, table())
    rng = np.random.default_rng(10)
    for step in range(40):
        width = WIDTHS[step // 10 % 3]
        model.observe(4, width, served(rng, 4, width, percent=2.0))
    for step in range(800):
        model.observe(4, 7, (1.0 + step / 800) * served(rng, 4, 7, percent=2.0))
    for step in range(60):
        width = (3, 7)[step // 10 % 2]
        model.observe(4, width, 2.0 * served(rng, 4, width, percent=2.0))
    assert model.trusted
    assert ratios(model, 4) == pytest.approx(TRUE[4], rel=0.03)


@pytest.mark.parametrize("slower", [1.5, 2.0, 3.0])
def test_one_cell_that_was_priced_wrongly_is_no_new_level(slower):
    """A right table but for 64 requests at width 3, which run without a graph, say, and now and then a step at width 5 to see what
    would be accepted: a few of these are enough, however much was served elsewhere before. One change of width alone may as
    well be one of the level."""
    right = CostTable(7, WIDTHS, {b: tuple(8.0 + 0.02 * b * (w + 1) for w in WIDTHS) for b in (1, 8, 64)})
    model = CostModel(WIDTHS, 7, right)
    rng = np.random.default_rng(11)

    def serve(batch, width, steps, factor=1.0):
        for _ in range(steps):
            model.observe(batch, width, factor * right.step_ms(batch, width) * float(np.exp(0.03 * rng.normal())))

    for _ in range(100):
        serve(8, int(rng.choice(WIDTHS)), 4)
    serve(64, 7, 60)
    serve(64, 3, 60, slower)
    assert model.trusted
    for _ in range(6):
        serve(64, 7, 1)
        serve(64, 3, 30, slower)
    assert model.learning


@pytest.mark.parametrize("grows", [0.25, 0.5])
def test_a_level_that_grows_while_a_width_runs_and_falls_as_it_changes_is_no_width(grows):
    """Every change of width then seems to make the wider one slower in one direction and faster in the other."""
    right = table()
    for seed in range(6):
        rng = np.random.default_rng(seed)
        model = CostModel(WIDTHS, 7, right)
        for wave in range(24):
            width = (7, 3)[(wave + seed) % 2]
            for step in range(60):
                level = (1.0 + grows * step / 60) * float(np.exp(0.02 * rng.standard_normal()))
                model.observe(4, width, level * right.step_ms(4, width))
        assert model.trusted, model.contradiction


@pytest.mark.parametrize("spread", [0.1, 0.3])
def test_requests_one_after_the_other_are_not_compared(spread):
    """One stream: contexts, and so step times, differ between requests, whatever width each of them is served at."""
    right = table()
    for seed in range(10):
        rng = np.random.default_rng(seed)
        model = CostModel(WIDTHS, 7, right)
        for _ in range(60):
            model.interrupted()  # the prompt
            width, level = int(rng.choice((3, 7))), float(np.exp(spread * rng.standard_normal()))
            for step in range(int(rng.integers(20, 60))):
                now = 7 if width == 3 and step % 20 == 19 else width
                model.observe(1, now, level * right.step_ms(1, now) * float(np.exp(0.02 * rng.standard_normal())))
        assert model.trusted, model.contradiction


def test_spikes_are_not_what_a_width_costs():
    """Every twentieth step takes three times as long; widths change every 40 steps, width 1 runs for one step now and then, and takes the
    millisecond longer that is forgiven."""
    short = CostTable(7, WIDTHS, {1: (5.6, 6.3, 6.6), 8: (6.0, 6.6, 7.0)})
    for seed in range(10):
        rng = np.random.default_rng(seed)
        model = CostModel(WIDTHS, 7, short)
        for step in range(2000):
            width = (3, 7)[step // 40 % 2]
            if width == 3 and step % 17 == 0:
                width = 1
            ms = (short.step_ms(1, width) + (width == 1)) * float(np.exp(0.02 * rng.standard_normal()))
            model.observe(1, width, 3.0 * ms if rng.random() < 0.05 else ms)
        assert model.trusted, model.contradiction


def test_a_table_that_loses_the_trust_at_another_level_keeps_that_level():
    """Twice as slow as the table in all, and width 1 another 1.6 times, of which one step runs at a time."""
    model = CostModel(WIDTHS, 7, table())
    rng = np.random.default_rng(15)
    for step in range(400):
        width = 1 if step % 21 == 20 else 3
        model.observe(4, width, 2.0 * (1.6 if width == 1 else 1.0) * served(rng, 4, width, percent=2.0, spikes=0.0))
        if not model.trusted:
            break
    assert model.learning
    assert model.row(4)[0][1] == pytest.approx(2.0 * table().step_ms(4, 3), rel=0.03)


@pytest.mark.parametrize(("extra_ms", "trusted"), [(1.0, True), (1.3, True), (1.8, False), (2.5, False)])
@pytest.mark.parametrize("width", [3, 7])
@pytest.mark.parametrize("widest_ms", [7.7, 11.0])
@pytest.mark.parametrize("level", [1.0, 2.0])
def test_the_hosts_work_for_requests_that_come_and_go_is_no_width(extra_ms, trusted, width, widest_ms, level):
    """Seen with two GPUs: steps of 6 to 8 ms, and width 3 ran only while requests ended, which costs the host a millisecond.
    Whichever of two widths has it, and in milliseconds of now, whatever the level."""
    served_ms = {3: 6.4, 7: widest_ms}
    short = CostTable(7, WIDTHS, {32: (5.9 / level, 6.4 / level, widest_ms / level)})
    model = CostModel(WIDTHS, 7, short)
    rng = np.random.default_rng(12)
    served_ms[width] += extra_ms
    for _ in range(12):
        for run, steps in ((7, 40), (3, 4)):
            for _ in range(steps):
                model.observe(32, run, served_ms[run] * float(np.exp(0.01 * rng.normal())))
    assert model.trusted == trusted


def test_a_trusted_table_that_served_steps_contradict_loses_the_trust():
    wrong = table(cells={b: (row[0], row[1] * 1.4, row[2]) for b, row in CELLS.items()})
    model = CostModel(WIDTHS, 7, wrong)
    rng = np.random.default_rng(7)
    for _ in range(120):
        width = int(rng.choice(WIDTHS))
        model.observe(4, width, served(rng, 4, width, percent=3.0))
    assert model.learning
    assert ratios(model, 4) == pytest.approx(TRUE[4], rel=0.05)


@pytest.mark.parametrize("steps", [8, 20])
def test_a_table_is_not_distrusted_for_less_than_four_changes_of_width(steps):
    """Twice as slow at width 3, without any noise: after three changes it may still be the level, which turned with the width."""
    model = CostModel(WIDTHS, 7, table())
    for run in range(5):
        width, factor = ((7, 1.0), (3, 2.0))[run % 2]
        for _ in range(steps):
            model.observe(4, width, factor * table().step_ms(4, width))
        assert model.trusted == (run < 4), f"{run} changes of width"


@pytest.mark.parametrize(("off", "trusted"), [(0.80, False), (0.91, True), (1.09, True), (1.25, False)])
def test_a_width_that_is_off_by_less_than_an_eighth_costs_no_trust(off, trusted):
    """Long steps, hardly any noise: it is sure what the width costs, and still left to the corrections."""
    right = CostTable(7, WIDTHS, {1: (200.0, 240.0, 300.0)})
    model = CostModel(WIDTHS, 7, CostTable(7, WIDTHS, {1: (200.0, 240.0 * off, 300.0)}))
    for step in range(800):
        width = (3, 7)[step // 20 % 2]
        model.observe(1, width, right.step_ms(1, width) * (1.0 + 0.01 * (-1) ** step))
    assert model.trusted == trusted


def test_changes_in_one_direction_alone_show_nothing():
    """Each time width 3 runs after 7, the machine has just turned slower; 7 runs after a prompt."""
    model = CostModel(WIDTHS, 7, table())
    for _ in range(20):
        model.interrupted()
        for width, factor in ((7, 1.0), (3, 1.5)):
            for _ in range(10):
                model.observe(4, width, factor * table().step_ms(4, width))
    assert model.trusted


def test_a_trusted_table_within_its_errors_keeps_the_trust():
    """2 % off per width and 3 % noise: 20 servers, 400 steps each. Two widths then differ by 0.12 with p < 0.0001."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        off = np.exp(0.02 * rng.standard_normal(3))
        model = CostModel(WIDTHS, 7, table(cells={b: tuple(np.array(row) * off) for b, row in CELLS.items()}))
        for _ in range(400):
            width = int(rng.choice(WIDTHS))  # in turn, no width would follow another in both directions
            model.observe(4, width, served(rng, 4, width, percent=3.0))
        assert model.trusted


@pytest.mark.parametrize("ms", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_times_are_ignored(ms):
    model = CostModel(WIDTHS, 7, table())
    model.observe(4, 3, ms)
    model.observe(0, 3, 1.0)
    model.observe(4, 2, 1.0)
    assert model.observed_steps == 0


def test_what_was_learned_at_one_batch_informs_the_next():
    """Width 1 is half the table's price at batch 4; at batch 5, never served, it is believed cheaper too."""
    model = CostModel(WIDTHS, 7, table(), trusted=False)
    for _ in range(40):
        for width, ms in zip(WIDTHS, (6.5, 18.0, 28.0), strict=True):
            model.observe(4, width, ms)
    believed = np.array(model.row(5)[0]) / np.array(table().row(5))
    assert believed[0] / believed[2] < 0.7


def test_state_is_bounded_by_the_batch_sizes():
    model = CostModel(WIDTHS, 7, None)
    rng = np.random.default_rng(8)
    for _ in range(3000):
        model.observe(int(rng.integers(1, 513)), 7, float(rng.uniform(5, 50)))
    groups = {model.group(batch) for batch in range(1, 513)}
    assert len(groups) < 24
    assert len(model._mean) <= len(groups) * len(WIDTHS)
    assert np.linalg.eigvalsh(model._cov).min() > -1e-9
    json.dumps(model.row(300)[0])


@pytest.mark.parametrize("extra_ms", [0.0, 1.6, 3.4])
def test_what_the_host_adds_to_plain_decoding_is_learned_and_not_held_against_the_table(extra_ms):
    """Plain decoding of 128 requests on an H200: 7.2 ms measured at start, served 7.4 on one host, on another 8.8 in the median and
    10.6 in the mean. The widths that ran in between took what the table says."""
    table = CostTable(7, (0, 3, 7), {1: (5.3, 6.5, 6.8), 128: (7.2, 21.3, 33.4)})
    model = CostModel(table.widths, 7, table)
    rng = np.random.default_rng(0)
    for number in range(600):
        width = (0, 3, 7, 3, 0, 7)[number // 10 % 6]
        ms = table.step_ms(128, width) + extra_ms * (width == 0)
        model.observe(128, width, ms * float(np.exp(0.03 * rng.standard_normal())))
    assert model.trusted, model.contradiction
    assert model.row(128)[0] == pytest.approx([7.2 + extra_ms, 21.3, 33.4], rel=0.03)


def test_long_plain_decoding_says_nothing_about_what_other_widths_cost():
    table = CostTable(7, (0, 3, 7), {1: (5.3, 6.5, 6.8), 128: (7.2, 21.3, 33.4)})
    model = CostModel(table.widths, 7, table)
    for _ in range(400):
        model.observe(128, 0, 10.6)
    assert model.row(128)[0][0] == pytest.approx(10.6, rel=0.02)
    assert model.row(128)[0][1:] == pytest.approx([21.3, 33.4], rel=0.03)


def test_a_width_that_follows_plain_decoding_is_not_compared_with_what_was_before():
    """The GPU is cool after plain decoding, and faster for a while; the width that follows it is not the cause."""
    table = CostTable(7, (0, 3, 7), {1: (5.3, 6.5, 6.8), 128: (7.2, 21.3, 33.4)})
    model = CostModel(table.widths, 7, table)
    for number in range(4000):
        place = number % 80
        width = (0, 3, 7, 3)[place // 20]
        cool = 0.8 if 20 <= place < 32 else 1.0
        model.observe(128, width, table.step_ms(128, width) * cool)
    assert model.trusted, model.contradiction
