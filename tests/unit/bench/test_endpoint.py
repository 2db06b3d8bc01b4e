"""What is read from a server, and what is said when it cannot be read."""

import asyncio

import pytest

from dflash_verify.bench.endpoint import Endpoint, by_position, by_width, parse_metrics
from dflash_verify.bench.errors import BenchError

BODY = {"messages": [{"role": "user", "content": "count"}], "max_tokens": 40, "temperature": 0.0, "seed": 1}


def ask(url, call, **kwargs):
    async def main():
        async with Endpoint(url, **kwargs) as endpoint:
            return await call(endpoint)

    return asyncio.run(main())


def test_counters_are_summed_over_engines_and_split_by_width_and_position():
    page = """
vllm:generation_tokens_total{engine="0"} 10
vllm:generation_tokens_total{engine="1"} 5
vllm:num_requests_running{engine="0"} 1
vllm:e2e_request_latency_seconds_bucket{le="0.3"} 77
dflash_verify_steps_total{width="3"} 4
dflash_verify_steps_total{width="7"} 2
dflash_verify_verified_tokens_total{position="10"} 1
dflash_verify_verified_tokens_total{position="2"} 6
dflash_verify_info{mode="auto",overlays="",release="0.33.0"} 1
"""
    found = parse_metrics(page)
    assert found.generation_tokens == 15
    assert found.steps == {"3": 4, "7": 2}
    assert found.verified == (6, 1)  # in order of position, not of text
    assert found.info == {"mode": "auto", "overlays": "", "release": "0.33.0"}
    assert found.drafts is None


def test_another_servers_metrics_are_refused():
    with pytest.raises(ValueError, match="generation_tokens"):
        parse_metrics("node_load1 0.3\n")


def test_differences_of_counters():
    assert by_width({"3": 9.0, "7": 2.0}, {"3": 4.0, "7": 2.0}) == {3: 5.0}
    assert by_position((5.0, 3.0), (2.0,)) == (3.0, 3.0)


def test_tokens_come_from_usage_and_not_from_chunks(serve):
    server = serve()
    stream = ask(server.url, lambda e: e.stream(BODY))
    assert stream.error is None
    assert stream.completion_tokens == 40
    assert stream.events[-1][1] == 40
    assert len(stream.events) < 40
    assert stream.finish_reason == "length"
    assert len(stream.text) == 40


def test_every_chunk_is_reported_while_it_comes(serve):
    server = serve()
    seen = []
    stream = ask(server.url, lambda e: e.stream(BODY, on_tokens=lambda _, n: seen.append(n)))
    assert tuple(seen) == tuple(n for _, n in stream.events)


def test_a_stalled_stream_is_an_error_with_what_had_arrived(serve):
    server = serve(stall_after_tokens=5)
    stream = ask(server.url, lambda e: e.stream(BODY), stall_s=0.3)
    assert stream.error == "no chunk for 0.3 s"
    assert 5 <= stream.completion_tokens < 40


def test_a_lost_connection_is_an_error_with_what_had_arrived(serve):
    server = serve(cut_after_tokens=5)
    stream = ask(server.url, lambda e: e.stream(BODY))
    assert "connection lost" in stream.error or "without [DONE]" in stream.error
    assert 5 <= stream.completion_tokens < 40


def test_a_refused_key_names_the_option(serve):
    server = serve(api_key="secret")
    with pytest.raises(BenchError, match=r"refused the key.*--api-key"):
        ask(server.url, lambda e: e.describe())
    assert ask(server.url, lambda e: e.describe(), api_key="secret")["model"] == "tiny"


def test_no_server_at_all_is_said():
    with pytest.raises(BenchError, match=r"No server answers at http://127\.0\.0\.1:9"):
        ask("http://127.0.0.1:9", lambda e: e.describe())


def test_a_wrong_model_name_lists_those_served(serve):
    server = serve()
    with pytest.raises(BenchError, match="serves tiny, not 'large'"):
        ask(server.url, lambda e: e.describe(), model="large")


def test_metrics_that_are_shut_off_are_said(serve):
    server = serve(metrics_status=404)
    with pytest.raises(BenchError, match=r"HTTP 404, expected 200.*--disable-log-stats"):
        ask(server.url, lambda e: e.snapshot())


def test_a_busy_server_is_not_measured(serve):
    server = serve()
    server.running = 2
    with pytest.raises(BenchError, match="not idle: 2 running"):
        ask(server.url, lambda e: e.wait_idle(timeout_s=0.0))


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_urls_are_taken_as_users_write_them(serve, suffix):
    server = serve()
    assert ask(server.url + suffix, lambda e: e.describe())["version"] == "0.33.0"
