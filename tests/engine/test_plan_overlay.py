"""What the *plan* overlay does to a real EngineArgs: schedule, capture sizes, and every refusal with its sentence."""

from collections.abc import Iterator
from typing import Any

import pytest

from dflash_verify.cpu import environment

environment.activate()

from dflash_verify import overlays
from dflash_verify.cpu.models import Models, generate
from dflash_verify.overlays.plan import SCHEDULER
from dflash_verify.settings import SettingsError, load


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return generate(tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True)
def _no_overlay_left() -> Iterator[None]:
    yield
    overlays.revert()


def engine_args(models: Models, speculative: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    fields: dict[str, Any] = {"max_model_len": 512, "kv_cache_memory_bytes": 16 << 20, "dtype": "float32"}
    if speculative is not None:
        fields["speculative_config"] = speculative
    return EngineArgs(model=str(models.target), **(fields | kwargs))


def dflash2(models: Models, **fields: Any) -> dict[str, Any]:
    return {"method": "dflash", "model": str(models.drafter("dflash2")), "num_speculative_tokens": 7} | fields


def configure(args: Any, **environ: str) -> Any:
    overlays.apply(load(environ))
    return args.create_engine_config()


def refusal(args: Any, **environ: str) -> str:
    with pytest.raises(SettingsError) as error:
        configure(args, **environ)
    text = str(error.value)
    assert "\n" not in text
    assert text.endswith(".")
    return text


def schedule(config: Any) -> list[tuple[int, int, int]]:
    return [tuple(entry) for entry in config.speculative_config.num_speculative_tokens_per_batch_size]


def test_a_static_width_gets_schedule_capture_sizes_and_scheduler_without_max_num_seqs(models: Models) -> None:
    args = engine_args(models, dflash2(models))
    assert args.max_num_seqs is None
    config = configure(args, DFLASH_VERIFY_TOKENS="3")
    assert schedule(config) == [(1, 1, 3)]
    assert config.scheduler_config.scheduler_cls == SCHEDULER
    slots = config.scheduler_config.max_num_seqs
    # The CPU platform captures nothing, so the list is looked at where vLLM read it.
    assert {4, 8, 12, 16, 128, 8 * slots} <= set(args.cudagraph_capture_sizes)


def test_auto_names_every_width_once(models: Models) -> None:
    config = configure(engine_args(models, dflash2(models)), DFLASH_VERIFY_TOKENS="auto")
    assert [entry[2] for entry in schedule(config)] == [1, 3, 5, 7]


def test_asking_twice_gives_the_same_plan_and_takes_nothing_of_it_for_the_operators(models: Models) -> None:
    args = engine_args(models, dflash2(models))
    first = configure(args, DFLASH_VERIFY_TOKENS="3")
    sizes = list(args.cudagraph_capture_sizes)
    second = args.create_engine_config()
    assert schedule(first) == schedule(second)
    assert args.cudagraph_capture_sizes == sizes


def test_a_fresh_front_end_arrives_at_the_same_digest(models: Models) -> None:
    from dflash_verify.overlays.plan import running_digest

    settings = load({"DFLASH_VERIFY_TOKENS": "auto"})
    overlays.apply(settings)
    digests = {running_digest(engine_args(models, dflash2(models)).create_engine_config(), settings) for _ in range(2)}
    assert len(digests) == 1


@pytest.mark.parametrize("where", ["flag", "compilation"])
def test_the_operators_capture_list_is_left_alone(models: Models, where: str) -> None:
    sizes = [8, 16, 24]
    given: dict[str, Any] = (
        {"cudagraph_capture_sizes": sizes}
        if where == "flag"
        else {"compilation_config": {"cudagraph_capture_sizes": sizes}}
    )
    args = engine_args(models, dflash2(models), **given)
    configure(args, DFLASH_VERIFY_TOKENS="3")
    found = args.cudagraph_capture_sizes or args.compilation_config.cudagraph_capture_sizes
    assert found == sizes


def test_the_draft_width_comes_from_the_checkpoint_when_nobody_gives_it(models: Models) -> None:
    speculative = dflash2(models)
    del speculative["num_speculative_tokens"]
    config = configure(engine_args(models, speculative), DFLASH_VERIFY_TOKENS="3")
    assert config.speculative_config.num_speculative_tokens == 7


def test_a_smaller_draft_width_is_allowed_with_a_warning(models: Models, caplog_vllm: pytest.LogCaptureFixture) -> None:
    speculative = dflash2(models)
    del speculative["num_speculative_tokens"]
    config = configure(engine_args(models, speculative), DFLASH_VERIFY_TOKENS="3", DFLASH_TOKENS="3")
    assert config.speculative_config.num_speculative_tokens == 3
    assert "shortens the drafter's trained block of 7 tokens" in caplog_vllm.text


@pytest.fixture
def caplog_vllm(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    import logging

    logger = logging.getLogger("vllm")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


def test_a_larger_draft_width_is_an_error(models: Models) -> None:
    text = refusal(engine_args(models, dflash2(models, num_speculative_tokens=9)), DFLASH_VERIFY_TOKENS="3")
    assert "num_speculative_tokens=9 is more than the 7 tokens" in text


def test_two_draft_widths_that_disagree_are_an_error(models: Models) -> None:
    text = refusal(engine_args(models, dflash2(models)), DFLASH_VERIFY_TOKENS="3", DFLASH_TOKENS="5")
    assert text.startswith("DFLASH_TOKENS=5 and num_speculative_tokens=7 disagree")


def test_a_width_beyond_the_drafters_is_an_error(models: Models) -> None:
    assert "verify 9 tokens but the drafter proposes 7" in refusal(
        engine_args(models, dflash2(models)), DFLASH_VERIFY_TOKENS="9"
    )


@pytest.mark.parametrize("variable", ["DFLASH_VERIFY_TOKENS", "DFLASH_BLOCK_VERIFY"])
def test_no_drafter_is_an_error(models: Models, variable: str) -> None:
    text = refusal(engine_args(models), **{variable: "1"})
    assert text.startswith(f"{variable}=1 needs a DFlash-family drafter but no --speculative-config")


@pytest.mark.parametrize("variable", ["DFLASH_VERIFY_TOKENS", "DFLASH_BLOCK_VERIFY"])
@pytest.mark.parametrize(
    "speculative",
    [
        {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3},
        {"method": "eagle3", "model": "anybody/eagle3-head", "num_speculative_tokens": 3},
    ],
)
def test_other_methods_are_an_error(models: Models, variable: str, speculative: dict[str, Any]) -> None:
    text = refusal(engine_args(models, speculative), **{variable: "1"})
    assert text.startswith(f"{variable}=1 needs a DFlash-family drafter but the speculative method is")
    assert speculative["method"] in text


@pytest.mark.parametrize(
    ("speculative", "kwargs", "said"),
    [
        (
            {"num_speculative_tokens_per_batch_size": [[1, 4, 3]]},
            {},
            "num_speculative_tokens_per_batch_size=[[1, 4, 3]]",
        ),
        ({"enable_adaptive_verification": True}, {}, "enable_adaptive_verification"),
        ({}, {"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"}, "--scheduler-cls vllm.v1.core"),
        ({}, {"data_parallel_size": 2}, "data parallelism"),
        ({}, {"pipeline_parallel_size": 2}, "pipeline parallelism"),
    ],
)
def test_what_cannot_go_with_a_width_is_an_error(
    models: Models, speculative: dict[str, Any], kwargs: dict[str, Any], said: str
) -> None:
    text = refusal(engine_args(models, dflash2(models, **speculative), **kwargs), DFLASH_VERIFY_TOKENS="3")
    assert said in text
    assert text.startswith("DFLASH_VERIFY_TOKENS=3 ")


def test_model_runner_v1_is_an_error(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    assert "needs Model Runner V2 but VLLM_USE_V2_MODEL_RUNNER=0 forces V1" in refusal(
        engine_args(models, dflash2(models)), DFLASH_VERIFY_TOKENS="3"
    )


@pytest.mark.parametrize(
    ("speculative", "kwargs"),
    [
        ({}, {"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"}),
        ({}, {"pipeline_parallel_size": 2}),
        ({"num_speculative_tokens_per_batch_size": [[1, 4, 3]]}, {}),
    ],
)
def test_without_strict_the_same_is_a_warning_and_the_stock_configuration(
    models: Models,
    caplog_vllm: pytest.LogCaptureFixture,
    speculative: dict[str, Any],
    kwargs: dict[str, Any],
) -> None:
    stock = engine_args(models, dflash2(models, **speculative), **kwargs).create_engine_config()
    config = configure(
        engine_args(models, dflash2(models, **speculative), **kwargs),
        DFLASH_VERIFY_TOKENS="3",
        DFLASH_VERIFY_STRICT="0",
    )
    assert "This engine runs as stock vLLM (DFLASH_VERIFY_STRICT=0)" in caplog_vllm.text
    assert config.scheduler_config.scheduler_cls == stock.scheduler_config.scheduler_cls
    assert (
        config.speculative_config.num_speculative_tokens_per_batch_size
        == stock.speculative_config.num_speculative_tokens_per_batch_size
    )
    assert config.compute_hash() == stock.compute_hash()


def test_block_verification_alone_sets_the_method_and_no_width(models: Models) -> None:
    config = configure(engine_args(models, dflash2(models)), DFLASH_BLOCK_VERIFY="1")
    assert config.speculative_config.rejection_sample_method == "block"
    assert config.speculative_config.draft_sample_method == "probabilistic"
    assert config.speculative_config.num_speculative_tokens_per_batch_size is None
    assert config.scheduler_config.scheduler_cls is None


def test_block_verification_leaves_a_draft_sampling_that_the_operator_chose(
    models: Models, caplog_vllm: pytest.LogCaptureFixture
) -> None:
    config = configure(
        engine_args(models, dflash2(models, draft_sample_method="greedy")),
        DFLASH_BLOCK_VERIFY="1",
        DFLASH_VERIFY_TOKENS="auto",
    )
    assert config.speculative_config.draft_sample_method == "greedy"
    assert "has no effect" in caplog_vllm.text


def test_zero_touches_nothing(models: Models) -> None:
    from vllm.engine.arg_utils import EngineArgs

    before = dict(vars(EngineArgs))
    overlays.apply(load({"DFLASH_VERIFY_TOKENS": "0"}))
    assert all(vars(EngineArgs)[name] is value for name, value in before.items())


def test_a_trace_file_that_cannot_be_written_is_an_error_before_weights_load(models: Models) -> None:
    text = refusal(
        engine_args(models, dflash2(models)), DFLASH_VERIFY_TOKENS="3", DFLASH_TRACE_FILE="/nowhere/trace.jsonl"
    )
    assert text.startswith("DFLASH_TRACE_FILE=/nowhere/trace.jsonl cannot be written")
