"""Overlay *plan*: an engine's configuration gets the width plan where vLLM builds it.

Three places in `EngineArgs`, in this order: the speculative config (schedule, drafter, block verification), the request
slots (capture sizes), the finished config (what cannot be supported). They run in every front end, every API server
process and every headless node, sometimes twice on one `EngineArgs`, so each is idempotent and none takes what another
wrote for the operator's. A fourth, `Worker.load_model`, logs the plan's digest on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from dflash_verify import block
from dflash_verify import plan as planner
from dflash_verify.overlays.attach import AnyFunction, Context, Wrap
from dflash_verify.overlays.manifest import release_key
from dflash_verify.plan import EngineFacts, Plan
from dflash_verify.settings import Settings, SettingsError

FAMILY = ("dflash", "dspark")
SCHEDULER = "dflash_verify.scheduler.width_scheduler"
LEAVES_OUT_THE_DRAFTER = (0, 33, 0)  # the first release whose step at K = 0 has no drafter's pass
_STATE = "_dflash_verify"


@dataclass(slots=True)
class _State:
    """What the three places of one EngineArgs tell each other."""

    speculative: Any = None
    facts: EngineFacts | None = None  # slots still unknown in the first place
    plan: Plan | None = None
    capture_sizes: list[int] | None = None  # ours, as set on the EngineArgs
    given_up: str = ""  # DFLASH_VERIFY_STRICT=0: why this engine runs as stock


def _state(args: Any) -> _State:
    if _STATE not in vars(args):
        setattr(args, _STATE, _State())
    state: _State = getattr(args, _STATE)
    return state


def is_active(vllm_config: Any) -> bool:
    """Whether this engine runs under a width plan, also in a process that only received its configuration."""
    return bool(vllm_config.scheduler_config.scheduler_cls == SCHEDULER)


def running_digest(vllm_config: Any, settings: Settings) -> tuple[str, tuple[int, ...]]:
    """Digest and widths of the plan that this configuration really holds."""
    speculative = vllm_config.speculative_config
    widths = tuple(sorted({entry[2] for entry in speculative.num_speculative_tokens_per_batch_size or ()}))
    return planner.digest(
        str(settings.verify_tokens),
        speculative.num_speculative_tokens,
        widths,
        vllm_config.compilation_config.cudagraph_capture_sizes or (),
        vllm_config.scheduler_config.max_num_seqs,
        speculative.rejection_sample_method,
    ), widths


def _logger() -> Any:
    from vllm.logger import init_logger

    # Below "vllm", whose handler and level the operator has configured.
    return init_logger("vllm.plugins.dflash_verify")


def _named(settings: Settings) -> str:
    """How the operator asked, for a sentence."""
    if settings.width_active:
        return f"DFLASH_VERIFY_TOKENS={settings.verify_tokens}"
    return "DFLASH_BLOCK_VERIFY=1"


def _give_up(args: Any, state: _State, error: SettingsError) -> None:
    """Stock behaviour for this engine (DFLASH_VERIFY_STRICT=0)."""
    _logger().warning("dflash-verify: %s This engine runs as stock vLLM (DFLASH_VERIFY_STRICT=0).", error)
    state.given_up = str(error)
    if args.scheduler_cls == SCHEDULER:
        args.scheduler_cls = None
    if state.capture_sizes is not None and args.cudagraph_capture_sizes == state.capture_sizes:
        args.cudagraph_capture_sizes = None
    state.speculative = state.facts = state.plan = state.capture_sizes = None


# -- 1. the speculative config -----------------------------------------------------------------------------------------


def wrap_create_speculative_config(original: AnyFunction, context: Context) -> AnyFunction:
    settings: Settings = context.settings

    def create_speculative_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = _state(self)
        if state.given_up:
            return original(self, *args, **kwargs)
        as_given = self.speculative_config
        asked_for = {key.replace("-", "_"): value for key, value in (as_given or {}).items()}
        try:
            _prepare(self, asked_for, settings)
            config = original(self, *args, **kwargs)
            _attach_to_speculative(self, config, asked_for, context)
        except SettingsError as error:
            if settings.verify_strict:
                raise
            _give_up(self, state, error)
            self.speculative_config = as_given
            return original(self, *args, **kwargs)
        return config

    return create_speculative_config


def _prepare(args: Any, asked_for: dict[str, Any], settings: Settings) -> None:
    """Refuse what is known before the drafter's config is read, and give vLLM the draft width if nobody did."""
    named = _named(settings)
    given = dict(asked_for)
    for field, key in (("spec_method", "method"), ("spec_model", "model"), ("spec_tokens", "num_speculative_tokens")):
        if getattr(args, field, None) is not None:
            given[key] = getattr(args, field)
    if not given:
        raise SettingsError(
            f"{named} needs a DFlash-family drafter but no --speculative-config is given: add one with method dflash "
            "or dspark, or unset the variable."
        )
    method = given.get("method")
    if method is not None and method not in FAMILY:
        raise SettingsError(_wrong_method(named, method))
    _refuse_runner_v1(named)
    if settings.width_active:
        _refuse_other_schedules(args, given, named)
        _give_draft_width(args, given, settings)


def _refuse_runner_v1(named: str) -> None:
    """What the operator forced; whether vLLM chose V1 by itself is known only in the finished config."""
    from vllm import envs

    if envs.VLLM_USE_V2_MODEL_RUNNER is not None and not envs.VLLM_USE_V2_MODEL_RUNNER:
        raise SettingsError(
            f"{named} needs Model Runner V2 but VLLM_USE_V2_MODEL_RUNNER=0 forces V1: remove that or unset the variable."
        )


def _wrong_method(named: str, method: Any) -> str:
    return (
        f"{named} needs a DFlash-family drafter but the speculative method is {method}: use method dflash or dspark, or "
        "unset the variable."
    )


def _refuse_other_schedules(args: Any, given: dict[str, Any], named: str) -> None:
    schedule = given.get("num_speculative_tokens_per_batch_size")
    if schedule is not None:
        raise SettingsError(
            f"{named} and num_speculative_tokens_per_batch_size={schedule} both choose the verify width: remove one."
        )
    if given.get("enable_adaptive_verification"):
        raise SettingsError(f"{named} and enable_adaptive_verification both choose the verify width: remove one.")
    if args.scheduler_cls not in (None, SCHEDULER):
        raise SettingsError(
            f"{named} needs its own scheduler but --scheduler-cls {args.scheduler_cls} is given: remove that flag or "
            "unset the variable."
        )


def _give_draft_width(args: Any, given: dict[str, Any], settings: Settings) -> None:
    chosen = given.get("num_speculative_tokens")
    if chosen is not None:
        if settings.tokens is not None and settings.tokens != chosen:
            raise SettingsError(
                f"DFLASH_TOKENS={settings.tokens} and num_speculative_tokens={chosen} disagree on the draft width: "
                "remove one."
            )
        return
    width = settings.tokens
    if width is None and given.get("method") != "dspark":  # vLLM itself takes DSpark's block
        block_size = _block_of_checkpoint(given)
        width = block_size - 1 if block_size is not None else None
    if width is not None:
        args.speculative_config = {**(args.speculative_config or {}), "num_speculative_tokens": width}


def _block_of_checkpoint(given: dict[str, Any]) -> int | None:
    """`block_size` in the drafter's config.json; None if it names none or cannot be read, and vLLM then says more."""
    if not given.get("model"):
        return None
    from transformers import PretrainedConfig

    try:
        raw, _ = PretrainedConfig.get_config_dict(given["model"], revision=given.get("revision"))
    except (OSError, ValueError):
        return None
    block_size = raw.get("block_size", (raw.get("dflash_config") or {}).get("block_size"))
    return block_size if isinstance(block_size, int) and block_size > 1 else None


def _attach_to_speculative(args: Any, config: Any, asked_for: dict[str, Any], context: Context) -> None:
    settings: Settings = context.settings
    if config.method not in FAMILY:
        raise SettingsError(_wrong_method(_named(settings), config.method))
    if settings.block_verify:
        _attach_block_verification(config, asked_for)
    state = _state(args)
    state.speculative = config
    if not settings.width_active:
        return
    n = config.num_speculative_tokens
    _judge_draft_width(n, _trained_width(config), settings)
    state.facts = EngineFacts(
        draft_width=n,
        max_num_seqs=args.max_num_seqs or 1,
        draft_query_len=_draft_query_len(config, n),
        plain_decoding=release_key(context.release) >= LEAVES_OUT_THE_DRAFTER,
    )
    # Refuses a width beyond N now; the schedule needs no slot count, and is written again once that is known.
    plan = planner.make_plan(settings, replace(state.facts, user_capture_sizes=(1,)))
    config.num_speculative_tokens_per_batch_size = list(plan.schedule)
    args.scheduler_cls = SCHEDULER


def _judge_draft_width(n: int, trained: int | None, settings: Settings) -> None:
    if trained is None or n == trained:
        return
    name = "DFLASH_TOKENS" if settings.tokens else "num_speculative_tokens"
    if n > trained:
        raise SettingsError(
            f"{name}={n} is more than the {trained} tokens that the drafter was trained to propose: set it to "
            f"{trained} or less, or leave it out."
        )
    _logger().warning(
        "dflash-verify: %s=%d shortens the drafter's trained block of %d tokens: a comparison arm, not a setting to "
        "serve with; DFLASH_VERIFY_TOKENS narrows what is verified instead.",
        name,
        n,
        trained,
    )


def _draft_hf_config(config: Any) -> Any:
    return getattr(getattr(config, "draft_model_config", None), "hf_config", None)


def _trained_width(config: Any) -> int | None:
    """Tokens the drafter was trained to propose: its block less the anchor, DSpark's whole block."""
    hf_config = _draft_hf_config(config)
    block_size = getattr(hf_config, "block_size", None)
    if block_size is None and config.method == "dspark":
        block_size = getattr(hf_config, "dspark_block_size", None)
    if not isinstance(block_size, int) or block_size < 2:
        return None
    return block_size if config.method == "dspark" else block_size - 1


def _draft_query_len(config: Any, n: int) -> int:
    """Rows per request in the drafter's pass (`num_query_per_req` of vLLM's speculators)."""
    anchor_first = config.method == "dspark" and getattr(_draft_hf_config(config), "sample_from_anchor", True)
    return n if anchor_first else n + 1


def _attach_block_verification(config: Any, asked_for: dict[str, Any]) -> None:
    from pathlib import Path

    import vllm
    from vllm.platforms import current_platform

    decision = block.decide(
        block.Request(
            method=config.method,
            architectures=tuple(getattr(_draft_hf_config(config), "architectures", None) or ()),
            capabilities=block.read_capabilities(Path(vllm.__file__).parent, vllm.__version__),
            model_runner_v2=True,  # judged in the third place, where vLLM knows
            device=current_platform.device_type,
            draft_sample_method=asked_for.get("draft_sample_method"),
            rejection_sample_method=asked_for.get("rejection_sample_method"),
            use_local_argmax_reduction=bool(asked_for.get("use_local_argmax_reduction")),
        )
    )
    if decision.refusal is not None:
        raise SettingsError(decision.refusal)
    if decision.rejection_sample_method is not None:
        config.rejection_sample_method = decision.rejection_sample_method
    if decision.draft_sample_method is not None:
        config.draft_sample_method = decision.draft_sample_method
    if decision.start_line is not None:
        _logger().info("dflash-verify: %s", decision.start_line)
    if decision.warning is not None:
        _logger().warning_once("dflash-verify: %s", decision.warning)


# -- 2. the request slots ----------------------------------------------------------------------------------------------


def wrap_set_default_max_num_seqs(original: AnyFunction, context: Context) -> AnyFunction:
    settings: Settings = context.settings

    def set_default_max_num_seqs_and_batched_tokens_args(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        state = _state(self)
        if state.facts is None:
            return result
        try:
            _attach_capture_sizes(self, state, settings)
        except SettingsError as error:
            if settings.verify_strict:
                raise
            state.speculative.num_speculative_tokens_per_batch_size = None
            _give_up(self, state, error)
        return result

    return set_default_max_num_seqs_and_batched_tokens_args


def _attach_capture_sizes(args: Any, state: _State, settings: Settings) -> None:
    assert state.facts is not None
    state.plan = planner.make_plan(
        settings,
        replace(
            state.facts,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            user_capture_sizes=_operators_capture_sizes(args, state),
        ),
    )
    state.speculative.num_speculative_tokens_per_batch_size = list(state.plan.schedule)
    if state.plan.sizes_are_ours and not args.enforce_eager:
        state.capture_sizes = args.cudagraph_capture_sizes = list(state.plan.capture_sizes)


def _operators_capture_sizes(args: Any, state: _State) -> tuple[int, ...] | None:
    compilation = args.compilation_config
    sizes = args.cudagraph_capture_sizes
    if sizes is not None and sizes == state.capture_sizes:
        sizes = None  # ours, from an earlier pass
    if sizes is None:
        sizes = compilation.cudagraph_capture_sizes
    if sizes is None:
        top = args.max_cudagraph_capture_size or compilation.max_cudagraph_capture_size
        if top is not None:  # an upper bound is the operator's list too: vLLM fills it with its own grid
            sizes = [size for size in (1, 2, 4, *range(8, 256, 8), *range(256, top + 1, 16)) if size <= top]
    return None if sizes is None else tuple(sizes)


# -- 3. the finished config --------------------------------------------------------------------------------------------


def wrap_create_engine_config(original: AnyFunction, context: Context) -> AnyFunction:
    settings: Settings = context.settings

    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = original(self, *args, **kwargs)
        state = _state(self)
        if state.speculative is None:
            return config
        try:
            _refuse_unsupported(config, settings)
        except SettingsError as error:
            if settings.verify_strict:
                raise
            _give_up(self, state, error)
            return original(self, *args, **kwargs)
        if state.plan is not None:
            _say(state.plan, config, settings)
        return config

    return create_engine_config


def _refuse_unsupported(config: Any, settings: Settings) -> None:
    named = _named(settings)
    if not config.use_v2_model_runner:
        raise SettingsError(
            f"{named} needs Model Runner V2 but vLLM chose V1 for this engine: set VLLM_USE_V2_MODEL_RUNNER=1, or unset the "
            "variable."
        )
    if not settings.width_active:
        return
    parallel = config.parallel_config
    for what, size in (("data", parallel.data_parallel_size), ("pipeline", parallel.pipeline_parallel_size)):
        if size > 1:
            raise SettingsError(
                f"{named} does not support {what} parallelism but {what}_parallel_size is {size}: set it to 1 "
                "(tensor parallelism is supported), or unset the variable."
            )
    if config.scheduler_config.scheduler_cls != SCHEDULER:
        raise SettingsError(
            f"{named} needs its own scheduler but this configuration ended with "
            f"{config.scheduler_config.scheduler_cls}: remove what replaces it, or unset the variable."
        )
    _refuse_cost_table(config, settings)
    _refuse_trace_file(config, settings)


def _refuse_trace_file(config: Any, settings: Settings) -> None:
    if settings.trace_file is None or getattr(config.parallel_config, "node_rank", 0) > 0:
        return  # the scheduler, which writes it, is on the first node
    try:
        with open(settings.trace_file, "a", encoding="utf-8"):
            pass
    except OSError as error:
        raise SettingsError(
            f"DFLASH_TRACE_FILE={settings.trace_file} cannot be written ({error.strerror}): name a file in a directory that "
            "exists and is writable, or unset it."
        ) from None


def _refuse_cost_table(config: Any, settings: Settings) -> None:
    """A table that the operator names must be this engine's; found out here, not after the weights are loaded."""
    if settings.cost_table is None or settings.verify_tokens.mode != "auto":
        return
    from dflash_verify.profile import stored_table
    from dflash_verify.width.cost import CostTableError

    try:
        stored_table(config, settings)
    except CostTableError as error:
        raise SettingsError(f"DFLASH_COST_TABLE cannot be used: {error}.") from None


def _say(plan: Plan, config: Any, settings: Settings) -> None:
    found, widths = running_digest(config, settings)
    log = _logger()
    log.info(
        "dflash-verify: draft width %d, verify width %s (%s), %d capture sizes, plan digest=%s",
        plan.draft_width,
        " or ".join(map(str, widths)),
        settings.verify_tokens,
        len(config.compilation_config.cudagraph_capture_sizes or ()),
        found,
    )
    for note in plan.notes:
        log.warning("dflash-verify: %s.", note)


# -- 4. every rank -----------------------------------------------------------------------------------------------------


def wrap_load_model(original: AnyFunction, context: Context) -> AnyFunction:
    settings: Settings = context.settings

    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = self.vllm_config
        if is_active(config):
            found, widths = running_digest(config, settings)
            _logger().info(
                "dflash-verify: plan digest=%s mode=%s widths=%s rank=%d",
                found,
                settings.verify_tokens,
                ",".join(map(str, widths)),
                self.rank,
            )
        return original(self, *args, **kwargs)

    return load_model


WRAPPERS: dict[str, Wrap] = {
    "EngineArgs.create_speculative_config": wrap_create_speculative_config,
    "EngineArgs._set_default_max_num_seqs_and_batched_tokens_args": wrap_set_default_max_num_seqs,
    "EngineArgs.create_engine_config": wrap_create_engine_config,
    "Worker.load_model": wrap_load_model,
}
