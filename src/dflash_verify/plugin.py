"""The entry point that vLLM calls in every process (`vllm.general_plugins`).

With no width and no block verification asked for it returns before it imports, reads or logs anything.
"""

from __future__ import annotations

import os

SWITCHES = ("DFLASH_VERIFY_TOKENS", "DFLASH_BLOCK_VERIFY")


def asked_for() -> bool:
    """Whether the environment names a width or block verification at all; blank and 0 mean no."""
    return any(os.environ.get(name, "").strip() not in ("", "0") for name in SWITCHES)


def register() -> None:
    """Apply the overlays that the settings and this vLLM need.

    Raises SettingsError or OverlayError with one sentence; vLLM then stops before it loads weights.
    """
    if not asked_for():
        _say_typo()
        return
    from dflash_verify import overlays
    from dflash_verify.settings import load

    settings = load()
    if settings.active:
        overlays.apply(settings)


def _say_typo() -> None:
    """A misspelt DFLASH_VERIFY_TOKENS alone would be stock vLLM without a word; nothing else is said in stock mode."""
    others = [name for name in os.environ if name.startswith("DFLASH_") and name not in SWITCHES]
    if not others:
        return
    import difflib
    import logging

    for name in others:
        meant = difflib.get_close_matches(name, SWITCHES, n=1, cutoff=0.8)
        if meant and name != "DFLASH_VERIFY_STRICT":
            logging.getLogger("vllm.plugins.dflash_verify").warning(
                "dflash-verify: %s is not one of its variables (did you mean %s?); this server runs as stock vLLM.",
                name,
                meant[0],
            )
