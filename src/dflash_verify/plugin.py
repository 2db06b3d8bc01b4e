"""The entry point that vLLM calls in every process (`vllm.general_plugins`).

With no width and no block verification asked for it returns before it imports, reads or logs anything.
"""

from __future__ import annotations

import os


def asked_for() -> bool:
    """Whether the environment names a width or block verification at all; blank and 0 mean no."""
    return any(
        os.environ.get(name, "").strip() not in ("", "0") for name in ("DFLASH_VERIFY_TOKENS", "DFLASH_BLOCK_VERIFY")
    )


def register() -> None:
    """Apply the overlays that the settings and this vLLM need.

    Raises SettingsError or OverlayError with one sentence; vLLM then stops before it loads weights.
    """
    if not asked_for():
        return
    from dflash_verify import overlays
    from dflash_verify.settings import load

    settings = load()
    if settings.active:
        overlays.apply(settings)
