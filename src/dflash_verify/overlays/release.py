"""Write the fingerprints of a new vLLM release into the manifests, leaving every other line as it is."""

import re
from dataclasses import dataclass
from pathlib import Path

from dflash_verify.overlays.fingerprint import Source, SourceReader
from dflash_verify.overlays.manifest import read_manifest, release_key

ABSENT = "not in this release: say since which upstream change, and whether the overlay is still needed"


@dataclass(frozen=True, slots=True)
class Recorded:
    """One function in the new release. like: the newest release before it with the same source, None if there is none."""

    overlay: str
    file: str
    function: str
    fingerprint: str | None
    like: str | None


def record_release(directory: Path, source: Source, release: str) -> list[Recorded]:
    """Add `release` to every target of every manifest in `directory`; an entry that is there already is replaced.

    A function that does not exist is entered as absent, with a text to be replaced in review.
    """
    reader = SourceReader(source)
    recorded = []
    for path in sorted(directory.glob("*.toml")):
        manifest = read_manifest(path, complete=False)
        text = path.read_text(encoding="utf-8")
        for index, target in enumerate(manifest.targets):
            digest = reader.fingerprint(target.file, target.function)
            same = [r for r, d in target.fingerprints.items() if d == digest and r != release]
            like = max(same, key=release_key) if same else None
            recorded.append(Recorded(manifest.name, target.file, target.function, digest, like))
            if digest is not None or release not in target.absent:
                text = _with_entry(text, index, release, digest)
        path.write_text(text, encoding="utf-8")
        read_manifest(path, complete=False)  # still a manifest, or this says why not
    return recorded


def _with_entry(text: str, index: int, release: str, digest: str | None) -> str:
    lines = text.rstrip("\n").split("\n")
    starts = [i for i, line in enumerate(lines) if line.strip() == "[[targets]]"]
    start = starts[index]
    end = next((i for i in range(start + 1, len(lines)) if lines[i].startswith("[[")), len(lines))
    while not lines[end - 1].strip() or lines[end - 1].startswith("#"):  # what leads up to the next table is not ours
        end -= 1
    segment = [line for line in lines[start:end] if not line.startswith(f'"{release}" =')]
    table, value = ("fingerprints", digest) if digest is not None else ("absent", ABSENT)
    header = f"[targets.{table}]"
    if header not in segment:
        segment.append(header)
    first = segment.index(header) + 1
    last = next((i for i in range(first, len(segment)) if segment[i].startswith("[")), len(segment))
    entries = [*segment[first:last], f'"{release}" = "{value}"']
    entries.sort(key=_entry_key)
    return "\n".join([*lines[:start], *segment[:first], *entries, *segment[last:], *lines[end:]]) + "\n"


def _entry_key(line: str) -> tuple[int, ...]:
    match = re.match(r'"(\d+(?:\.\d+)*)"', line)
    return release_key(match[1]) if match else ()
