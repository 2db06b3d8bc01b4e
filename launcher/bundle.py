"""The plugin as one folder that is mounted into any image with vLLM: nothing is installed and no file of the image
changes. The folder is named by its content, so that two hosts with the same name have the same plugin."""

import base64
import hashlib
import io
import re
import tarfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from launcher.errors import LaunchError

MOUNT = "/opt/dflash-verify"
# On every host; $HOME is left to that host's shell, since users differ.
CACHE = "$HOME/.cache/dflash-verify"
COSTS = f"{CACHE}/costs"  # measured cost tables, and the control file


@dataclass(frozen=True)
class Bundle:
    """Relative path -> content of every file."""

    files: dict[str, bytes]

    @cached_property
    def digest(self) -> str:
        """12 hex digits over names and contents."""
        total = hashlib.sha256()
        for name, content in sorted(self.files.items()):
            total.update(f"{name}\0{len(content)}\0".encode() + content)
        return total.hexdigest()[:12]

    @property
    def folder(self) -> str:
        """Where it lies on a host, for a shell in double quotes."""
        return f"{CACHE}/plugin-{self.digest}"

    def archive(self) -> bytes:
        """A tar.gz with fixed owners and times."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
            for name, content in sorted(self.files.items()):
                entry = tarfile.TarInfo(name)
                entry.size, entry.mode = len(content), 0o644
                tar.addfile(entry, io.BytesIO(content))
        return buffer.getvalue()

    def unpack_script(self, *, shown: bool = False) -> str:
        """Shell that puts the folder in place unless it is there; `shown` leaves the payload out."""
        payload = f"({len(self.files)} files)" if shown else base64.encodebytes(self.archive()).decode().strip()
        return (
            # Made here, since docker would make it as root.
            f'mkdir -p "{COSTS}" || exit 1\n'
            f'if ! [ -d "{self.folder}" ]; then\n'
            f'  mkdir -p "{self.folder}.part.$$" || exit 1\n'
            f'  base64 -d <<\'END\' | tar -xzf - -C "{self.folder}.part.$$" || {{ rm -rf "{self.folder}.part.$$"; exit 1; }}\n'
            f"{payload}\nEND\n"
            # Another start on that host may have been faster.
            f'  mv -T "{self.folder}.part.$$" "{self.folder}" 2>/dev/null || rm -rf "{self.folder}.part.$$"\n'
            f'  [ -d "{self.folder}" ] || exit 1\n'
            "fi"
        )


def make(root: Path) -> Bundle:
    """The plugin of this checkout: its package, the overlay manifests, and the metadata by which vLLM finds it."""
    source, manifests = root / "src" / "dflash_verify", root / "overlays"
    if not source.is_dir():
        raise LaunchError(f"{source} is missing: run start.sh from a complete checkout.")
    files = {
        f"dflash_verify/{path.relative_to(source).as_posix()}": path.read_bytes()
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    files |= {
        f"dflash_verify/overlays/manifests/{path.relative_to(manifests).as_posix()}": path.read_bytes()
        for path in manifests.rglob("*.toml")
    }
    project = (root / "pyproject.toml").read_text(encoding="utf-8")
    version = re.search(r'^version = "([^"]+)"', project, re.MULTILINE)
    entry_points = re.search(
        r'^\[project\.entry-points\."vllm\.general_plugins"\]\n((?:\w+ = "[\w.:]+"\n)+)', project, re.M
    )
    if not version or not entry_points:
        raise LaunchError("pyproject.toml has no version or no vllm.general_plugins entry point: restore it.")
    info = f"dflash_verify-{version[1]}.dist-info"
    files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: dflash-verify\nVersion: {version[1]}\n".encode()
    files[f"{info}/entry_points.txt"] = ("[vllm.general_plugins]\n" + entry_points[1].replace('"', "")).encode()
    return Bundle(files)
