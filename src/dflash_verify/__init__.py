"""dflash-verify: propose a wide DFlash block, verify the width that pays. See README.md; the entry point is plugin.py."""

__version__ = "0.1.0"
