"""The real vLLM engine without a GPU, for `dflash-verify demo` and the tests.

The unmodified vLLM CUDA wheel (0.33.0) runs on a CPU: Model Runner V2, scheduler, rejection sampler and drafter are
vLLM's own, and every Triton kernel runs in Triton's interpreter. What has to be different is in this folder, each piece
with its reason, and is active only with `DFLASH_CPU=1` *and* `PLUGIN_PATH` on `sys.path`.

Not covered: CUDA graphs, torch.compile, tensor parallelism, GPU attention backends, and races (streams and events are
no-ops here, and Triton's program instances run one after another).
"""

from pathlib import Path

# A distribution of its own, outside the wheel's metadata: vLLM logs every installed platform plugin at INFO, active or
# not, and an installation of dflash-verify must not change a stock server's log. Whoever wants the CPU engine puts this
# folder on sys.path (this process) and PYTHONPATH (its children); `environment.activate` does both.
PLUGIN_PATH = Path(__file__).parent / "plugin_path"
