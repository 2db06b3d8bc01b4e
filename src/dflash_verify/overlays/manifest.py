"""The manifests `overlays/*.toml`: what is changed in vLLM, why, until when, and in which releases.

A release is known by the fingerprints of the functions listed here, never by its version string.
"""

import re
import tomllib
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Mode = Literal["width", "block"]

_FINGERPRINT = re.compile(r"[0-9a-f]{32}")
_RELEASE = re.compile(r"\d+\.\d+\.\d+")


class ManifestError(Exception):
    """A manifest that does not say what it must."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Target(_Strict):
    """One function of vLLM.

    wraps: False for a function that the overlay does not change but relies on, so that a change to it is noticed.
    fingerprints: release -> fingerprint. absent: release -> why the function is not there.
    """

    file: str = Field(pattern=r"^vllm/[\w/]+\.py$")
    function: str = Field(pattern=r"^[A-Za-z_][\w.]*$")
    role: str = Field(min_length=1)
    wraps: bool = True
    fingerprints: dict[str, str] = {}
    absent: dict[str, str] = {}

    @property
    def module(self) -> str:
        return self.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @field_validator("fingerprints")
    @classmethod
    def _well_formed(cls, value: dict[str, str]) -> dict[str, str]:
        for release, digest in value.items():
            if not _FINGERPRINT.fullmatch(digest):
                raise ValueError(f"fingerprint of {release} is {digest!r}, expected 32 hexadecimal digits")
        return value

    @model_validator(mode="after")
    def _one_statement_a_release(self) -> "Target":
        both = self.fingerprints.keys() & self.absent.keys()
        if both:
            raise ValueError(f"{self.function} is both present and absent in {', '.join(sorted(both))}")
        return self

    def releases(self) -> set[str]:
        return self.fingerprints.keys() | self.absent.keys()


class Consumer(_Strict):
    """Code that reads what the overlay changes, and what it assumes about it (for review; nothing is wrapped here)."""

    file: str
    function: str
    reads: str
    assumes: str
    releases: str


class Manifest(_Strict):
    """One overlay.

    modes: it is needed when one of these is active. not_needed: release -> the upstream change that made it so.
    """

    name: str
    title: str = Field(min_length=1)
    why: str = Field(min_length=1)
    upstream: list[str]
    remove_when: str = Field(min_length=1)
    modes: list[Mode] = Field(min_length=1)
    not_needed: dict[str, str] = {}
    targets: list[Target] = Field(min_length=1)
    consumers: list[Consumer] = []

    def require_complete(self) -> None:
        """Raises ValueError unless all targets describe the same releases and the fingerprints tell them apart."""
        first = self.targets[0].releases()
        for target in self.targets:
            if target.releases() != first:
                raise ValueError(
                    f"{target.function} and {self.targets[0].function} are described for different releases"
                )
        for release in first | self.not_needed.keys():
            if not _RELEASE.fullmatch(release):
                raise ValueError(f"{release!r} is no release (expected like 0.33.0)")
        if unknown := self.not_needed.keys() - first:
            raise ValueError(f"not needed in {', '.join(sorted(unknown))}, but no fingerprint tells that release")
        for one, other in combinations(self.releases(), 2):
            if (one in self.not_needed) != (other in self.not_needed) and all(
                t.fingerprints.get(one) == t.fingerprints.get(other) for t in self.targets
            ):
                raise ValueError(
                    f"the fingerprints of {one} and {other} are equal, but only one of them needs the overlay"
                )

    @property
    def module(self) -> str:
        """The module that holds WRAPPERS for this overlay."""
        return f"dflash_verify.overlays.{self.name.replace('-', '_')}"

    def releases(self) -> list[str]:
        """The releases described, oldest first."""
        return sorted(self.targets[0].releases(), key=release_key)

    def wrapped(self) -> list[Target]:
        return [t for t in self.targets if t.wraps]


def release_key(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split("."))


def manifest_dir() -> Path:
    """Beside this module in an installed wheel; the repository's overlays/ in an editable install."""
    here = Path(__file__).resolve().parent
    installed = here / "manifests"
    return installed if installed.is_dir() else here.parents[2] / "overlays"


def read_manifest(path: Path, *, complete: bool = True) -> Manifest:
    """Raises ManifestError naming the file and what is wrong in it.

    complete: False while a release is being recorded, when some functions have it and others do not yet.
    """
    try:
        manifest = Manifest(name=path.stem, **tomllib.loads(path.read_text(encoding="utf-8")))
        if complete:
            manifest.require_complete()
        return manifest
    except (ValueError, TypeError) as error:
        raise ManifestError(f"{path}: {error}") from error


@cache
def load_manifests(directory: Path | None = None) -> tuple[Manifest, ...]:
    """Every overlay, by name. Raises ManifestError."""
    directory = directory or manifest_dir()
    manifests = tuple(read_manifest(path) for path in sorted(directory.glob("*.toml")))
    if not manifests:
        raise ManifestError(
            f"no overlay manifests (*.toml) in {directory}: the installation of dflash-verify is incomplete"
        )
    return manifests
