"""Presets ask what the issue with each of them was measured with; arms are asked the same."""

import json

import pytest

from dflash_verify.bench.errors import BenchError
from dflash_verify.bench.runner import cells_of
from dflash_verify.bench.workloads import body_sha256, choose, presets, stream_seed


def test_structured_and_code_are_greedy_400_tokens_five_times_to_the_end():
    for name in ("structured", "code"):
        w = presets()[name]
        assert (w.max_tokens, w.temperature, w.top_p, w.repeats, w.must_reach_length) == (400, 0.0, 1.0, 5, True)


def test_prose_is_sampled_512_tokens_of_two_pieces():
    w = presets()["prose"]
    assert (w.max_tokens, w.temperature, w.top_p, len(w.prompts)) == (512, 1.0, 0.95, 2)


def test_requests_turn_thinking_off_and_ask_for_usage_in_every_chunk():
    body = presets()["code"].body(0, 5)
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert "response_format" not in body


@pytest.mark.parametrize("name", ["json", "object"])
def test_guided_presets_carry_a_valid_schema(name):
    import jsonschema

    schema = presets()[name].body(0, 1)["response_format"]["json_schema"]["schema"]
    jsonschema.Draft202012Validator.check_schema(schema)


def test_seeds_differ_between_streams_and_repeats_and_not_between_arms():
    seeds = {
        stream_seed(0, "prose", p, q, r, s) for p in range(2) for q in range(2) for r in range(5) for s in range(4)
    }
    assert len(seeds) == 80
    a, b = (cells_of((presets()["prose"],), (1,), arm=arm) for arm in ("A", "B"))
    assert [(c.prompt, c.repeat) for c in a] == [(c.prompt, c.repeat) for c in b]


def test_streams_of_a_mixed_workload_ask_different_prompts():
    w = presets()["chat"]
    assert {w.prompt_index(0, 0, s) for s in range(6)} == set(range(6))
    assert w.prompt_index(0, 1, 0) == 1
    assert w.prompts_per_repeat == 1


def test_prompts_from_a_file(tmp_path):
    plain, lines = tmp_path / "p.txt", tmp_path / "p.jsonl"
    plain.write_text("one\n\ntwo\n")
    lines.write_text(json.dumps({"prompt": "three\nfour"}) + "\n")
    assert choose((), plain)[0].prompts == ("one", "two")
    assert choose(("code",), lines, repeats=2, max_tokens=9)[1].prompts == ("three\nfour",)
    lines.write_text('{"text": "x"}\n')
    with pytest.raises(BenchError, match=r"p.jsonl:1 is not a JSON object with"):
        choose((), lines)
    plain.write_text("\n")
    with pytest.raises(BenchError, match="has no prompt"):
        choose((), plain)


def test_an_unknown_preset_lists_the_known_ones():
    with pytest.raises(BenchError, match=r"no workload 'poem'; there are structured, code"):
        choose(("poem",), None)


def test_the_body_hash_covers_the_sampling():
    w = presets()["code"]
    assert body_sha256(w.body(0, 1)) != body_sha256(w.model_copy(update={"temperature": 0.1}).body(0, 1))
