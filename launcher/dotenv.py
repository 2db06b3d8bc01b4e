"""Reads .env. Values are data: nothing is expanded, substituted or executed.

NAME=value              up to the end of the line or ` #`, trimmed
NAME='any text'         literal, may span lines
NAME="any \\"text\\""     \\" \\\\ \\n \\t \\$ are the only escapes, may span lines
"""

import re
from pathlib import Path

from launcher.errors import LaunchError

_NAME = re.compile(r"(?:export[ \t]+)?([A-Za-z_][A-Za-z0-9_]*)[ \t]*=[ \t]*")
_ESCAPES = {"n": "\n", "t": "\t", '"': '"', "\\": "\\", "$": "$"}


def read(path: Path) -> dict[str, str]:
    """Names and values of one file; LaunchError names the line that is not understood."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise LaunchError(f"{path} is not UTF-8 text: save it as UTF-8.") from None
    except OSError as error:
        raise LaunchError(f"{path} cannot be read ({error.strerror}): check its permissions.") from None
    return parse(text, str(path))


def parse(text: str, origin: str = ".env") -> dict[str, str]:
    """Names and values of a text; a name given twice keeps its last value."""
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    if "\0" in text:
        raise LaunchError(f"{origin} contains a NUL byte: it is not a settings file, make it anew from .env.example.")
    values: dict[str, str] = {}
    position = 0
    while position < len(text):
        end = _line_end(text, position)
        line = text[position:end].strip()
        if not line or line.startswith("#"):
            position = end + 1
            continue
        start = position + len(text[position:end]) - len(text[position:end].lstrip())
        match = _NAME.match(text, start)
        number = text.count("\n", 0, position) + 1
        if not match or match.end() > end:
            raise LaunchError(f"{origin} line {number} is not NAME=value: correct it or put # before it.")
        position, values[match[1]] = _value(text, match.end(), f"{origin} line {number}, {match[1]}")
    return values


def _value(text: str, start: int, where: str) -> tuple[int, str]:
    """The value that begins at `start`, and where the next line begins."""
    end = _line_end(text, start)
    quote = text[start : start + 1]
    if quote not in ("'", '"') or start >= end:
        bare = text[start:end]
        comment = re.search(r"(?:^|[ \t])#", bare)
        return end + 1, (bare[: comment.start()] if comment else bare).strip()
    value, position = [], start + 1
    while position < len(text) and text[position] != quote:
        if quote == '"' and text[position] == "\\" and text[position + 1 : position + 2] in _ESCAPES:
            value.append(_ESCAPES[text[position + 1]])
            position += 2
        else:
            value.append(text[position])
            position += 1
    if position >= len(text):
        raise LaunchError(f"{where}: the {quote} that begins the value is not closed; close it.")
    end = _line_end(text, position)
    rest = text[position + 1 : end].strip()
    if rest and not rest.startswith("#"):
        raise LaunchError(
            f"{where}: {rest[:20]!r} follows the closing {quote}; put the whole value in quotes, or none of it."
        )
    return end + 1, "".join(value)


def _line_end(text: str, position: int) -> int:
    end = text.find("\n", position)
    return len(text) if end < 0 else end
