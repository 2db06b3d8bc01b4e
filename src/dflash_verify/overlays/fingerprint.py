"""A fingerprint of a function: a hash of its syntax tree without docstrings, comments and layout.

The tree is serialised by this module and not by `ast.dump`, whose output differs between Python versions, so that the
same source has the same fingerprint on Python 3.11 to 3.13.
"""

import ast
import hashlib
import importlib.util
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

# 128 bits: far beyond accident, and a manifest line stays readable.
HEX_DIGITS = 32

# Fields that carry no behaviour, or that only some Python versions have: load/store context follows from position, `kind`
# is the u of u"", `type_comment` a comment, `type_params` and `type_ignores` are empty lists where they exist.
_IGNORED_FIELDS = frozenset({"ctx", "kind", "type_comment", "type_ignores"})
_DOCUMENTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


class SourceError(Exception):
    """vLLM's source cannot be read: not installed, or not the wheel it should be."""


class Source(Protocol):
    """Where vLLM's files come from."""

    @property
    def version(self) -> str:
        """What the build calls itself; for people only, no decision depends on it."""

    def read(self, file: str) -> str | None:
        """The text of `file` ("vllm/config/speculative.py"), None if it does not exist."""


@dataclass(frozen=True, slots=True)
class InstalledSource:
    """The vLLM that `import vllm` would load, found without importing it."""

    root: Path  # the directory that contains vllm/
    version: str

    @classmethod
    def find(cls) -> "InstalledSource":
        """Raises SourceError if vLLM is not installed."""
        try:
            spec = importlib.util.find_spec("vllm")
        except (ImportError, ValueError):
            spec = None
        if spec is None or spec.origin is None:
            raise SourceError(
                "vLLM is not installed in this Python environment: install vllm, or name a wheel (--wheel)"
            )
        root = Path(spec.origin).resolve().parent.parent
        try:
            version = metadata.version("vllm")
        except metadata.PackageNotFoundError:  # on the path, but never installed
            version = "unknown version"
        return cls(root, version)

    def read(self, file: str) -> str | None:
        try:
            return (self.root / file).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None


@dataclass(frozen=True, slots=True)
class WheelSource:
    """A vLLM wheel that is not installed."""

    path: Path
    version: str

    @classmethod
    def open(cls, path: Path) -> "WheelSource":
        """Whatever the file is called. Raises SourceError if it is no vLLM wheel."""
        names = zipfile.ZipFile(path).namelist() if zipfile.is_zipfile(path) else []
        if not any(name.startswith("vllm/") for name in names):
            raise SourceError(f"{path} is not a vLLM wheel: it is no zip archive with a folder vllm/")
        described = (re.match(r"vllm-([^/]+)\.dist-info/", name) for name in names)
        version = next((match[1] for match in described if match), None)
        named = re.match(r"vllm-([^-]+)-.*\.whl$", path.name)
        return cls(path, version or (named[1] if named else "unknown version"))

    def read(self, file: str) -> str | None:
        with zipfile.ZipFile(self.path) as wheel:
            try:
                return wheel.read(file).decode("utf-8")
            except KeyError:
                return None


def find_function(tree: ast.Module, qualified_name: str) -> FunctionNode | None:
    """The definition of "function" or "Class.method" at the top of a module; of several, the last, which is in force."""
    scope: ast.AST = tree
    *classes, name = qualified_name.split(".")
    for class_name in classes:
        found = [n for n in ast.iter_child_nodes(scope) if isinstance(n, ast.ClassDef) and n.name == class_name]
        if not found:
            return None
        scope = found[-1]
    functions = [
        n
        for n in ast.iter_child_nodes(scope)
        if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)) and n.name == name
    ]
    return functions[-1] if functions else None


def fingerprint(node: FunctionNode) -> str:
    """The first 32 hexadecimal digits of the SHA-256 of the canonical syntax tree."""
    digest = hashlib.sha256()
    for token in _tokens(node):
        digest.update(token.encode("utf-8", "surrogatepass"))
        digest.update(b"\0")
    return digest.hexdigest()[:HEX_DIGITS]


def _tokens(value: object) -> Iterator[str]:
    if isinstance(value, ast.Constant):
        yield f"{type(value.value).__name__}:{value.value!r}"
    elif isinstance(value, ast.AST):
        yield f"({type(value).__name__}"
        for field, raw in sorted(ast.iter_fields(value), key=lambda item: item[0]):
            child = _canonical(value, field, raw)
            if field in _IGNORED_FIELDS or child is None or child == []:
                continue
            yield f"{field}="
            yield from _tokens(child)
        yield ")"
    elif isinstance(value, list):
        yield "["
        for item in value:
            yield from _tokens(item)
        yield "]"
    else:
        yield f"{type(value).__name__}:{value!r}"


def _canonical(node: ast.AST, field: str, child: Any) -> object:
    if field == "body" and isinstance(node, _DOCUMENTED):
        return _without_docstring(child)
    if field == "values" and isinstance(node, ast.JoinedStr):
        return _joined(child)
    return child


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0]
    documented = (
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    )
    return body[1:] if documented else body


def _joined(values: list[ast.expr]) -> list[ast.expr]:
    """Adjacent literal parts of an f-string as one and empty ones gone: how they are cut differs between Python versions."""
    merged: list[ast.expr] = []
    for value in values:
        last = merged[-1] if merged else None
        if isinstance(value, ast.Constant) and value.value == "":
            continue
        if isinstance(value, ast.Constant) and isinstance(last, ast.Constant):
            merged[-1] = ast.Constant(str(last.value) + str(value.value))
        else:
            merged.append(value)
    return merged


class SourceReader:
    """Parses each file of a source once."""

    def __init__(self, source: Source):
        self.source = source
        self._trees: dict[str, ast.Module | None] = {}

    def node(self, file: str, function: str) -> FunctionNode | None:
        """None if the file or the function does not exist, or the file is no Python that this version can read."""
        if file not in self._trees:
            text = self.source.read(file)
            try:
                self._trees[file] = None if text is None else ast.parse(text)
            except SyntaxError:
                self._trees[file] = None
        tree = self._trees[file]
        return None if tree is None else find_function(tree, function)

    def fingerprint(self, file: str, function: str) -> str | None:
        node = self.node(file, function)
        return None if node is None else fingerprint(node)

    def first_line(self, file: str, function: str) -> int | None:
        """The line that a code object compiled from the function names as its first: that of the first decorator."""
        node = self.node(file, function)
        return None if node is None else min([node.lineno, *(d.lineno for d in node.decorator_list)])
