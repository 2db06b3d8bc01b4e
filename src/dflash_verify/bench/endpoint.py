"""One OpenAI-compatible server: what it is, its counters, and one streamed request with the time of every chunk.

httpx directly. `vllm bench serve` and guidellm drive one workload and write one summary; a bracket needs raw per-request
records that can be recomputed, token counts from usage at every chunk (a chunk holds several tokens when drafts are
accepted), output hashes, streams whose decoding provably overlaps, and arms switched in between. The openai client
offers all that but builds a pydantic object per chunk: at 256 streams the client would be part of what is measured.
"""

import asyncio
import json
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx
from prometheus_client.parser import text_string_to_metric_families

from dflash_verify.bench.errors import BenchError
from dflash_verify.bench.workloads import text_sha256

_NEEDED = re.compile(
    r"(vllm:(num_requests_(running|waiting)|generation_tokens_total|num_preemptions_total|prefix_cache_hits_total"
    r"|spec_decode_num_\w+_total)|dflash_verify_\w+|process_start_time_seconds|vllm:generation_tokens_created)[ {]"
)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The server's counters at one moment, summed over engines; None where the server does not export them.

    steps, timed_steps, step_seconds: by verify width as text (JSON has no integer keys); empty without the plugin.
    verified, accepted: by position; `verified` is empty without the plugin.
    identity: differs when the server has been started again.
    """

    unix_s: float
    running: float
    waiting: float
    generation_tokens: float
    preemptions: float
    prefix_hits: float
    identity: float
    drafts: float | None = None
    draft_tokens: float | None = None
    accepted_tokens: float | None = None
    accepted: tuple[float, ...] = ()
    verified: tuple[float, ...] = ()
    steps: dict[str, float] = field(default_factory=dict)
    timed_steps: dict[str, float] = field(default_factory=dict)
    step_seconds: dict[str, float] = field(default_factory=dict)
    nonuniform_steps: float | None = None
    policy_active: float | None = None
    info: dict[str, str] | None = None
    reason: str | None = None

    @property
    def has_plugin(self) -> bool:
        return self.info is not None


def parse_metrics(text: str) -> Snapshot:
    """A Prometheus page as a Snapshot; ValueError when it is not one of a vLLM server."""
    page = "\n".join(line for line in text.splitlines() if _NEEDED.match(line)) + "\n"
    total: dict[str, float] = {}
    labelled: dict[str, dict[str, float]] = {}
    info: dict[str, str] | None = None
    reason: str | None = None
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            total[sample.name] = total.get(sample.name, 0.0) + sample.value
            for key in ("width", "position"):
                if key in sample.labels:
                    series = labelled.setdefault(sample.name, {})
                    series[sample.labels[key]] = series.get(sample.labels[key], 0.0) + sample.value
            if sample.name == "dflash_verify_info":
                info = dict(sample.labels)
            elif sample.name == "dflash_verify_last_decision_info":
                reason = sample.labels["reason"]
    if "vllm:generation_tokens_total" not in total:
        raise ValueError("no vllm:generation_tokens_total")

    def positions(name: str) -> tuple[float, ...]:
        series = labelled.get(name, {})
        return tuple(series[key] for key in sorted(series, key=int))

    accepted = positions("dflash_verify_accepted_tokens_total")
    return Snapshot(
        unix_s=time.time(),
        running=total.get("vllm:num_requests_running", 0.0),
        waiting=total.get("vllm:num_requests_waiting", 0.0),
        generation_tokens=total["vllm:generation_tokens_total"],
        preemptions=total.get("vllm:num_preemptions_total", 0.0),
        prefix_hits=total.get("vllm:prefix_cache_hits_total", 0.0),
        # Several API servers share counters through files and export neither; then a falling counter tells.
        identity=total.get("process_start_time_seconds", total.get("vllm:generation_tokens_created", 0.0)),
        drafts=total.get("vllm:spec_decode_num_drafts_total"),
        draft_tokens=total.get("vllm:spec_decode_num_draft_tokens_total"),
        accepted_tokens=total.get("vllm:spec_decode_num_accepted_tokens_total"),
        accepted=accepted or positions("vllm:spec_decode_num_accepted_tokens_per_pos_total"),
        verified=positions("dflash_verify_verified_tokens_total"),
        steps=labelled.get("dflash_verify_steps_total", {}),
        timed_steps=labelled.get("dflash_verify_timed_steps_total", {}),
        step_seconds=labelled.get("dflash_verify_step_seconds_total", {}),
        nonuniform_steps=total.get("dflash_verify_nonuniform_steps_total"),
        policy_active=total.get("dflash_verify_policy_active"),
        info=info,
        reason=reason,
    )


def snapshot_from_json(record: dict[str, Any]) -> Snapshot:
    return Snapshot(**{**record, "accepted": tuple(record["accepted"]), "verified": tuple(record["verified"])})


def by_width(after: dict[str, float], before: dict[str, float]) -> dict[int, float]:
    """The difference of two counters labelled by width, without widths that did not move."""
    delta = {int(width): n - before.get(width, 0.0) for width, n in after.items()}
    return {width: n for width, n in sorted(delta.items()) if n}


def by_position(after: Iterable[float], before: Iterable[float]) -> tuple[float, ...]:
    after, before = tuple(after), tuple(before)
    return tuple(a - (before[i] if i < len(before) else 0.0) for i, a in enumerate(after))


@dataclass(frozen=True, slots=True)
class Stream:
    """One streamed request. Times in ms since `sent_unix_s`; tokens are the server's usage, not chunks.

    events: (ms, completion tokens so far) at every chunk that brought tokens.
    error: None, or what went wrong, in words; the other fields then hold what had arrived.
    """

    sent_unix_s: float
    events: tuple[tuple[float, int], ...]
    completion_tokens: int
    prompt_tokens: int
    finish_reason: str | None
    text: str
    text_sha256: str
    error: str | None


def check_key(api_key: str | None) -> None:
    """BenchError when a key cannot travel in an HTTP header; the key is not repeated."""
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise BenchError(
            "The key of --api-key or OPENAI_API_KEY has a character that no HTTP header can carry, "
            "expected printable ASCII; copy it again."
        )


class Endpoint:
    """A server under measurement; use as an async context manager.

    stall_s: a request that gets no chunk for that long is an error.
    """

    def __init__(
        self, url: str, *, model: str | None = None, api_key: str | None = None, stall_s: float = 120.0
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model = model or ""
        self.stall_s = stall_s
        check_key(api_key)
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._client = httpx.AsyncClient(
            base_url=self.url,
            headers=headers,
            # One connection per stream, none queued in the client.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            timeout=httpx.Timeout(10.0, read=stall_s),
            trust_env=False,  # a proxy from the environment would be measured too
        )

    async def __aenter__(self) -> "Endpoint":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._client.aclose()

    @property
    def is_local(self) -> bool:
        return urlsplit(self.url).hostname in ("localhost", "127.0.0.1", "::1")

    async def describe(self) -> dict[str, Any]:
        """Version, model and maximum length; also the check that the server answers and accepts the key."""
        try:
            models = await self._client.get("/v1/models")
            version = await self._client.get("/version")
        except httpx.HTTPError as error:
            raise BenchError(f"No server answers at {self.url} ({_words(error)}); start it or pass --url.") from error
        if models.status_code in (401, 403):
            raise BenchError(
                f"The server at {self.url} refused the key (HTTP {models.status_code}); "
                "pass --api-key or set OPENAI_API_KEY."
            )
        if models.status_code != 200:
            raise BenchError(
                f"{self.url}/v1/models answered HTTP {models.status_code}, expected 200: {models.text[:200]}"
            )
        served = models.json()["data"]
        names = [entry["id"] for entry in served]
        if not self.model:
            self.model = names[0]
        if self.model not in names:
            raise BenchError(f"The server serves {', '.join(names)}, not {self.model!r}; pass --model.")
        entry = served[names.index(self.model)]
        return {
            "model": self.model,
            "root": entry.get("root"),
            "max_model_len": entry.get("max_model_len"),
            "version": version.json().get("version") if version.status_code == 200 else None,
        }

    async def snapshot(self) -> Snapshot:
        try:
            page = await self._client.get("/metrics", timeout=10.0)
        except httpx.HTTPError as error:
            raise BenchError(f"The server at {self.url} stopped answering ({_words(error)}).") from error
        if page.status_code != 200:
            raise BenchError(
                f"{self.url}/metrics answered HTTP {page.status_code}, expected 200: without counters nobody can say "
                "that the server was idle, was not restarted and which width it used. Serve without --disable-log-stats "
                "and let /metrics through."
            )
        try:
            return parse_metrics(page.text)
        except ValueError as error:
            raise BenchError(
                f"{self.url}/metrics is not that of a vLLM server ({error}); bench reads vLLM's counters."
            ) from error

    async def wait_idle(self, timeout_s: float = 60.0) -> Snapshot:
        """The first snapshot with nothing running and nothing waiting."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            now = await self.snapshot()
            if now.running + now.waiting == 0:
                return now
            if time.monotonic() > deadline_s:
                raise BenchError(
                    f"The server at {self.url} is not idle: {now.running:.0f} running and {now.waiting:.0f} waiting "
                    f"requests after {timeout_s:.0f} s. Stop other traffic, or it is measured too."
                )
            await asyncio.sleep(0.05)

    async def wait_settled(self, generation_tokens: float, timeout_s: float = 3.0) -> Snapshot:
        """An idle snapshot whose token counter has reached `generation_tokens`, or the last one before the timeout.

        The counters follow the last chunk by an instant.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            now = await self.wait_idle()
            if now.generation_tokens >= generation_tokens or time.monotonic() > deadline_s:
                return now
            await asyncio.sleep(0.05)

    async def stream(
        self,
        body: dict[str, Any],
        *,
        cache_salt: str | None = None,
        on_tokens: Callable[[float, int], None] | None = None,
    ) -> Stream:
        """Send one chat request and read it to its end; errors are returned in the record, not raised.

        cache_salt: vLLM shares prefix-cache blocks only within one salt, so a fresh one excludes hits.
        on_tokens(unix seconds, completion tokens so far) is called at every chunk with tokens.
        """
        payload = {**body, "model": self.model}
        if cache_salt is not None:
            payload["cache_salt"] = cache_salt
        sent_unix_s, start_s = time.time(), time.perf_counter()
        events: list[tuple[float, int]] = []
        parts: list[str] = []
        tokens = prompt_tokens = 0
        finish_reason = error = None
        done = False
        try:
            async with self._client.stream("POST", "/v1/chat/completions", json=payload) as response:
                if response.status_code != 200:
                    detail = (await response.aread()).decode(errors="replace")[:300]
                    error = f"HTTP {response.status_code}: {detail}"
                else:
                    async for line in response.aiter_lines():
                        if not line.startswith("data:"):
                            continue
                        data = line[5:].strip()
                        if data == "[DONE]":
                            done = True
                            break
                        chunk = json.loads(data)
                        if "error" in chunk:
                            error = f"server error in the stream: {json.dumps(chunk['error'])[:300]}"
                            break
                        for choice in chunk["choices"]:
                            delta = choice["delta"]
                            # Thinking that cannot be switched off counts as text; its key was renamed in vLLM.
                            parts.append(
                                delta.get("content") or delta.get("reasoning") or delta.get("reasoning_content") or ""
                            )
                            finish_reason = choice.get("finish_reason") or finish_reason
                        usage = chunk.get("usage")
                        if usage:
                            prompt_tokens = usage["prompt_tokens"]
                            if usage["completion_tokens"] > tokens:
                                tokens = usage["completion_tokens"]
                                now_ms = (time.perf_counter() - start_s) * 1000
                                events.append((round(now_ms, 3), tokens))
                                if on_tokens is not None:
                                    on_tokens(sent_unix_s + now_ms / 1000, tokens)
        except httpx.ReadTimeout:
            error = f"no chunk for {self.stall_s:g} s"
        except httpx.HTTPError as problem:
            error = f"connection lost: {_words(problem)}"
        except (ValueError, KeyError, TypeError) as problem:
            error = f"not an OpenAI chat stream: {_words(problem)}"
        if error is None and not done:
            error = "the stream ended without [DONE]"
        if error is None and tokens == 0:
            error = "the server reported no completion tokens in usage"
        text = "".join(parts)
        return Stream(
            sent_unix_s=sent_unix_s,
            events=tuple(events),
            completion_tokens=tokens,
            prompt_tokens=prompt_tokens,
            finish_reason=finish_reason,
            text=text,
            text_sha256=text_sha256(text),
            error=error,
        )


def as_json(value: Any) -> dict[str, Any]:
    """A dataclass as the dictionary that goes into a record."""
    return asdict(value)


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
