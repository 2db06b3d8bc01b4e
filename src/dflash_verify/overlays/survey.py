"""Compare a vLLM, installed or in a wheel, with the manifests: which overlays fit, which are not needed, what has drifted."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dflash_verify.overlays.fingerprint import SourceReader
from dflash_verify.overlays.manifest import Manifest, Target, release_key

State = Literal["applied", "needed", "not needed", "off", "drifted", "missing"]


class OverlayError(RuntimeError):
    """The overlays cannot be used as they are; one sentence for the operator."""


class DriftError(OverlayError):
    """A function of this vLLM is not the one an overlay was written for.

    found is None if the function does not exist.
    """

    def __init__(
        self,
        overlay: str,
        file: str,
        function: str,
        *,
        expected: str,
        found: str | None,
        release: str,
        version: str,
        known: str,
    ):
        self.overlay, self.file, self.function = overlay, file, function
        self.expected, self.found, self.release = expected, found, release
        is_now = f"has fingerprint {found}" if found else "does not exist"
        super().__init__(
            f"overlay {overlay} does not fit this vLLM ({version}): {function} in {file} {is_now}, expected {expected} "
            f"(release {release}); use one of the releases {known}, or run without DFLASH_VERIFY_TOKENS and DFLASH_BLOCK_VERIFY"
        )


@dataclass(frozen=True, slots=True)
class TargetStatus:
    """expected: the fingerprint in the nearest release, None where the function should not exist."""

    file: str
    function: str
    wraps: bool
    expected: str | None
    found: str | None


@dataclass(frozen=True, slots=True)
class OverlayStatus:
    """One overlay on one vLLM: what state it is in and why."""

    name: str
    title: str
    state: State
    release: str | None  # the known release that its fingerprints match
    reason: str
    targets: tuple[TargetStatus, ...] = ()

    @property
    def ok(self) -> bool:
        return self.state not in ("drifted", "missing")


@dataclass(frozen=True, slots=True)
class Status:
    """All overlays on one vLLM.

    version: what the build calls itself. release: the known release nearest to it, "" if nothing was compared.
    """

    version: str
    release: str
    overlays: tuple[OverlayStatus, ...]
    known_releases: tuple[str, ...] = field(default=())

    @property
    def ok(self) -> bool:
        return all(finding.ok for finding in self.overlays)

    def __getitem__(self, name: str) -> OverlayStatus:
        for finding in self.overlays:
            if finding.name == name:
                return finding
        raise KeyError(name)

    def names(self, state: State) -> tuple[str, ...]:
        return tuple(finding.name for finding in self.overlays if finding.state == state)

    def require_fit(self) -> None:
        """Raises DriftError for the first function that an overlay does not fit."""
        for finding in self.overlays:
            if finding.ok:
                continue
            for target in finding.targets:
                if target.found != target.expected:
                    raise DriftError(
                        finding.name,
                        target.file,
                        target.function,
                        expected=target.expected or "no such function",
                        found=target.found,
                        release=self.release,
                        version=self.version,
                        known=f"{self.known_releases[0]} to {self.known_releases[-1]}",
                    )


Found = dict[tuple[str, str], str | None]


def survey(reader: SourceReader, manifests: Sequence[Manifest], modes: Collection[str]) -> Status:
    """Fingerprint every target of every overlay and compare.

    modes: the active modes; an overlay for none of them is "off", and is not judged.
    """
    found: Found = {}
    for manifest in manifests:
        for target in manifest.targets:
            key = (target.file, target.function)
            if key not in found:
                found[key] = reader.fingerprint(*key)
    nearest = _nearest_release(manifests, found, reader.source.version)
    known = sorted({r for m in manifests for r in m.releases()}, key=release_key)
    overlays = tuple(_judge(m, found, nearest) if set(modes) & set(m.modes) else off(m) for m in manifests)
    return Status(reader.source.version, nearest, overlays, tuple(known))


def off(manifest: Manifest) -> OverlayStatus:
    """An overlay whose mode is not active."""
    return OverlayStatus(
        manifest.name, manifest.title, "off", None, f"only when {' or '.join(manifest.modes)} is active"
    )


def _fits(target: Target, release: str, found: str | None) -> bool:
    if release in target.absent:
        return found is None
    return found is not None and found == target.fingerprints.get(release)


def _nearest_release(manifests: Sequence[Manifest], found: Found, version: str) -> str:
    """The release that most targets match; between equals the one the build names, then the newest."""
    score: Counter[str] = Counter()
    for manifest in manifests:
        for target in manifest.targets:
            for release in target.releases():
                score[release] += _fits(target, release, found[target.file, target.function])
    return max(score, key=lambda r: (score[r], version.startswith(r), release_key(r)))


def _judge(manifest: Manifest, found: Found, nearest: str) -> OverlayStatus:
    def matches(release: str) -> bool:
        return all(_fits(t, release, found[t.file, t.function]) for t in manifest.targets)

    releases = [r for r in manifest.releases() if matches(r)]
    compare_with = nearest if nearest in manifest.releases() else manifest.releases()[-1]
    release = compare_with if compare_with in releases else (releases[-1] if releases else None)
    targets = tuple(
        TargetStatus(
            t.file, t.function, t.wraps, t.fingerprints.get(release or compare_with), found[t.file, t.function]
        )
        for t in manifest.targets
    )
    if release is None:
        wrong = [t for t in targets if t.found != t.expected]
        gone = [t for t in wrong if t.found is None]
        if gone:
            return OverlayStatus(
                manifest.name,
                manifest.title,
                "missing",
                None,
                f"{gone[0].function} is not in {gone[0].file}, or that file does not parse",
                targets,
            )
        reason = (
            f"{wrong[0].function} in {wrong[0].file} has fingerprint {wrong[0].found}, "
            f"expected {wrong[0].expected or 'no such function'} ({compare_with})"
        )
        return OverlayStatus(manifest.name, manifest.title, "drifted", None, reason, targets)
    if release in manifest.not_needed:
        return OverlayStatus(
            manifest.name, manifest.title, "not needed", release, manifest.not_needed[release], targets
        )
    absent = [t.absent[release] for t in manifest.wrapped() if release in t.absent]
    if len(absent) == len(manifest.wrapped()):
        return OverlayStatus(manifest.name, manifest.title, "not needed", release, absent[0], targets)
    return OverlayStatus(
        manifest.name, manifest.title, "needed", release, f"every fingerprint is that of {release}", targets
    )
