"""Overlay capture-widths: with fewer request slots than widths, every width of the schedule still gets its graphs."""

import copy
from collections.abc import Iterable
from typing import Any

from dflash_verify.overlays.attach import AnyFunction, Context

Schedule = list[tuple[int, int, int]]  # (first batch size, last batch size, drafts)


def unreachable_widths(schedule: Iterable[tuple[int, int, int]], max_num_reqs: int) -> list[int]:
    """Widths that only batches larger than `max_num_reqs` are scheduled for; vLLM drops these ranges."""
    ranges = list(schedule)
    reached = {width for first, _, width in ranges if first <= max_num_reqs}
    return sorted({width for _, _, width in ranges} - reached)


def _every_width(original: AnyFunction, context: Context) -> AnyFunction:
    def _init_candidates(self: Any) -> None:
        original(self)
        config = self.vllm_config
        speculative = config.speculative_config
        if speculative is None or not speculative.uses_dynamic_speculative_decoding():
            return
        for width in unreachable_widths(speculative.num_speculative_tokens_per_batch_size, self.max_num_reqs):
            captures, candidates = self._capture_descs, self._candidates
            self._capture_descs, self._candidates = {}, {}
            self.vllm_config = _scheduled(config, [(1, self.max_num_reqs, width)])
            try:
                original(self)
            finally:
                self.vllm_config = config
            for mode, descs in self._capture_descs.items():
                both = dict.fromkeys([*captures.get(mode, []), *descs])
                captures[mode] = sorted(both, key=lambda d: d.num_tokens, reverse=True)
            for key, descs in self._candidates.items():
                # Dispatch takes the first that fits: a FULL graph before a piecewise one, a small one before a large one.
                both = dict.fromkeys([*candidates.get(key, []), *descs])
                candidates[key] = sorted(both, key=lambda d: (d.cg_mode.name != "FULL", d.num_tokens))
            self._capture_descs, self._candidates = captures, candidates

    return _init_candidates


def _scheduled(config: Any, schedule: Schedule) -> Any:
    """The configuration with another batch-size schedule; the original is not touched."""
    config = copy.copy(config)
    speculative = copy.copy(config.speculative_config)
    object.__setattr__(speculative, "num_speculative_tokens_per_batch_size", schedule)
    object.__setattr__(config, "speculative_config", speculative)
    return config


WRAPPERS = {"CudaGraphManager._init_candidates": _every_width}
