"""The planner: widths, schedule, capture sizes and graphs from settings and engine facts."""

import json

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_verify.cli import main
from dflash_verify.plan import EngineFacts, Plan, make_plan, request_counts
from dflash_verify.settings import SettingsError, load

ENGINE = {"draft_width": 7, "draft_query_len": 8}


def plan(value: str, slots: int = 4, environ: dict[str, str] | None = None, **facts: object) -> Plan:
    return make_plan(
        load({"DFLASH_VERIFY_TOKENS": value} | (environ or {})),
        EngineFacts(**{**ENGINE, "max_num_seqs": slots} | facts),  # type: ignore[arg-type]
    )


def cli(*args: str, **environ: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["plan", *args], env=environ, catch_exceptions=False)
    return result.exit_code, result.output


def test_auto_takes_the_default_widths_below_n_and_n() -> None:
    assert plan("auto").widths == (1, 3, 5, 7)
    assert plan("auto", draft_width=5, draft_query_len=6).widths == (1, 3, 5)
    assert plan("auto", draft_width=15, draft_query_len=16).widths == (1, 3, 5, 7, 15)
    assert plan("auto", draft_width=1, draft_query_len=2).widths == (1,)


def test_n_is_always_among_listed_widths() -> None:
    assert plan("auto:3").widths == (3, 7)
    assert plan("auto:0,3").widths == (0, 3, 7)


def test_a_static_width_captures_only_itself() -> None:
    assert plan("3").widths == (3,)
    assert plan("3").schedule == ((1, 1, 3),)


def test_the_schedule_names_every_width_once_without_knowing_the_slots() -> None:
    assert plan("auto", slots=2).schedule == ((1, 1, 1), (2, 2, 3), (3, 3, 5), (4, 4, 7))
    assert plan("auto", slots=2).schedule == plan("auto", slots=256).schedule


def test_a_width_beyond_n_is_refused_with_both_numbers() -> None:
    with pytest.raises(
        SettingsError, match=r"DFLASH_VERIFY_TOKENS=9 asks to verify 9 tokens but the drafter proposes 7"
    ):
        plan("9")
    with pytest.raises(SettingsError, match="asks to verify 8 tokens"):
        plan("auto:1,8")


def test_plain_decoding_is_said_to_save_little_where_the_drafter_runs_all_the_same() -> None:
    made = plan("auto:0,3", plain_decoding=False)
    assert made.widths == (0, 3, 7)
    (note,) = made.notes
    assert note.startswith("DFLASH_VERIFY_TOKENS=auto:0,3 lists width 0, at which vLLM before 0.33 runs the drafter")
    assert plan("auto:0,3").notes == ()


def test_dspark_drafts_n_rows_per_request() -> None:
    assert {7, 14, 21, 28} <= set(plan("3", draft_query_len=7).capture_sizes)


def test_request_counts_are_dense_to_32_and_then_vllms_grid() -> None:
    counts = request_counts(300)
    assert counts[:32] == tuple(range(1, 33))
    assert counts[32:35] == (40, 48, 56)
    assert counts[-4:] == (256, 272, 288, 300)


def test_the_operators_list_wins_and_gaps_are_said() -> None:
    found = plan("3", slots=8, user_capture_sizes=(8, 16, 16, 4))
    assert found.capture_sizes == (4, 8, 16)
    assert not found.sizes_are_ours
    assert any("width 3 without FULL graphs above 4 of 8 requests (add 32)" in note for note in found.notes)
    assert any("the drafter without FULL graphs above 2 of 8 requests (add 64)" in note for note in found.notes)


def test_a_graph_budget_coarsens_the_grid_before_it_drops_widths() -> None:
    free = plan("auto", slots=128)
    some = plan("auto", slots=128, environ={"DFLASH_MAX_GRAPHS": "360"})
    few = plan("auto", slots=128, environ={"DFLASH_MAX_GRAPHS": "260"})
    assert some.widths == free.widths
    assert some.graphs.total <= 360 < free.graphs.total
    assert few.graphs.total <= 260
    assert few.widths == (1, 3, 7)
    assert any("leaves out width 5" in note for note in few.notes)


def test_what_a_static_width_never_reads_is_said() -> None:
    table = {"DFLASH_COST_TABLE": "cost.json"}
    both = table | {"DFLASH_PROFILE_SECONDS": "30"}
    estimator = {"DFLASH_ESTIMATOR": "hazard"}
    (note,) = plan("3", environ=both).notes
    assert (
        note == "DFLASH_VERIFY_TOKENS=3 is a static width, which reads no DFLASH_COST_TABLE or DFLASH_PROFILE_SECONDS: "
        "set it to auto, or unset what it does not read"
    )
    assert "reads no DFLASH_ESTIMATOR:" in plan("3", environ=estimator).notes[0]
    assert plan("auto:3", environ=both | estimator).notes == plan("3").notes == ()
    assert plan("3", environ={"DFLASH_PROFILE_SECONDS": "0"}).notes == (), "nothing was asked for"
    # A control file may say auto, whose controller reads the table.
    control = {"DFLASH_CONTROL_FILE": "control.json"}
    assert plan("3", environ=control | table | estimator).notes == ()
    (note,) = plan("3", environ=control | both | estimator).notes
    assert "reads no DFLASH_PROFILE_SECONDS:" in note


def test_a_budget_that_cannot_hold_the_widths_is_refused_with_what_would_do() -> None:
    with pytest.raises(SettingsError, match=r"DFLASH_MAX_GRAPHS=10 is less than the (\d+) graphs") as error:
        plan("auto:1,3,7", slots=64, environ={"DFLASH_MAX_GRAPHS": "10"})
    enough = str(error.value).split("raise it to ")[1].split()[0]
    assert plan("auto:1,3,7", slots=64, environ={"DFLASH_MAX_GRAPHS": enough}).graphs.total == int(enough)


def test_the_digest_changes_with_everything_that_ranks_must_agree_on() -> None:
    digests = {
        plan("3").digest,
        plan("3", slots=8).digest,
        plan("1").digest,
        plan("auto").digest,
        plan("auto:1,3,5").digest,
        plan("3", draft_width=5, draft_query_len=6).digest,
        plan("3", user_capture_sizes=(8,)).digest,
    }
    assert len(digests) == 7
    assert plan("3").digest == plan("3").digest


def test_cli_json_has_the_promised_keys() -> None:
    code, out = cli("--verify-tokens", "3", "--draft-tokens", "7", "--max-num-seqs", "4", "--json")
    data = json.loads(out)
    assert code == 0
    assert {"widths", "schedule", "capture_sizes", "graphs", "digest"} <= set(data)
    assert {4, 8, 12, 16, 24, 32} <= set(data["capture_sizes"])
    graphs = data["graphs"]
    assert 0 < graphs["gib"] < graphs["gib_hybrid"]
    assert 0 < graphs["seconds"] < graphs["seconds_hybrid"]


def test_cli_refuses_in_one_sentence() -> None:
    code, out = cli("--draft-tokens", "7", DFLASH_VERIFY_TOKENS="9")
    assert code != 0
    assert out.count("\n") == 1
    assert " 9 " in out
    assert " 7" in out
    assert cli("--verify-tokens", "3", "--draft-tokens", "7", "--capture-sizes", "8,x")[0] != 0
    assert "draft width is not known" in cli("--verify-tokens", "3")[1]
    assert "has no plan" in cli("--draft-tokens", "7")[1]


texts = st.sampled_from(["1", "3", "7", "auto", "auto:1,3", "auto:0,2,6", "12"]) | st.text(
    "0123456789auto:, -", max_size=12
)


@settings(max_examples=200)
@given(
    value=texts,
    budget=st.none() | st.integers(0, 2000) | st.text(max_size=4),
    slots=st.integers(1, 300),
    n=st.integers(1, 16),
    dspark=st.booleans(),
    tokens=st.none() | st.integers(1, 4096),
    sizes=st.none() | st.lists(st.integers(1, 600), min_size=1, max_size=8),
)
def test_every_input_gives_a_plan_that_keeps_its_promises_or_one_sentence(
    value: str, budget: object, slots: int, n: int, dspark: bool, tokens: int | None, sizes: list[int] | None
) -> None:
    facts = EngineFacts(
        n, slots, n if dspark else n + 1, tokens, None if sizes is None else tuple(sizes), plain_decoding=not dspark
    )
    environ = {"DFLASH_VERIFY_TOKENS": value} | ({} if budget is None else {"DFLASH_MAX_GRAPHS": str(budget)})
    try:
        found = make_plan(load(environ), facts)
    except SettingsError as error:
        assert "\n" not in str(error)
        assert str(error).endswith(".")
        return
    assert found.widths == tuple(sorted(set(found.widths)))
    assert found.widths[0] >= 0
    assert found.widths[-1] <= n
    assert found.mode.startswith("auto") <= (found.widths[-1] == n)
    # The schedule is what vLLM accepts: ascending, gapless from 1, each width once.
    assert [entry[:2] for entry in found.schedule] == [(i, i) for i in range(1, len(found.widths) + 1)]
    assert tuple(entry[2] for entry in found.schedule) == found.widths
    assert list(found.capture_sizes) == sorted(set(found.capture_sizes))
    if sizes is not None:
        assert set(found.capture_sizes) == set(sizes)
        return
    top = tokens or 10**9
    assert all(1 <= size <= top for size in found.capture_sizes)
    # Every captured width, and the drafter, has a graph that holds every batch which fits the token budget.
    for query_len in {*(width + 1 for width in found.widths), facts.draft_query_len}:
        for requests in {1, slots, (slots + 1) // 2}:
            if requests * query_len <= top and slots * query_len <= top:
                assert any(size >= requests * query_len for size in found.capture_sizes)
    if budget is not None and str(budget).strip().isdigit():
        assert found.graphs.total <= int(str(budget))
