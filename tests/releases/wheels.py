"""vLLM's released wheels, downloaded once and kept in the user's cache directory (300 MB each)."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

RELEASES = ("0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0")
INSTALLED = "0.33.0"  # what the extra [vllm] pins

# Any of these may carry a release; pip takes the first that exists.
PLATFORMS = ("manylinux_2_35_x86_64", "manylinux_2_31_x86_64", "manylinux_2_28_x86_64", "manylinux1_x86_64")


def cache_dir() -> Path:
    """VLLM_WHEEL_CACHE, or below the user's cache directory."""
    named = os.environ.get("VLLM_WHEEL_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(named) if named else Path(base) / "dflash-verify" / "wheels"


def wheel(release: str) -> Path:
    """The wheel of `release`, downloaded from the package index if it is not there yet."""
    directory = cache_dir()
    found = sorted(directory.glob(f"vllm-{release}-*.whl"))
    if not found:
        directory.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
        command += [argument for platform in PLATFORMS for argument in ("--platform", platform)]
        done = subprocess.run(
            [*command, "--dest", str(directory), f"vllm=={release}"], capture_output=True, text=True, check=False
        )
        found = sorted(directory.glob(f"vllm-{release}-*.whl"))
        assert found, f"vllm=={release} could not be downloaded: {done.stderr.strip().splitlines()[-1:]}"
    return found[0]


def unpacked(release: str) -> Path:
    """A directory for PYTHONPATH with the Python sources and the metadata of `release`."""
    target = cache_dir() / "sources" / release
    if not (target / ".complete").exists():
        with zipfile.ZipFile(wheel(release)) as archive:
            names = [n for n in archive.namelist() if n.endswith((".py", ".dist-info/METADATA"))]
            archive.extractall(target, names)
        (target / ".complete").touch()
    return target
