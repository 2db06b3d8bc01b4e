"""Bracketed A/B: arms around a baseline that is measured before and after, so that drift shows.

An arm switches the server in one of three ways:

    width = 3                 written into the plugin's control file; the server keeps running and its graphs stay
    restart = "COMMAND"       a command that returns when the server has been told to restart
    start = "COMMAND"         the server itself, as a child process that is stopped at the end of the arm's visit

Commands get the arm's `env`, MAX_NUM_SEQS where the bracket sets it, and a VLLM_CACHE_ROOT of their own for every
different `env`: vLLM's compile cache does not know the draft width (vllm#53366), and an arm that reuses the graphs of
another one measures the other one.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import tempfile
import time
import tomllib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dflash_verify.bench.endpoint import Endpoint, by_width
from dflash_verify.bench.errors import BenchError
from dflash_verify.bench.records import Cell, Store
from dflash_verify.bench.runner import Runner, cells_of, run_visit, wait_ready
from dflash_verify.bench.workloads import Workload

# Between two lines that say that a server is still awaited.
STILL_WAITING_S = 30.0


Width = Annotated[int, Field(ge=0)]


class Arm(BaseModel):
    """One setting of the server under test. Frozen; part of the manifest."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[A-Za-z0-9_-]+$")
    # What the arm claims; an audit compares it with the widths the server counted.
    verify: Width | Literal["auto", "stock"] | None = None
    draft: Width | None = None
    width: Width | Literal["auto", "stock"] | None = None
    restart: str | None = None
    start: str | None = None
    env: dict[str, str] = Field(default_factory=dict)
    url: str | None = None

    @model_validator(mode="after")
    def _one_way_to_switch(self) -> Self:
        given = [key for key in ("width", "restart", "start") if getattr(self, key) is not None]
        if len(given) != 1:
            raise ValueError(
                f"arm {self.name!r} needs exactly one of width, restart and start, found {given or 'none'}"
            )
        if self.env and self.width is not None:
            raise ValueError(f"arm {self.name!r}: env has no effect on a live arm; use start or restart")
        widest = max((w for w in (self.verify, self.width) if isinstance(w, int)), default=0)
        if self.draft is not None and widest > self.draft:
            raise ValueError(f"arm {self.name!r}: width {widest} is wider than its draft width {self.draft}")
        return self

    @property
    def claimed_width(self) -> int | None:
        """The verify width every step must have, None for auto, stock and no claim."""
        claim = self.verify if self.verify is not None else self.width
        return claim if isinstance(claim, int) else None

    @property
    def label(self) -> str:
        """As the field writes it: draft/verify."""
        claim = self.verify if self.verify is not None else self.width
        return f"{self.name} {self.draft}/{claim}" if self.draft is not None else f"{self.name} {claim}"


class Config(BaseModel):
    """A bracket, as in its TOML file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str = "http://127.0.0.1:8000"
    model: str | None = None
    workloads: tuple[str, ...] = ("structured", "code", "prose")
    concurrency: tuple[int, ...] = (1, 2, 4)
    passes: int = Field(default=2, gt=0)
    repeats: int | None = Field(default=None, gt=0)
    max_tokens: int | None = Field(default=None, gt=0)
    seed: int = 0
    warmups: int = Field(default=1, ge=0)
    max_num_seqs: tuple[int, ...] = ()
    control_file: Path | None = None
    cache_root: Path | None = None
    ready_timeout_s: float = 1800.0
    baselines: tuple[str, ...] = ()
    # Names of environment variables, or "width": what the arms are meant to differ in.
    differs_in: tuple[str, ...] = ("width", "DFLASH_VERIFY_TOKENS", "DFLASH_TOKENS")
    arm: tuple[Arm, ...] = Field(min_length=2)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [arm.name for arm in self.arm]
        if len(set(names)) != len(names):
            raise ValueError(f"arm names must differ, found {names}")
        if unknown := set(self.baselines) - set(names):
            raise ValueError(f"baselines {sorted(unknown)} are no arms; arms are {names}")
        if self.control_file is None and any(arm.width is not None for arm in self.arm):
            raise ValueError("arms with a width need control_file, the path the server has in DFLASH_CONTROL_FILE")
        if self.max_num_seqs and any(arm.width is not None for arm in self.arm):
            raise ValueError("max_num_seqs cannot change on a live server; use start or restart in every arm")
        return self

    @property
    def live(self) -> bool:
        """Every arm is switched on a server that runs already."""
        return all(arm.width is not None for arm in self.arm)

    @property
    def baseline_names(self) -> tuple[str, ...]:
        """The arms the others are compared with: as given, else the first and, if it is the same setting, the last."""
        if self.baselines:
            return self.baselines
        first, last = self.arm[0], self.arm[-1]
        same = first.model_dump(exclude={"name"}) == last.model_dump(exclude={"name"})
        return (first.name, last.name) if same else (first.name,)


def load_config(path: Path) -> Config:
    try:
        return Config.model_validate(tomllib.loads(path.read_text()))
    except tomllib.TOMLDecodeError as error:
        raise BenchError(f"{path} is not TOML: {error}.") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise BenchError(
            f"{path}: {where}: {first['msg']}. `dflash-verify bracket --example` prints a valid one."
        ) from None


def live_config(control_file: Path, draft: int, narrow: int, *, auto: bool, **rest: Any) -> Config:
    """The default bracket on one running server: full, narrow, (auto,) full."""
    arms = [
        Arm(name="A1", width=draft, draft=draft),
        Arm(name="B", width=narrow, draft=draft),
        *([Arm(name="auto", width="auto", draft=draft)] if auto else []),
        Arm(name="A2", width=draft, draft=draft),
    ]
    return Config(control_file=control_file, arm=tuple(arms), **rest)


@dataclass(frozen=True, slots=True)
class Visit:
    """One stay at an arm: its runs are made in one go."""

    pass_index: int
    max_num_seqs: int
    arm: Arm
    cells: tuple[Cell, ...]


def plan_visits(config: Config, workloads: tuple[Workload, ...]) -> list[Visit]:
    """All visits in order; every second pass reverses the arms between the baselines, so that a trend favours none."""
    visits = []
    for seqs in config.max_num_seqs or (0,):
        for pass_index in range(config.passes):
            for arm in order_of(config, pass_index):
                cells = cells_of(workloads, config.concurrency, arm=arm.name, pass_index=pass_index, max_num_seqs=seqs)
                visits.append(Visit(pass_index, seqs, arm, tuple(cells)))
    return visits


def order_of(config: Config, pass_index: int) -> list[Arm]:
    bracketed = len(config.baseline_names) > 1
    first, inner, last = (
        (list(config.arm[:1]), list(config.arm[1:-1]), list(config.arm[-1:]))
        if bracketed
        else ([], list(config.arm), [])
    )
    return first + (inner[::-1] if pass_index % 2 else inner) + last


def write_control_file(path: Path, width: int | str) -> None:
    """Tell a running server its width; in one piece, because the scheduler may read at any moment."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as file:
        json.dump({"width": width}, file)
    # mkstemp's 0600 would hide it from a server that runs as another user.
    Path(file.name).chmod(0o644)
    Path(file.name).replace(path)


def check_control_file(path: Path) -> None:
    """BenchError unless the control file can be written here, as switching a live server needs."""
    if not path.parent.is_dir():
        raise BenchError(
            f"There is no directory {path.parent} for the control file {path.name}; "
            "pass the path that the server has in DFLASH_CONTROL_FILE, on a machine that shares it."
        )
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise BenchError(
            f"The control file {path} cannot be written here; pass the path that the server has in DFLASH_CONTROL_FILE, "
            "in a directory that this user may write to."
        )


async def check_live(config: Config, api_key: str | None) -> None:
    """BenchError when a server that the bracket does not start does not answer: before anything is written."""
    for url in sorted({arm.url or config.url for arm in config.arm}):
        async with Endpoint(url, model=config.model, api_key=api_key) as endpoint:
            await endpoint.describe()


async def switch_live(endpoint: Endpoint, path: Path, arm: Arm, *, timeout_s: float = 10.0) -> None:
    """Write the control file and prove with short requests that the server has followed it."""
    assert arm.width is not None
    before = await endpoint.wait_idle()
    if not before.has_plugin:
        raise BenchError(
            f"The server at {endpoint.url} exports no dflash_verify_* counters, so it cannot be shown to follow "
            f"{path}. Install the plugin there, set DFLASH_VERIFY_TOKENS and DFLASH_CONTROL_FILE, and restart it."
        )
    write_control_file(path, arm.width)
    body = {
        "messages": [{"role": "user", "content": "Count from 1 to 50."}],
        "max_tokens": 32,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    seen: dict[int, float] = {}
    # The scheduler looks at the file now and then, and steps already scheduled keep their width.
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        before = await endpoint.wait_idle()
        stream = await endpoint.stream(body)
        if stream.error:
            raise BenchError(f"A request after switching to arm {arm.name} failed: {stream.error}.")
        after = await endpoint.wait_settled(before.generation_tokens + stream.completion_tokens)
        seen = by_width(after.steps, before.steps)
        if seen and (not isinstance(arm.width, int) or set(seen) == {arm.width}):
            return
    raise BenchError(
        f"The server does not follow {path}: asked for width {arm.width}, its steps were {seen}. "
        "Is this the path in its DFLASH_CONTROL_FILE, and is the width one of its captured ones?"
    )


def command_env(config: Config, arm: Arm, max_num_seqs: int, default_cache_root: Path) -> dict[str, str]:
    """Environment of an arm's command: one compile cache for each different set of variables."""
    own = {**arm.env, **({"MAX_NUM_SEQS": str(max_num_seqs)} if max_num_seqs else {})}
    key = hashlib.sha256(json.dumps([own, arm.start or arm.restart], sort_keys=True).encode()).hexdigest()[:12]
    root = config.cache_root or default_cache_root
    return {**os.environ, "VLLM_CACHE_ROOT": str(root / key), **own}


@contextlib.asynccontextmanager
async def server_of(
    config: Config, visit: Visit, directory: Path, api_key: str | None, stall_s: float, say: Callable[[str], None]
) -> AsyncIterator[tuple[Endpoint, dict[str, Any]]]:
    """The endpoint of a visit, ready and switched, and what it says about itself."""
    arm = visit.arm
    url = arm.url or config.url
    env = command_env(config, arm, visit.max_num_seqs, directory / "vllm-cache")
    child: subprocess.Popen[bytes] | None = None
    log = directory / f"server-{arm.name}.log"
    async with Endpoint(url, model=config.model, api_key=api_key, stall_s=stall_s) as endpoint:
        try:
            if arm.restart is not None:
                say(f"{arm.label}: {arm.restart}")
                done = await asyncio.to_thread(
                    subprocess.run, ["bash", "-c", arm.restart], env=env, check=False, capture_output=True, text=True
                )
                if done.returncode:
                    raise BenchError(
                        f"The restart command of arm {arm.name} ended with {done.returncode}: "
                        f"{(done.stderr or done.stdout).strip()[-400:]}"
                    )
            elif arm.start is not None:
                say(f"{arm.label}: {arm.start}")
                with log.open("ab") as out:
                    child = subprocess.Popen(
                        ["bash", "-c", f"exec {arm.start}"],
                        env=env,
                        stdout=out,
                        stderr=out,
                        stdin=subprocess.DEVNULL,
                        start_new_session=True,
                    )
            # A live server runs already, or nothing here will start it.
            timeout_s = 0.0 if arm.width is not None else config.ready_timeout_s
            ready = asyncio.create_task(wait_ready(endpoint, timeout_s))
            start_s = said_s = time.monotonic()
            if timeout_s:
                say(f"{arm.label}: waiting up to {timeout_s:g} s for {url}")
            while not ready.done():
                await asyncio.wait({ready}, timeout=0.5)
                if not ready.done() and time.monotonic() - said_s > STILL_WAITING_S:
                    said_s = time.monotonic()
                    say(f"{arm.label}: still waiting after {said_s - start_s:.0f} s")
                if child is not None and child.poll() is not None and not ready.done():
                    ready.cancel()
                    raise BenchError(
                        f"The server of arm {arm.name} ended with {child.returncode} before it was ready; see {log}."
                    )
            facts = ready.result()
            if arm.width is not None:
                assert config.control_file is not None
                await switch_live(endpoint, config.control_file, arm)
            yield endpoint, facts
        finally:
            if child is not None:
                await asyncio.to_thread(_stop, child)


def _stop(child: "subprocess.Popen[bytes]", grace_s: float = 30.0) -> None:
    """End the server and everything it started: SIGTERM, then SIGKILL to the group."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, sent)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(grace_s)
            if sent is signal.SIGTERM:
                # The front end may be gone while EngineCore still holds the GPU.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
            return


async def run_bracket(
    config: Config,
    workloads: tuple[Workload, ...],
    store: Store,
    make_runner: Callable[[Endpoint], Runner],
    *,
    api_key: str | None,
    stall_s: float,
    say: Callable[[str], None],
) -> None:
    """All visits that are not complete. A lost server is started once more where the arm has a command for it."""
    for visit in plan_visits(config, workloads):
        attempts = 1 if visit.arm.width is not None else 2
        for attempt in range(1, attempts + 1):
            if all(cell.id in store.complete for cell in visit.cells):
                break
            try:
                await _visit(config, visit, workloads, store, make_runner, api_key, stall_s, say)
            except BenchError as error:
                if attempt == attempts:
                    raise
                say(f"{error} Starting arm {visit.arm.name} once more.")


async def _visit(
    config: Config,
    visit: Visit,
    workloads: tuple[Workload, ...],
    store: Store,
    make_runner: Callable[[Endpoint], Runner],
    api_key: str | None,
    stall_s: float,
    say: Callable[[str], None],
) -> None:
    async with server_of(config, visit, store.directory, api_key, stall_s, say) as (endpoint, facts):
        now = await endpoint.snapshot()
        store.visits += 1
        store.add(
            {
                "kind": "visit",
                "visit": store.visits,
                "arm": visit.arm.name,
                "pass_index": visit.pass_index,
                "max_num_seqs": visit.max_num_seqs,
                "server": facts,
                "identity": now.identity,
                "info": now.info,
            }
        )
        await run_visit(make_runner(endpoint), workloads, list(visit.cells))
