"""The wheel: what it declares, what it carries, and that installing it changes nothing of vLLM."""

import json
import subprocess
import sys
import zipfile
from configparser import ConfigParser
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def pip(*args: str) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *args]
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), ".")
    (found,) = folder.glob("*.whl")
    return found


def test_the_only_vllm_entry_point_is_the_general_plugin(wheel: Path) -> None:
    # A stat-logger entry point turns statistics on everywhere, a platform or endpoint one logs in every install.
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith("entry_points.txt") and "dflash_verify-" in n]
        points = ConfigParser()
        points.read_string(archive.read(name).decode())
    assert {s: dict(points[s]) for s in points.sections()} == {
        "console_scripts": {"dflash-verify": "dflash_verify.cli:main"},
        "vllm.general_plugins": {"dflash_verify": "dflash_verify.plugin:register"},
    }


def test_the_wheel_carries_every_manifest_and_the_cpu_platforms_own_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for manifest in (ROOT / "overlays").glob("*.toml"):
        assert f"dflash_verify/overlays/manifests/{manifest.name}" in names
    assert any(n.startswith("dflash_verify/cpu/plugin_path/") and n.endswith("entry_points.txt") for n in names)
    assert "dflash_verify/py.typed" in names
    assert not any(n.startswith(("tests/", "bench/", "docker/")) for n in names)


def test_installing_beside_vllm_changes_none_of_its_packages(wheel: Path) -> None:
    assert version("vllm")
    report = json.loads(
        pip("install", "--dry-run", "--quiet", "--report", "-", "--force-reinstall", "--no-deps", str(wheel))
    )
    assert [item["metadata"]["name"] for item in report["install"]] == ["dflash-verify"]
    # With dependencies: what the resolver would install on top of an environment that has vLLM is the plugin alone.
    report = json.loads(pip("install", "--dry-run", "--quiet", "--report", "-", f"dflash-verify @ {wheel.as_uri()}"))
    assert {item["metadata"]["name"] for item in report["install"]} <= {"dflash-verify"}
