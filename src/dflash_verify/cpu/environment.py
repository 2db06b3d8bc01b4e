"""Environment variables of a CPU engine: what they are, why, and who sets them when.

Two callers: `activate`, in a process that is going to import vLLM (demo, tests), where every variable is in time; and the
platform hook, in a process that was started with only `DFLASH_CPU=1` (`vllm serve`), where vLLM is half imported. What
comes too late there is in time for the children, which are spawned and do the work.
"""

import os
import sys
import sysconfig
from collections.abc import Mapping

from dflash_verify.cpu import PLUGIN_PATH

# Set whatever the caller had: without any one of them the engine does not start.
REQUIRED = {
    "DFLASH_CPU": "1",
    # vllm.triton_utils turns Triton off when no driver is active, unless the list of devices is *empty*; and Model
    # Runner V2 does not start without Triton.
    "CUDA_VISIBLE_DEVICES": "",
    # Triton reads it when a kernel is decorated; interpreter.py repairs what was decorated before.
    "TRITON_INTERPRET": "1",
}

# Set where the caller said nothing.
DEFAULTS = {
    # Chosen for these models anyway; pinned so that a silent fallback to the old runner cannot pass for a test.
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    # A second OpenMP thread has nothing to do on tensors this small, but spins, and on two busy cores its barriers
    # cost ten times the arithmetic.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # Everything is generated locally: no look-ups, no telemetry.
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # With vLLM's default of 0, SIGTERM kills EngineCore at once, and the API server then waits for ever for a client
    # whose request was in flight.
    "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "10",
}


def missing_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables a CPU engine needs on top of `environ`.

    Raises RuntimeError for `VLLM_TARGET_DEVICE=cpu`: vLLM then takes its own CPU platform without asking any plugin.
    """
    if environ.get("VLLM_TARGET_DEVICE", "").lower() == "cpu":
        raise RuntimeError(
            "VLLM_TARGET_DEVICE=cpu makes vLLM ignore platform plugins, so the CPU engine of dflash-verify cannot start; "
            "unset it (DFLASH_CPU=1 alone selects the CPU engine)."
        )
    wanted = REQUIRED | {name: value for name, value in DEFAULTS.items() if name not in environ}
    return {name: value for name, value in wanted.items() if environ.get(name) != value}


def child_environment(
    environ: Mapping[str, str] | None = None, extra: Mapping[str, str] | None = None
) -> dict[str, str]:
    """`environ` (default: this process's) and `extra`, in which a Python process finds and starts the CPU engine."""
    base = dict(os.environ if environ is None else environ)
    base |= missing_settings(base) | dict(extra or {})
    paths = [p for p in base.get("PYTHONPATH", "").split(os.pathsep) if p]
    if str(PLUGIN_PATH) not in paths:
        paths.insert(0, str(PLUGIN_PATH))
    # The package itself too, so that a source tree that is not installed works in a child.
    package_parent = str(PLUGIN_PATH.parents[2])
    if package_parent not in (*paths, sysconfig.get_path("purelib")):
        paths.append(package_parent)
    base["PYTHONPATH"] = os.pathsep.join(paths)
    return base


def activate() -> None:
    """Prepare this process, and all it starts, for an in-process CPU engine; call before vLLM is imported.

    Idempotent. The engine core then runs in this process, so that tests can look at its scheduler.
    """
    os.environ.update(child_environment())
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    if str(PLUGIN_PATH) not in sys.path:
        sys.path.insert(0, str(PLUGIN_PATH))
