"""Raw records: nothing measured is lost, and a change shows."""

import json

import pytest

from dflash_verify.bench.errors import BenchError
from dflash_verify.bench.records import Cell, Store, broken_links, read_records

PLAN = {"created": 1.0, "url": "http://a", "arms": [{"name": "A"}], "max_num_seqs": ()}
CELL = Cell(0, 0, "A", "code", 1, 0, 0)


def filled(directory, runs=2):
    store = Store(directory, PLAN)
    for repeat in range(runs):
        cell = Cell(0, 0, "A", "code", 1, 0, repeat)
        attempt = store.next_attempt(cell.id)
        store.add(
            {"kind": "request", "run": cell.id, "attempt": attempt, "text": "\u2028 line, \x85 too", "steps": {3: 1}}
        )
        store.add_run(cell, attempt, {"problems": []})
    store.close()
    return directory


def test_a_store_is_resumed_with_its_complete_runs(tmp_path):
    filled(tmp_path)
    store = Store(tmp_path, {**PLAN, "created": 2.0, "url": "http://moved"})
    assert len(store.complete) == 2
    store.add({"kind": "visit"})
    store.close()
    assert broken_links(read_records(tmp_path)) == []


def test_another_plan_is_refused(tmp_path):
    filled(tmp_path)
    with pytest.raises(BenchError, match=r"another plan .*arms"):
        Store(tmp_path, {**PLAN, "arms": [{"name": "B"}]})


def test_half_a_line_after_a_kill_is_dropped_and_nothing_else(tmp_path):
    filled(tmp_path)
    path = tmp_path / "records.jsonl"
    before = path.read_text()
    path.write_text(before + '{"kind":"requ')
    store = Store(tmp_path, PLAN)
    store.add({"kind": "visit"})
    store.close()
    assert path.read_text().startswith(before)
    assert broken_links(read_records(tmp_path)) == []


def test_a_run_that_failed_is_kept_and_measured_again(tmp_path):
    store = Store(tmp_path, PLAN)
    store.add_run(CELL, store.next_attempt(CELL.id), {"problems": ["connection lost"]})
    store.close()
    store = Store(tmp_path, PLAN)
    assert CELL.id not in store.complete
    assert store.next_attempt(CELL.id) == 2
    store.close()


@pytest.mark.parametrize("change", ["edit", "remove", "swap", "copy"])
def test_any_change_of_the_lines_shows(tmp_path, change):
    filled(tmp_path)
    records = read_records(tmp_path)
    assert broken_links(records) == []
    if change == "edit":
        records[1]["attempt"] = 9
    elif change == "remove":
        del records[1]
    elif change == "swap":
        records[0], records[1] = records[1], records[0]
    else:
        records.insert(1, records[0])
    assert broken_links(records)


def test_a_line_that_is_not_json_is_named(tmp_path):
    filled(tmp_path)
    path = tmp_path / "records.jsonl"
    lines = path.read_text().split("\n")
    lines[2] = "{oops"
    path.write_text("\n".join(lines))
    with pytest.raises(BenchError, match=r"records.jsonl:3 is not a record"):
        read_records(tmp_path)


def test_run_names_tell_all_of_a_run():
    assert CELL.id == "p0.A.code.c1.q0.r0"
    assert Cell(1, 4, "B", "prose", 2, 1, 3).id == "p1.m4.B.prose.c2.q1.r3"
    assert json.dumps(CELL.pair_key) == "[0, 0, 0]"
