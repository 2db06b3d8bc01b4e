"""draft-graphs, capture-widths and dispatch-widths on vLLM's own graph managers, which can be built and asked without a GPU."""

import pytest

from dflash_verify.overlays.probes import graph_managers, single_rank
from dflash_verify.overlays.probes import graph_mode as mode

SLOTS = 8
FULL_ONLY = "FULL_DECODE_ONLY"


@pytest.fixture
def managers():
    """(target manager, drafter manager) of a config, as if their graphs had been captured."""
    with single_rank():
        yield graph_managers


def uniform_lengths(manager):
    return {d.uniform_token_count for descs in manager._capture_descs.values() for d in descs} - {None}


def stock_and_ours(managers, config):
    """The target's manager without and with the overlays."""
    from dflash_verify import overlays
    from dflash_verify.settings import load

    stock, _ = managers(config)
    overlays.apply(load({"DFLASH_VERIFY_TOKENS": "3"}))
    try:
        ours, _ = managers(config)
    finally:
        overlays.revert()
    return stock, ours


SCHEDULES = {1: [(1, SLOTS, 1)], 3: [(1, SLOTS, 3)], 7: [(1, SLOTS, 7)], "137": [(1, 1, 1), (2, 2, 3), (3, 3, 7)]}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_target_and_drafter_have_full_graphs_for_every_batch_and_width(applied, managers, make_config, schedule):
    target, draft = managers(make_config(schedule))
    for n in range(1, SLOTS + 1):
        for _, _, width in schedule:
            assert mode(target, n, width + 1) == "FULL", (n, width)
        assert mode(draft, n, 8) == "FULL", n
    assert uniform_lengths(draft) == {8}
    assert uniform_lengths(target) == {width + 1 for _, _, width in schedule}


@pytest.mark.parametrize("width", [1, 3])
def test_stock_drafter_has_none_under_a_narrow_schedule(managers, make_config, width):
    """What the overlay is for: the day this fails, vLLM has repaired it and the overlay can go."""
    _, draft = managers(make_config([(1, SLOTS, width)]))
    assert [mode(draft, n, 8) for n in range(1, SLOTS + 1)] == ["NONE"] * SLOTS


@pytest.mark.parametrize("schedule", [[(1, SLOTS, 3)], [(1, SLOTS, 0)], [(1, 1, 0), (2, 2, 3), (3, 3, 7)]], ids=str)
def test_dspark_drafter_runs_its_block_of_n(applied, managers, make_config, schedule):
    """DSpark's block is N, not N + 1; before 0.32 vLLM computed a query length of K, and 0 for K = 0."""
    _, draft = managers(make_config(schedule, method="dspark"), draft_query_len=7)
    assert uniform_lengths(draft) == {7}
    assert [mode(draft, n, 7) for n in range(1, SLOTS + 1)] == ["FULL"] * SLOTS


def test_plain_decoding_has_its_graphs_beside_the_drafter(applied, managers, make_config):
    target, draft = managers(make_config([(1, 1, 0), (2, 2, 3), (3, 3, 7)]))
    for n in range(1, SLOTS + 1):
        assert mode(target, n, 1) == mode(target, n, 4) == mode(target, n, 8) == mode(draft, n, 8) == "FULL"


# Capture sizes as the plan makes them for 64 slots: every request count up to 16 has its own, larger ones share.
GRID = sorted({n * length for n in (*range(1, 17), *range(24, 65, 8)) for length in (2, 4, 6, 8)})
MIXED = [(1, 1, 1), (2, 2, 3), (3, 3, 5), (4, 4, 7)]


@pytest.mark.parametrize("cudagraph_mode", ["FULL_AND_PIECEWISE", FULL_ONLY])
def test_a_step_finds_the_smallest_graph_of_its_own_width(applied, managers, make_config, cudagraph_mode):
    """Whatever the other widths have captured between its size and that graph's."""
    target, _ = managers(make_config(MIXED, max_num_seqs=64, capture_sizes=GRID, mode=cudagraph_mode))
    for _, _, width in MIXED:
        length = width + 1
        captured = [
            d.num_reqs for descs in target._capture_descs.values() for d in descs if d.uniform_token_count == length
        ]
        for n in range(1, 65):
            found = target.dispatch(n, n * length, length, 0)
            assert (found.cg_mode.name, found.uniform_token_count) == ("FULL", length), (n, width)
            assert found.num_reqs == min(count for count in captured if count >= n), (n, width)
    # A batch that is uniform in no length takes what it took before.
    mixed = target.dispatch(9, 37, None, 0)
    assert mixed.cg_mode.name == ("PIECEWISE" if cudagraph_mode == "FULL_AND_PIECEWISE" else "NONE")


def test_stock_runs_steps_of_a_mixed_schedule_without_their_graph(managers, make_config):
    """What the overlay is for: the day this fails, vLLM has repaired it and the overlay can go. 234 requests of a hybrid at
    K = 5 took 190 ms a step on an H200."""
    target, _ = managers(make_config(MIXED, max_num_seqs=64, capture_sizes=GRID, mode=FULL_ONLY))
    assert target._capture_descs
    eager = [(n, width) for n in range(17, 65) for _, _, width in MIXED if mode(target, n, width + 1) != "FULL"]
    assert {(17, 5), (19, 3), (21, 5)} <= set(eager)


@pytest.mark.parametrize("schedule", [None, [(1, SLOTS, 7)], [(1, SLOTS, 3)]], ids=str)
@pytest.mark.parametrize("cudagraph_mode", ["FULL_AND_PIECEWISE", FULL_ONLY, "FULL", "PIECEWISE", "NONE"])
def test_the_target_captures_what_stock_captures(managers, make_config, schedule, cudagraph_mode):
    """Where the schedule has one width, the overlays leave the target's manager exactly as it was."""
    stock, ours = stock_and_ours(managers, make_config(schedule, mode=cudagraph_mode))
    assert ours._capture_descs == stock._capture_descs
    assert ours._candidates == stock._candidates


@pytest.mark.parametrize("cudagraph_mode", ["FULL_AND_PIECEWISE", FULL_ONLY, "FULL", "PIECEWISE", "NONE"])
def test_with_several_widths_stock_graphs_are_captured_and_none_is_lost(managers, make_config, cudagraph_mode):
    """Of a schedule that reaches every width; every candidate that stock has stays behind those that are added."""
    stock, ours = stock_and_ours(managers, make_config([(1, 4, 7), (5, SLOTS, 3)], mode=cudagraph_mode))
    assert ours._capture_descs == stock._capture_descs
    for key, descs in stock._candidates.items():
        assert ours._candidates[key][-len(descs) :] == descs


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("cudagraph_mode", ["FULL_AND_PIECEWISE", FULL_ONLY])
def test_fewer_slots_than_widths_still_have_every_width(applied, managers, make_config, slots, cudagraph_mode):
    config = make_config([(1, 1, 1), (2, 2, 3), (3, 3, 7)], max_num_seqs=slots, mode=cudagraph_mode)
    target, draft = managers(config)
    for n in range(1, slots + 1):
        assert [mode(target, n, width + 1) for width in (1, 3, 7)] == ["FULL"] * 3
        assert mode(draft, n, 8) == "FULL"
    # A captured graph is captured once, and the largest first, as vLLM's memory profile expects.
    for descs in target._capture_descs.values():
        assert len(set(descs)) == len(descs)
        assert [d.num_tokens for d in descs] == sorted((d.num_tokens for d in descs), reverse=True)
    if cudagraph_mode == "FULL_AND_PIECEWISE":
        # A mixed batch, uniform in no length, still finds its piecewise graph.
        assert target.dispatch(1, 5, None, 0).cg_mode.name == "PIECEWISE"


def test_stock_drops_widths_beyond_the_slots(managers, make_config, release):
    target, _ = managers(make_config([(1, 1, 1), (2, 2, 3), (3, 3, 7)], max_num_seqs=1))
    modes = [mode(target, 1, width + 1) for width in (1, 3, 7)]
    if release < (0, 29, 0):
        assert modes == ["FULL"] * 3  # why the overlay is not needed there
    else:
        assert modes[0] == "FULL"
        assert "FULL" not in modes[1:]


def test_which_releases_need_capture_widths(applied, release):
    assert applied["capture-widths"].state == ("not needed" if release < (0, 29, 0) else "applied")
