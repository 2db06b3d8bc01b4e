"""Overlay *profile*: a new engine measures its step times before it serves, if `auto` has no table for it (profile.py)."""

from __future__ import annotations

from typing import Any

from dflash_verify.overlays.attach import AnyFunction, Context, Wrap
from dflash_verify.overlays.plan import is_active


def wrap_engine_core_init(original: AnyFunction, context: Context) -> AnyFunction:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if is_active(self.vllm_config):
            from dflash_verify.profile import measure_at_start

            measure_at_start(self, context.settings)

    return __init__


WRAPPERS: dict[str, Wrap] = {"EngineCore.__init__": wrap_engine_core_init}
