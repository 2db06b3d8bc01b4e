"""Overlay compile-cache-key: the draft width is part of the key under which compiled graphs are stored."""

import hashlib
from typing import Any

from dflash_verify.overlays.attach import AnyFunction, Context


def _with_draft_width(original: AnyFunction, context: Context) -> AnyFunction:
    def compute_hash(self: Any) -> str:
        # Not the schedule: verify widths differ in capture sizes, which are hashed already, and in nothing a graph depends on.
        factors = f"{original(self)} draft_width={self.num_speculative_tokens}"
        return hashlib.sha256(factors.encode()).hexdigest()

    return compute_hash


WRAPPERS = {"SpeculativeConfig.compute_hash": _with_draft_width}
