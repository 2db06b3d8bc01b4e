"""The small decisions inside the wrappers; tests/releases runs the wrappers on vLLM's real modules."""

from types import SimpleNamespace

import numpy as np
import pytest

from dflash_verify.overlays.capture_widths import unreachable_widths
from dflash_verify.overlays.compile_cache_key import WRAPPERS as CACHE_KEY
from dflash_verify.overlays.gdn_active_width import active_columns


def columns(query_lens, drafts, n=7):
    start = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    return active_columns(start, np.array(drafts, dtype=np.int32), n + 1)


@pytest.mark.parametrize(
    ("query_lens", "drafts", "expected"),
    [
        ([4, 4, 4], [3, 3, 3], 4),
        ([2], [1], 2),
        ([7, 7], [6, 6], 7),
        ([8, 8], [7, 7], None),  # full width: nothing to narrow
        ([1, 1], [0, 0], None),  # K = 0
        ([4, 2], [3, 1], None),  # two widths
        ([4, 1], [3, 0], None),  # a request without drafts
        ([4, 4], [3, -1], None),  # a prefill of the same length
        ([4, 0], [3, -1], None),  # padding
        ([4, 4], [2, 2], None),  # fewer drafts than tokens
        ([20], [-1], None),
        ([], [], None),
    ],
)
def test_only_a_batch_of_one_width_is_narrowed(query_lens, drafts, expected):
    assert columns(query_lens, drafts) == expected


def test_counts_that_do_not_belong_to_the_batch_narrow_nothing():
    assert columns([4, 4], [3]) is None


@pytest.mark.parametrize(
    ("schedule", "slots", "expected"),
    [
        ([(1, 1, 1), (2, 2, 3), (3, 3, 7)], 3, []),
        ([(1, 1, 1), (2, 2, 3), (3, 3, 7)], 2, [7]),
        ([(1, 1, 1), (2, 2, 3), (3, 3, 7)], 1, [3, 7]),
        ([(1, 1, 3), (2, 2, 1), (3, 3, 3)], 1, [1]),  # 3 is reached already
        ([(1, 64, 3)], 1, []),
    ],
)
def test_widths_beyond_the_slots_are_found(schedule, slots, expected):
    assert unreachable_widths(schedule, slots) == expected


def test_the_cache_key_depends_on_stock_s_key_and_the_draft_width_only():
    wrap = CACHE_KEY["SpeculativeConfig.compute_hash"]

    def key(stock, width, **more):
        return wrap(lambda self: stock, None)(SimpleNamespace(num_speculative_tokens=width, **more))

    assert key("a", 7) == key("a", 7, num_speculative_tokens_per_batch_size=[(1, 8, 3)])
    assert len({key("a", 7), key("a", 5), key("b", 7)}) == 3
