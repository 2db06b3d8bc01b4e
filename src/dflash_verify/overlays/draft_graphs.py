"""Overlay draft-graphs: the drafter captures FULL graphs for the one query length that it runs."""

import copy
from typing import Any

from dflash_verify.overlays.attach import AnyFunction, Context


def _own_query_length_only(original: AnyFunction, context: Context) -> AnyFunction:
    def _init_candidates(self: Any) -> None:
        from vllm.v1.worker.gpu.spec_decode.dflash.cudagraph import DFlashCudaGraphManager

        config = self.vllm_config
        if not isinstance(self, DFlashCudaGraphManager) or config.speculative_config is None:
            original(self)
            return
        # The schedule names the target's widths. A DFlash-family drafter always runs its whole block: without a schedule in
        # sight, vLLM captures exactly the manager's own decode_query_len. Nothing else here reads the speculative config.
        self.vllm_config = copy.copy(config)
        self.vllm_config.speculative_config = None
        try:
            original(self)
        finally:
            self.vllm_config = config

    return _init_candidates


WRAPPERS = {"CudaGraphManager._init_candidates": _own_query_length_only}
