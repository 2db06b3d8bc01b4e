"""Measured step times of one server: the key they are valid for, where they are kept, and how they are measured."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from dflash_verify.settings import Settings, SettingsError, load
from dflash_verify.width.cost import CostKey, CostTable, CostTableError

logger = logging.getLogger("vllm.plugins.dflash_verify")


def cost_key(vllm_config: Any) -> CostKey:
    """What this engine's step times depend on."""
    import vllm
    from vllm.platforms import current_platform

    speculative = vllm_config.speculative_config
    return CostKey(
        gpu=str(current_platform.get_device_name()),
        tensor_parallel_size=vllm_config.parallel_config.tensor_parallel_size,
        target_config=_config_digest(vllm_config.model_config),
        draft_config=_config_digest(speculative.draft_model_config),
        engine_version=vllm.__version__,
        dtype=str(vllm_config.model_config.dtype).removeprefix("torch."),
        compilation=vllm_config.compilation_config.mode.name,
        capture_sizes=tuple(vllm_config.compilation_config.cudagraph_capture_sizes or ()),
    )


def _config_digest(model_config: Any) -> str:
    """12 hex digits over the checkpoint's own config.json, overrides and quantisation; weights and paths do not matter.

    Not over the configuration object: vLLM writes into it while it loads, so a front end and the engine it starts would
    disagree.
    """
    from transformers import PretrainedConfig

    raw, _ = PretrainedConfig.get_config_dict(model_config.model, revision=model_config.revision)
    for name in ("_name_or_path", "_commit_hash", "transformers_version", "torch_dtype", "dtype"):
        raw.pop(name, None)
    overrides = model_config.hf_overrides
    raw["overrides"] = overrides if isinstance(overrides, dict) else None
    raw["quantization"] = model_config.quantization
    return hashlib.sha256(json.dumps(raw, sort_keys=True, default=str).encode()).hexdigest()[:12]


def cache_dir(settings: Settings) -> Path:
    """Where tables are kept: DFLASH_CACHE_DIR, else `dflash-verify` in the user's cache directory."""
    if settings.cache_dir is not None:
        return settings.cache_dir
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "dflash-verify"


def table_path(key: CostKey, settings: Settings) -> Path:
    """The file of this key's table."""
    if settings.cost_table is not None:
        return settings.cost_table
    name = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
    return cache_dir(settings) / f"cost-{name}.json"


def stored_table(vllm_config: Any, settings: Settings) -> CostTable | None:
    """The table measured for this engine at its widths, or None: there is none, or it is another's, which the log says.

    Raises CostTableError if DFLASH_COST_TABLE names a table that is not this engine's.
    """
    key = cost_key(vllm_config)
    path = table_path(key, settings)
    if settings.cost_table is None and not path.exists():
        return None
    widths = {entry[2] for entry in vllm_config.speculative_config.num_speculative_tokens_per_batch_size}
    try:
        return CostTable.load(path, key).restrict(widths)
    except CostTableError as error:
        if settings.cost_table is not None:
            raise
        logger.warning("dflash-verify: the stored table is not used: %s.", str(error).rstrip("."))
        return None


# -- measuring ---------------------------------------------------------------------------------------------------------

DEFAULT_SECONDS = 60  # what a server under `auto` without a table may spend before it serves
WARM_STEPS = 3
STEPS = 20  # 10 % step noise over 20 steps puts the median within 3 % (docs/width.md)
LEAST_STEPS = 5
PROMPT_TOKENS = 32
GIVE_UP_STEPS = 8  # in a row in which no further request has started


def seconds_allowed(settings: Settings) -> int:
    """DFLASH_PROFILE_SECONDS, else a minute for `auto` (once: the table is kept) and nothing for a static width, nor on
    the CPU engine, whose step times say nothing about a GPU."""
    if settings.profile_seconds is not None:
        return settings.profile_seconds
    return DEFAULT_SECONDS if settings.verify_tokens.mode == "auto" and not settings.cpu else 0


def batch_sizes(max_num_seqs: int) -> list[int]:
    """Powers of two and their halfway points up to the slots, both ends included: 1, 2, 3, 4, 6, 8, 12, 16, ..."""
    sizes = {1, max_num_seqs}
    power = 1
    while power < max_num_seqs:
        sizes |= {power, power + power // 2}
        power *= 2
    return sorted(size for size in sizes if size <= max_num_seqs)


def measuring_order(sizes: Sequence[int]) -> list[int]:
    """Both ends first, then the middle of the widest gap: wherever the time ends, what was measured spans the slots, and
    what was not lies between. Step time beyond the last measured size would be a guess."""
    order = [sizes[0], sizes[-1]] if len(sizes) > 1 else list(sizes)
    gaps = [(0, len(sizes) - 1)]
    while gaps:
        low, high = gaps.pop(0)
        if high - low > 1:
            middle = (low + high) // 2
            order.append(sizes[middle])
            gaps += [(low, middle), (middle, high)]
    return order


def measure_at_start(core: Any, settings: Settings) -> None:
    """In a new EngineCore: measure and store the table of this engine, unless there is one or no time is allowed.

    Whatever goes wrong costs the table, not the server: the controller then learns while serving.
    """
    scheduler = core.scheduler
    config = core.vllm_config
    if settings.verify_tokens.mode != "auto" or settings.cost_table is not None:
        return
    allowed_s = seconds_allowed(settings)
    if not allowed_s or stored_table(config, settings) is not None:
        return
    path = table_path(cost_key(config), settings)
    logger.info("dflash-verify: measuring step times, at most %d s (once; they are kept in %s).", allowed_s, path)
    try:
        table = measure(core, allowed_s)
        if table is None:
            logger.warning("dflash-verify: no step time could be measured; the controller learns while serving.")
            return
        table.save(path)
    except Exception:
        logger.exception("dflash-verify: measuring step times failed; the controller learns while serving.")
        return
    scheduler.steering.restart()
    logger.info("dflash-verify: step times, ms: %s.", describe(table))


def describe(table: CostTable) -> str:
    """`1 request: 1 7.5, 3 8.2, 7 8.6; 32 requests: ...` for the log."""
    rows = []
    for batch in sorted(table.cells):
        row = ", ".join(f"{width} {ms:.1f}" for width, ms in zip(table.widths, table.cells[batch], strict=True))
        rows.append(f"{batch} request{'s' if batch > 1 else ''}: {row}")
    return "; ".join(rows)


class _NoRoom(Exception):
    """Fewer requests run together than were to be measured, mostly for want of KV cache. fits: how many to try, at least 1."""

    def __init__(self, fits: int) -> None:
        super().__init__(fits)
        self.fits = fits


def measure(core: Any, allowed_s: float) -> CostTable | None:
    """Step time of every captured (batch, width) with requests of random tokens, on the real engine: its scheduler,
    graphs, drafter, sampler and every rank. Sizes whose turn comes when the time is over are left out. Where the KV cache
    holds fewer requests than there are slots, as many as it holds take the place of the slots."""
    scheduler = core.scheduler
    steering = scheduler.steering
    deadline_s = time.monotonic() + allowed_s
    widths = tuple(sorted({*steering.widths, steering.draft_width}))
    cells: dict[int, tuple[float, ...]] = {}
    rng = random.Random(0)
    sizes = measuring_order(batch_sizes(_slots(scheduler)))
    while sizes:
        batch = sizes.pop(0)
        row: list[float] = []
        try:
            for width in widths:
                ms = _measure_cell(core, batch, width, rng) if time.monotonic() < deadline_s else None
                if ms is None:
                    break
                row.append(ms)
        except _NoRoom as full:
            sizes = [size for size in measuring_order(batch_sizes(full.fits)) if size not in cells]
        if len(row) == len(widths):
            cells[batch] = tuple(row)
    scheduler.reset_prefix_cache()
    if not cells:
        return None
    key = cost_key(core.vllm_config)
    return CostTable(steering.draft_width, widths, cells, key.capture_sizes, key)


def _slots(scheduler: Any) -> int:
    """Requests that run together at most; 0.33 may allow fewer than max_num_seqs."""
    slots: int = scheduler.scheduler_config.max_num_seqs
    return min(slots, getattr(scheduler, "max_num_active_reqs", slots))


def _measure_cell(core: Any, batch: int, width: int, rng: random.Random) -> float | None:
    """Median step time in ms of `batch` requests at `width`; None if too few steps had nothing else in them. Raises
    _NoRoom."""
    steering = core.scheduler.steering
    room = core.vllm_config.model_config.max_model_len - PROMPT_TOKENS
    ids = [f"dflash-verify-{batch}-{width}-{i}" for i in range(batch)]
    samples: list[float] = []
    steering.forced = width
    steering.on_step = lambda step: samples.append(step.step_ms) if _counts(step, batch, width) else None
    try:
        for request_id in ids:
            core.add_request(*core.preprocess_add_request(random_request(core, request_id, room, rng)))
        # Running requests take their tokens first, so the last prefills may get few of a step's. What never becomes a clean
        # step must not loop for ever, and what does not fit together is given up once no more requests start, or once one
        # of them was preempted.
        idle, started = 0, 0
        for _ in range(WARM_STEPS + STEPS + 4 + batch):
            _advance(core)
            if len(samples) >= WARM_STEPS + STEPS:
                break
            decoding = sum(request.num_output_tokens > 0 for request in core.scheduler.running)
            idle = 0 if decoding > started else idle + 1
            started = max(started, decoding)
            if decoding < batch and idle > GIVE_UP_STEPS:
                break
    finally:
        core.abort_requests(ids)
        _drain(core)
        steering.forced = steering.on_step = None
    samples = samples[WARM_STEPS:]
    if len(samples) >= LEAST_STEPS:
        return statistics.median(samples)
    # Where all have started, they have outgrown the KV cache.
    fits = started if started < batch else batch * 7 // 8
    if fits:
        raise _NoRoom(fits)
    return None


def _counts(step: Any, batch: int, width: int) -> bool:
    return step.step_ms is not None and step.batch == batch and step.width == width


def _advance(core: Any) -> None:
    _, executed = core.step_fn()
    core.post_step(executed)


def _drain(core: Any) -> None:
    """Until nothing is in flight: the asynchronous scheduler is a step ahead of the aborts."""
    for _ in range(16):
        if not core.scheduler.has_requests() and not core.batch_queue:
            return
        _advance(core)


def random_request(core: Any, request_id: str, max_tokens: int, rng: random.Random) -> Any:
    """An EngineCoreRequest with random tokens; fields that a release requires beyond ours are empty."""
    import msgspec
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    vocabulary = core.vllm_config.model_config.get_vocab_size()
    required = {
        field.name: None
        for field in msgspec.structs.fields(EngineCoreRequest)
        if field.default is msgspec.NODEFAULT and field.default_factory is msgspec.NODEFAULT
    }
    fields = {
        "request_id": request_id,
        "prompt_token_ids": [rng.randrange(vocabulary) for _ in range(PROMPT_TOKENS)],
        "sampling_params": SamplingParams(temperature=1.0, max_tokens=max(1, max_tokens), ignore_eos=True),
        "arrival_time": time.time(),
    }
    return EngineCoreRequest(**(required | fields))


# -- the command -------------------------------------------------------------------------------------------------------


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--seconds", type=click.IntRange(1, 3600), default=600, show_default=True, help="Time allowed.")
@click.option("--again", is_flag=True, help="Measure even if a table is stored.")
@click.argument("serve_args", nargs=-1, type=click.UNPROCESSED)
def profile(seconds: int, again: bool, serve_args: tuple[str, ...]) -> None:
    """Measure step time per batch size and width; store the cost table.

    SERVE_ARGS are the arguments of `vllm serve`: dflash-verify profile -- MODEL --speculative-config '{...}' ...
    DFLASH_VERIFY_TOKENS says which widths (auto or auto:K,K,...).
    """
    os.environ.setdefault("DFLASH_VERIFY_TOKENS", "auto")
    os.environ["DFLASH_PROFILE_SECONDS"] = str(seconds)
    # One process, whose scheduler can be asked; tensor parallel workers are processes of their own all the same.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    try:
        settings = load()
    except SettingsError as error:
        raise click.ClickException(str(error)) from None
    if settings.verify_tokens.mode != "auto":
        raise click.ClickException(
            f"DFLASH_VERIFY_TOKENS={settings.verify_tokens} is a single width, which needs no cost table: set it to auto "
            "or a list such as auto:1,3,7."
        )
    if not serve_args:
        raise click.ClickException("The model is missing: dflash-verify profile -- MODEL --speculative-config '{...}'.")
    if importlib.util.find_spec("vllm") is None:
        raise click.ClickException("vLLM is not installed in this Python environment: run this where the server runs.")
    path, table = _profile(settings, list(serve_args), again)
    if table is None:
        raise click.ClickException("No step time could be measured: see the log above.")
    click.echo(describe(table))
    click.echo(f"stored in {path}")


def _profile(settings: Settings, serve_args: list[str], again: bool) -> tuple[Path, CostTable | None]:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.llm_engine import LLMEngine

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.add_argument("model_tag", nargs="?")
    args, unknown = parser.parse_known_args(serve_args)
    if unknown:
        click.echo(f"ignored (flags of the HTTP server, not of the engine): {' '.join(unknown)}", err=True)
    if args.model_tag:
        args.model = args.model_tag
    engine_args = EngineArgs.from_cli_args(args)
    try:
        config = engine_args.create_engine_config(UsageContext.OPENAI_API_SERVER)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()
        raise click.ClickException(
            f"vLLM does not accept these arguments: {reason[-1] if reason else error!r}"
        ) from None
    path = table_path(cost_key(config), settings)
    if again:
        path.unlink(missing_ok=True)
    engine = LLMEngine.from_engine_args(engine_args, usage_context=UsageContext.OPENAI_API_SERVER)
    table = stored_table(engine.vllm_config, settings)
    engine.engine_core.shutdown()
    sys.stdout.flush()
    return path, table
