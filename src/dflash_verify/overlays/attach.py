"""Put the overlays on a running vLLM and take them off again: all or none, once, reversibly.

vLLM loads general plugins in every process, also in those that never serve a request, and early: importing the modules
that the overlays touch would cost seconds, might initialise a device before a fork, and could run into import cycles.
So fingerprints are compared on the source files, and a module that is not imported yet gets its wrappers at the end of its
import, by an import hook. What has been checked before is complete when the first overlay is attached.
"""

import functools
import importlib
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from inspect import unwrap
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from dflash_verify.overlays.fingerprint import InstalledSource, SourceError, SourceReader
from dflash_verify.overlays.manifest import Manifest, Mode, Target, load_manifests
from dflash_verify.overlays.survey import OverlayError, Status, off, survey

MARKER = "__dflash_verify__"

AnyFunction = Callable[..., Any]


class OverlaySettings(Protocol):
    """What the overlays ask of the settings."""

    @property
    def width_active(self) -> bool: ...

    @property
    def block_verify(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Context:
    """What a wrapper may know. release: the known release that the overlay's fingerprints match."""

    overlay: str
    target: Target
    settings: Any
    release: str


Wrap = Callable[[AnyFunction, Context], AnyFunction]


@dataclass(frozen=True, slots=True)
class Marker:
    """Carried by every replacement: which overlays it comes from, innermost first, and what it replaced."""

    overlays: tuple[str, ...]
    target: str
    original: Any


@dataclass(slots=True)
class _Slot:
    """One function of vLLM and the overlays that wrap it, innermost first."""

    target: Target
    path: str
    first_line: int
    layers: list[tuple[Wrap, Context]]
    replacement: Any = None
    original: Any = None
    places: list[tuple[Any, str]] = field(
        default_factory=list
    )  # (module or class, attribute) that hold the replacement

    @property
    def name(self) -> str:
        return f"{self.target.function} in {self.target.file}"

    def attach(self, module: ModuleType) -> None:
        """Raises OverlayError if the running function is not the one in the source file."""
        owner, attribute, raw = self._find(module)
        if marked(raw):
            raise OverlayError(
                f"half-applied overlays: {self.name} is already wrapped ({marked(raw)}); restart this process"
            )
        function = raw.__func__ if isinstance(raw, (staticmethod, classmethod)) else raw
        code = getattr(unwrap(function), "__code__", None)
        if code is None or os.path.realpath(code.co_filename) != self.path or code.co_firstlineno != self.first_line:
            raise OverlayError(
                f"{self.name} was replaced before dflash-verify could wrap it (found "
                f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', '?')}, expected line "
                f"{self.first_line} of {self.path}); remove the other plugin or patch"
            )
        wrapped = function
        for wrap, context in self.layers:
            outer = wrap(wrapped, context)
            assert outer is not wrapped, f"overlay {context.overlay} returned {self.name} itself"
            wrapped = functools.update_wrapper(outer, wrapped)
        setattr(wrapped, MARKER, Marker(tuple(c.overlay for _, c in self.layers), self.name, raw))
        self.original = raw
        self.replacement = type(raw)(wrapped) if isinstance(raw, (staticmethod, classmethod)) else wrapped
        self.places = [(owner, attribute)]
        if owner is module:
            # `from module import function` has copied the name into modules that are loaded already.
            self.places += [
                (other, attribute)
                for name, other in list(sys.modules.items())
                if name.startswith("vllm.") and other is not module and vars(other).get(attribute) is raw
            ]
        for place, name in self.places:
            setattr(place, name, self.replacement)

    def detach(self) -> None:
        for place, name in self.places:
            if vars(place).get(name) is self.replacement:
                setattr(place, name, self.original)
        self.places = []

    def in_place(self) -> bool:
        """The wrapper is there, or something that wraps it in turn."""
        return all(
            vars(place).get(name) is self.replacement or marked(vars(place).get(name)) for place, name in self.places
        )

    def _find(self, module: ModuleType) -> tuple[Any, str, Any]:
        *classes, attribute = self.target.function.split(".")
        owner: Any = module
        try:
            for name in classes:
                owner = vars(owner)[name]
            return owner, attribute, vars(owner)[attribute]
        except KeyError:
            raise OverlayError(
                f"{self.name} is in the source but not in the running module, so its overlay cannot be applied; "
                f"run `dflash-verify check` and report this build"
            ) from None


@dataclass(slots=True)
class _Applied:
    settings: Any
    status: Status
    slots: list[_Slot]
    hook: "_ImportHook"


class _ImportHook(MetaPathFinder):
    """Attaches the overlays of a module when its import ends.

    The module's own finder and loader do all the work; the loader keeps its type, since inspect and importlib ask it for
    sources and resources.
    """

    def __init__(self, slots: Sequence[_Slot]):
        self._waiting: dict[str, list[_Slot]] = {}
        for slot in slots:
            self._waiting.setdefault(slot.target.module, []).append(slot)

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        slots = self._waiting.get(fullname)
        if slots is None:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                self._attach_after(spec.loader, slots)
                return spec
        return None

    def _attach_after(self, loader: Any, slots: list[_Slot]) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            execute(module)
            if self not in sys.meta_path:  # reverted meanwhile
                return
            for slot in slots:
                slot.attach(module)

        loader.exec_module = exec_module


_lock = threading.RLock()
_applied: _Applied | None = None


def marked(value: Any) -> str:
    """The overlays that a function or method comes from, "" if it is vLLM's own."""
    function = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
    marker = getattr(function, MARKER, None)
    return ", ".join(marker.overlays) if marker is not None else ""


def active_modes(settings: OverlaySettings) -> frozenset[Mode]:
    modes: set[Mode] = set()
    if settings.width_active:
        modes.add("width")
    if settings.block_verify:
        modes.add("block")
    return frozenset(modes)


def apply(settings: OverlaySettings, manifests: Sequence[Manifest] | None = None) -> Status:
    """Apply every overlay that the active modes and this release of vLLM need, or none.

    Applying again with equal settings changes nothing. Costs a few hundred milliseconds, imports nothing of vLLM and
    touches no device.

    Raises DriftError if a function is not the one an overlay was written for, OverlayError for anything else that makes
    the result uncertain. vLLM then stops with the sentence.
    """
    global _applied  # noqa: PLW0603  (vLLM's classes are per process, so is what was done to them)
    with _lock:
        modes = active_modes(settings)
        if _applied is not None:
            return _applied_again(_applied, settings)
        if not modes:
            return status()
        manifests = load_manifests() if manifests is None else manifests
        try:
            source = InstalledSource.find()
        except SourceError as error:
            raise OverlayError(str(error)) from error
        reader = SourceReader(source)
        surveyed = survey(reader, manifests, modes)
        surveyed.require_fit()
        slots = _slots(manifests, surveyed, settings, reader, source.root)
        hook = _ImportHook(slots)
        sys.meta_path.insert(0, hook)
        try:
            for slot in slots:
                module = sys.modules.get(slot.target.module)
                if module is None:
                    continue
                if getattr(module.__spec__, "_initializing", False):
                    raise OverlayError(f"{slot.target.module} is half-imported: load dflash-verify before or after it")
                slot.attach(module)
        except BaseException:
            _take_off(slots, hook)
            raise
        overlays = tuple(replace(o, state="applied") if o.state == "needed" else o for o in surveyed.overlays)
        _applied = _Applied(settings, replace(surveyed, overlays=overlays), slots, hook)
        return _applied.status


def revert() -> None:
    """Take every overlay off; each attribute is again the object that it was."""
    global _applied  # noqa: PLW0603  (vLLM's classes are per process, so is what was done to them)
    with _lock:
        if _applied is not None:
            _take_off(_applied.slots, _applied.hook)
            _applied = None


def status() -> Status:
    """What is applied in this process. Raises OverlayError if a wrapper has been removed from outside."""
    with _lock:
        if _applied is None:
            return Status("", "", tuple(off(m) for m in load_manifests()))
        return _applied_again(_applied, _applied.settings)


def _applied_again(applied: _Applied, settings: OverlaySettings) -> Status:
    if settings != applied.settings:
        raise OverlayError("overlays are already applied in this process with other settings: revert them first")
    for slot in applied.slots:
        if not slot.in_place():
            raise OverlayError(
                f"half-applied overlays: {slot.name} is stock again while others are wrapped; restart this process"
            )
    return applied.status


def _take_off(slots: Sequence[_Slot], hook: _ImportHook) -> None:
    if hook in sys.meta_path:
        sys.meta_path.remove(hook)
    for slot in slots:
        slot.detach()


def _slots(
    manifests: Sequence[Manifest], surveyed: Status, settings: Any, reader: SourceReader, root: Path
) -> list[_Slot]:
    slots: dict[tuple[str, str], _Slot] = {}
    for manifest in manifests:
        overlay = surveyed[manifest.name]
        if overlay.state != "needed" or overlay.release is None:
            continue
        wrappers: dict[str, Wrap] = importlib.import_module(manifest.module).WRAPPERS
        for target in manifest.wrapped():
            if overlay.release in target.absent:
                continue
            key = (target.file, target.function)
            if key not in slots:
                line = reader.first_line(*key)
                assert line is not None  # its fingerprint matched
                slots[key] = _Slot(target, os.path.realpath(root / target.file), line, [])
            context = Context(manifest.name, target, settings, overlay.release)
            slots[key].layers.append((wrappers[target.function], context))
    return list(slots.values())
