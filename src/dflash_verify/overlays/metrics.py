"""Overlay *metrics*: the width record of each step leaves vLLM's statistics and becomes Prometheus series (metrics.py)."""

from __future__ import annotations

from typing import Any

from dflash_verify import metrics
from dflash_verify.overlays.attach import AnyFunction, Context, Wrap, status
from dflash_verify.overlays.plan import is_active


def wrap_manager_init(original: AnyFunction, context: Context) -> AnyFunction:
    def info() -> metrics.WidthInfo:
        applied = status().names("applied")
        return metrics.WidthInfo(str(context.settings.verify_tokens), context.release, applied)

    with_series = metrics.manager_init(original, info)

    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        build = with_series if is_active(vllm_config) else original
        build(self, vllm_config, *args, **kwargs)

    return __init__


def wrap_manager_record(original: AnyFunction, context: Context) -> AnyFunction:
    return metrics.manager_record(original)


WRAPPERS: dict[str, Wrap] = {
    "StatLoggerManager.__init__": wrap_manager_init,
    "StatLoggerManager.record": wrap_manager_record,
}
