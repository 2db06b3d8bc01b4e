"""vLLM's CPU platform less the C++ extension that only vLLM's CPU wheel has, and less its own ideas of scheduling."""

import os
from typing import Any

from vllm.platforms.cpu import CpuPlatform


class InterpreterPlatform(CpuPlatform):
    """CPU platform on which everything that is not a kernel stays as it is on a GPU."""

    @classmethod
    def get_attn_backend_cls(cls, *args: Any, **kwargs: Any) -> str:
        # CPU_ATTN calls C++ operators that the CUDA wheel does not have.
        return "dflash_verify.cpu.attention.TorchAttentionBackend"

    @classmethod
    def import_kernels(cls) -> None:
        """vllm._C is not in the CUDA wheel; trying to import it logs a warning."""

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        parallel_config, scheduler_config = vllm_config.parallel_config, vllm_config.scheduler_config
        if parallel_config.worker_cls == "auto":
            parallel_config.worker_cls = "dflash_verify.cpu.worker.InterpreterWorker"
        # CpuPlatform forces the synchronous scheduler, a separate worker process and LD_PRELOAD. What vLLM had resolved,
        # as on a GPU (asynchronous, worker inside EngineCore), is what the tests are about.
        resolved = scheduler_config.async_scheduling, parallel_config.distributed_executor_backend
        preload = os.environ.get("LD_PRELOAD")
        super().check_and_update_config(vllm_config)
        scheduler_config.async_scheduling, parallel_config.distributed_executor_backend = resolved
        if preload is None:
            os.environ.pop("LD_PRELOAD", None)
        else:
            os.environ["LD_PRELOAD"] = preload
