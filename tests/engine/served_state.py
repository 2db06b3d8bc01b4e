"""A program for test_stock.py: serve one request, then describe, as JSON, what this vLLM has become.

Its one argument is the generated models' folder. Run with HIDE_PLUGIN=1 it is an installation without dflash-verify: the
entry point is not there to be found.
"""

import importlib.metadata
import inspect
import json
import os
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any


def hide_plugin() -> None:
    """Leave the distribution out of what importlib.metadata finds; `entry_points` itself stays what it is."""
    original = importlib.metadata.distributions

    def distributions(**context: Any) -> Iterator[importlib.metadata.Distribution]:
        return (d for d in original(**context) if getattr(d, "_normalized_name", "") != "dflash_verify")

    importlib.metadata.distributions = distributions  # type: ignore[assignment]


def code_hash(code: CodeType) -> str:
    """Where a code object is from and what it does."""
    return sha256(f"{code.co_filename}:{code.co_firstlineno}:".encode() + code.co_code).hexdigest()[:16]


def describe(value: Any, depth: int = 0) -> Any:
    """A description that is the same in two processes exactly when the object is the same piece of vLLM."""
    if isinstance(value, FunctionType):
        wrapped = getattr(value, "__wrapped__", None)
        extra = {k: type(v).__name__ for k, v in vars(value).items() if k != "__wrapped__"}
        return [
            "function",
            value.__qualname__,
            code_hash(value.__code__),
            extra,
            describe(wrapped) if wrapped else None,
        ]
    if isinstance(value, staticmethod | classmethod | MethodType):
        return [type(value).__name__, describe(value.__func__)]
    if isinstance(value, property):
        return ["property", *(describe(f) for f in (value.fget, value.fset, value.fdel))]
    if isinstance(value, type):
        name = f"{value.__module__}.{value.__qualname__}"
        if depth or not value.__module__.startswith("vllm"):
            return ["class", name]
        members = {k: describe(v, 1) for k, v in sorted(vars(value).items()) if not k.startswith("_abc_")}
        return ["class", name, [b.__qualname__ for b in value.__mro__], members]
    if isinstance(value, ModuleType):
        return ["module", value.__name__]
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return ["value", repr(value)]
    return ["object", f"{type(value).__module__}.{type(value).__qualname__}"]


def main() -> None:
    if os.environ.get("HIDE_PLUGIN") == "1":
        hide_plugin()
    from dflash_verify.cpu import environment
    from dflash_verify.cpu.models import Models

    environment.activate()
    import vllm.entrypoints.openai.api_server  # noqa: F401  # the front end's modules too
    from vllm import LLM, SamplingParams

    from dflash_verify.cpu.engine import ENGINE_ARGS, speculative_config

    models = Models(Path(sys.argv[1]))
    llm = LLM(model=str(models.target), speculative_config=speculative_config(models, "dflash2"), **ENGINE_ARGS)
    text = (
        llm.generate(["Hello world"], SamplingParams(max_tokens=12, temperature=0), use_tqdm=False)[0].outputs[0].text
    )
    engine = llm.llm_engine
    config = engine.vllm_config
    core = engine.engine_core.engine_core
    ours = sorted(name for name in sys.modules if name.startswith("dflash_verify"))
    print(
        json.dumps(
            {
                "text": text,
                "modules": {
                    name: {k: describe(v) for k, v in sorted(vars(module).items()) if k != "__builtins__"}
                    for name, module in sorted(sys.modules.items())
                    if (name == "vllm" or name.startswith("vllm.")) and inspect.ismodule(module)
                },
                "ours": [name for name in ours if not name.startswith("dflash_verify.cpu")],
                "statistics": {
                    "log_stats": [engine.log_stats, core.log_stats, core.scheduler.log_stats],
                    "loggers": [type(x).__name__ for x in getattr(engine.logger_manager, "stat_loggers", [])],
                    "metrics": sorted(metric.name for metric in llm.get_metrics()),
                },
                "classes": [type(x).__qualname__ for x in (core, core.scheduler, core.model_executor)],
                "config": config.compute_hash(),
                "environment": sorted(set(os.environ) - {"HIDE_PLUGIN", "DFLASH_VERIFY_TOKENS"}),
            }
        )
    )


if __name__ == "__main__":
    main()
