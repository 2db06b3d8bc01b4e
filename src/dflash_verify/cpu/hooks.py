"""What vLLM calls when it finds the distribution in `plugin_path`. Imports nothing: vLLM is half initialised here."""

import os


def register_platform() -> str | None:
    """`vllm.platform_plugins`: runs in every process at the first touch of `current_platform`.

    Returns None without `DFLASH_CPU=1`, which leaves vLLM's own detection alone.
    """
    if os.environ.get("DFLASH_CPU") != "1":
        return None
    from dflash_verify.cpu.environment import missing_settings

    os.environ.update(missing_settings(os.environ))
    return "dflash_verify.cpu.platform.InterpreterPlatform"


def register_patches() -> None:
    """`vllm.general_plugins`: runs in the front end, in EngineCore and in each worker.

    Apart from the platform hook because `vllm._custom_ops` itself asks for `current_platform`.
    """
    if os.environ.get("DFLASH_CPU") != "1":
        return
    from dflash_verify.cpu import interpreter, native_ops, trace

    interpreter.install()
    native_ops.install()
    trace.trace_every_scheduler()
