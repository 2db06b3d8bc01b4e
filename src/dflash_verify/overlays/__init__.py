"""Named, fingerprinted, reversible changes to vLLM: `overlays/*.toml` says what is changed and why, the module of the same
name here does it, `attach` puts all of them on or none, and `dflash-verify check` says whether they fit."""

from dflash_verify.overlays.attach import Context, Marker, OverlaySettings, Wrap, apply, marked, revert, status
from dflash_verify.overlays.manifest import ManifestError
from dflash_verify.overlays.survey import DriftError, OverlayError, OverlayStatus, Status

__all__ = [
    "Context",
    "DriftError",
    "ManifestError",
    "Marker",
    "OverlayError",
    "OverlaySettings",
    "OverlayStatus",
    "Status",
    "Wrap",
    "apply",
    "marked",
    "revert",
    "status",
]
