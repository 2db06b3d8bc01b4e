"""A recorded or generated workload: per request, how many drafts the target would accept at each verification."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.intp]

# 32 years. A float64 clock that is later than this no longer shows what a step takes.
LATEST_MS = 1e12


class TraceError(ValueError):
    """A trace that cannot be replayed; the message is one sentence for the operator."""


@dataclass(frozen=True)
class Request:
    """accepts[i]: drafts, of the N proposed, that the target would accept at this request's i-th verification."""

    id: str
    arrive_ms: float
    tokens: int
    guided: bool
    accepts: IntArray


@dataclass(frozen=True)
class Trace:
    """Requests are admitted first in, first out, up to max_num_seqs at a time."""

    draft_width: int
    max_num_seqs: int
    requests: Sequence[Request]

    @classmethod
    def load(cls, path: Path) -> "Trace":
        try:
            data = json.loads(path.read_text())
        except OSError as error:
            raise TraceError(f"{path}: cannot be read ({error.strerror or error})") from None
        except (ValueError, RecursionError) as error:  # also integers too long and arrays too deep to be read
            raise TraceError(f"{path}: is not JSON ({error})") from None
        try:
            return cls.from_json(data)
        except TraceError as error:
            raise TraceError(f"{path}: {error}") from None

    @classmethod
    def from_json(cls, data: object) -> "Trace":
        if not isinstance(data, Mapping):
            raise TraceError("found no JSON object; expected draft_width, max_num_seqs and requests")
        missing = [name for name in ("draft_width", "max_num_seqs", "requests") if name not in data]
        if missing:
            raise TraceError(f"lacks {', '.join(missing)}; expected draft_width, max_num_seqs and requests")
        draft_width = _integer(data, "draft_width", 1, "the trace")
        max_num_seqs = _integer(data, "max_num_seqs", 1, "the trace")
        if not isinstance(data["requests"], list) or not data["requests"]:
            raise TraceError("lists no requests; expected at least one")
        requests = [_request(item, i, draft_width) for i, item in enumerate(data["requests"])]
        seen: set[str] = set()
        for request in requests:
            if request.id in seen:
                raise TraceError(f"lists request {request.id!r} twice; expected distinct ids")
            seen.add(request.id)
        return cls(draft_width, max_num_seqs, requests)

    def to_json(self) -> dict[str, Any]:
        return {
            "draft_width": self.draft_width,
            "max_num_seqs": self.max_num_seqs,
            "requests": [
                {
                    "id": r.id,
                    "arrive_ms": r.arrive_ms,
                    "tokens": r.tokens,
                    "guided": r.guided,
                    "accepts": r.accepts.tolist(),
                }
                for r in self.requests
            ],
        }


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _integer(data: Mapping[str, Any], name: str, least: int, owner: str) -> int:
    value = data[name]
    if type(value) is not int or value < least:
        raise TraceError(f"{owner} has {name} {_short(value)}; expected an integer of {least} or more")
    return value


def _request(item: object, index: int, draft_width: int) -> Request:
    if not isinstance(item, Mapping) or not isinstance(item.get("id"), str):
        raise TraceError(f"request number {index} has no id; expected an object with a text id")
    name = f"request {item['id']!r}"
    missing = [field for field in ("arrive_ms", "tokens", "accepts") if field not in item]
    if missing:
        raise TraceError(f"{name} lacks {', '.join(missing)}; expected arrive_ms, tokens, guided and accepts")
    arrive_ms = item["arrive_ms"]
    if type(arrive_ms) not in {int, float} or not 0 <= arrive_ms <= LATEST_MS:
        raise TraceError(f"{name} has arrive_ms {_short(arrive_ms)}; expected a time from 0 to {LATEST_MS:g}")
    guided = item.get("guided", False)
    if type(guided) is not bool:
        raise TraceError(f"{name} has guided {guided!r}; expected true or false")
    accepts = item["accepts"]
    if not isinstance(accepts, list) or not all(type(a) is int and 0 <= a <= draft_width for a in accepts):
        raise TraceError(f"{name} has accepts that are not all integers from 0 to the draft width {draft_width}")
    tokens = _integer(item, "tokens", 1, name)
    if tokens > len(accepts) * (draft_width + 1):
        raise TraceError(
            f"{name} has {len(accepts)} accepts, too few for its {_short(tokens)} tokens at any width; extend the list"
        )
    return Request(item["id"], float(arrive_ms), tokens, guided, np.array(accepts, dtype=np.intp))
