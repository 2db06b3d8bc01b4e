"""Overlay dispatch-widths: a step finds the smallest FULL graph of its own width, whatever other widths have captured."""

from itertools import groupby
from typing import Any

from dflash_verify.overlays.attach import AnyFunction, Context


def _own_width(original: AnyFunction, context: Context) -> AnyFunction:
    def _init_candidates(self: Any) -> None:
        original(self)
        speculative = self.vllm_config.speculative_config
        if speculative is None or not speculative.uses_dynamic_speculative_decoding():
            return
        full = [d for descs in self._capture_descs.values() for d in descs if d.uniform_token_count is not None]
        kinds = sorted({_kind(d) for d in full})
        if len({length for length, *_ in kinds}) < 2:
            return
        for kind, descs in groupby(sorted(full, key=lambda d: (_kind(d), d.num_tokens)), _kind):
            length, loras, _ = kind
            below = 0
            for desc in descs:
                for tokens in range(below + length, desc.num_tokens + 1, length):
                    known = self._candidates.get((tokens, loras), [])
                    if desc not in known:  # a new list: vLLM 0.28.0 shares one among many keys
                        self._candidates[tokens, loras] = [desc, *known]
                below = desc.num_tokens

    return _init_candidates


def _kind(desc: Any) -> tuple[int, int, int]:
    """Graphs of one kind differ in their number of requests only."""
    return desc.uniform_token_count, desc.num_active_loras, getattr(desc, "num_ubatches", 1)


WRAPPERS = {"CudaGraphManager._init_candidates": _own_width}
