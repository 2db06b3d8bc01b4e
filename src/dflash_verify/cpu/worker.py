"""vLLM's CPU worker without the calls into the C++ extension."""

import gc
import math
from typing import Any

# No-op streams, events and pinned memory; the real CPUWorker imports them before anything else too.
import vllm.v1.worker.cpu.shm  # noqa: F401  isort: skip

import torch
from vllm.utils.cpu_resource_utils import get_memory_node_info
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker


class InterpreterWorker(CPUWorker):
    """One process that runs target and drafter on one CPU thread."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        # CPUWorker.__init__ binds memory with torch.ops._C.init_cpu_memory_env, which the CUDA wheel lacks. This is the
        # rest of it.
        if torch.get_num_threads() != 1:  # OMP_NUM_THREADS came too late; see environment.py
            torch.set_num_threads(1)
        utilization = vllm_config.cache_config.gpu_memory_utilization
        self.requested_cpu_memory = math.ceil(get_memory_node_info(0).total_memory * utilization)
        Worker.__init__(self, vllm_config, *args, **kwargs)
        self.parallel_config.disable_custom_all_reduce = True
        # vLLM collects garbage several times while it starts, at half a second each over the heap that its imports
        # leave; that heap never becomes garbage.
        gc.collect()
        gc.freeze()

    def determine_available_memory(self) -> int:
        # A fixed size: no profiling forward, and no dependence on how much memory the host has.
        size: int | None = self.cache_config.kv_cache_memory_bytes
        if size is None:
            raise ValueError(
                "the CPU engine does not measure memory: found no KV cache size, expected --kv-cache-memory-bytes "
                "(8388608 is plenty for the generated models)"
            )
        return size
