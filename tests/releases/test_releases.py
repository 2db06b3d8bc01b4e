"""Every supported vLLM release: its real sources against the manifests, and the overlays on its real modules.

0.33.0 always (the installed package); the other wheels, 300 MB each, with `-m full`.
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path

import pytest
from click.testing import CliRunner
from wheels import INSTALLED, RELEASES, unpacked, wheel

from dflash_verify.overlays.command import check, fingerprint
from dflash_verify.overlays.fingerprint import InstalledSource, SourceReader, WheelSource, find_function
from dflash_verify.overlays.manifest import load_manifests, manifest_dir, read_manifest
from dflash_verify.overlays.survey import survey

HERE = Path(__file__).resolve().parent
MANIFESTS = load_manifests()
TARGETS = sorted({(t.file, t.function) for m in MANIFESTS for t in m.targets})
EVERY_RELEASE = [pytest.param(r, marks=[] if r == INSTALLED else [pytest.mark.full]) for r in RELEASES]


@cache
def reader_of(release):
    """Parses each file of a release once for all tests."""
    return SourceReader(InstalledSource.find() if release == INSTALLED else WheelSource.open(wheel(release)))


class Edited:
    """A source with one file replaced."""

    def __init__(self, original, file, text):
        self.original, self.file, self.text, self.version = original, file, text, original.version

    def read(self, file):
        return self.text if file == self.file else self.original.read(file)


@pytest.mark.parametrize("release", EVERY_RELEASE)
def test_every_overlay_fits_the_released_sources(release):
    status = survey(reader_of(release), MANIFESTS, {"width", "block"})
    assert status.ok
    assert status.release == release
    assert {o.release for o in status.overlays} == {release}
    not_needed = {m.name for m in MANIFESTS if release in m.not_needed}
    assert ("capture-widths" in not_needed) == (release == "0.28.0")
    not_needed |= {"guided-residual"} if release < "0.32.0" else set()
    assert set(status.names("not needed")) == not_needed
    assert set(status.names("needed")) == {m.name for m in MANIFESTS} - not_needed


@pytest.mark.parametrize("release", EVERY_RELEASE)
@pytest.mark.parametrize(("file", "function"), TARGETS, ids=[f for _, f in TARGETS])
def test_one_changed_character_in_a_touched_function_is_detected(release, file, function):
    reader = reader_of(release)
    original = reader.source
    node = reader.node(file, function)
    if node is None:
        pytest.skip(f"{function} is not in {release}")
    lines = original.read(file).splitlines(keepends=True)
    # The last name in the last statement of the body: far from the signature, sure to be code.
    last = node.body[-1]
    name = [n for n in ast.walk(last) if isinstance(n, ast.Name)][-1]
    line = lines[name.lineno - 1].encode()
    lines[name.lineno - 1] = (line[: name.col_offset] + b"x" + line[name.col_offset :]).decode()
    edited = Edited(original, file, "".join(lines))
    assert find_function(ast.parse(edited.text), function) is not None
    changed = SourceReader(edited)
    changed._trees = {name: tree for name, tree in reader._trees.items() if name != file}
    status = survey(changed, MANIFESTS, {"width", "block"})
    concerned = {m.name for m in MANIFESTS if any((t.file, t.function) == (file, function) for t in m.targets)}
    assert set(status.names("drifted")) == concerned
    assert status.release == release  # everything else still says so


@pytest.mark.parametrize("release", EVERY_RELEASE)
def test_overlays_change_the_real_modules_as_specified(release):
    """Runs behaviour/check_*.py in a process of its own, beside the sources of `release`."""
    env = os.environ | {
        "VLLM_RELEASE_UNDER_TEST": release,
        "VLLM_LOGGING_LEVEL": "ERROR",
        "CUDA_VISIBLE_DEVICES": "",  # empty, not absent: otherwise vLLM turns Triton off
        "TRITON_INTERPRET": "1",
    }
    paths = [str(HERE.parents[1] / "src")]
    if release != INSTALLED:
        paths.insert(0, str(unpacked(release)))
    env["PYTHONPATH"] = os.pathsep.join(paths)
    checks = sorted(str(path) for path in (HERE / "behaviour").glob("check_*.py"))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--tb=short",
        "--show-capture=no",
        *checks,
    ]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=1800, check=False, cwd=HERE.parents[1]
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert re.search(r"\d+ passed", done.stdout), done.stdout


@pytest.mark.parametrize("release", EVERY_RELEASE)
def test_every_reader_of_the_state_rows_is_listed(release):
    """A file that reads `spec_state_indices_tensor` and is not in gdn-active-width.toml has not been reviewed."""
    root = InstalledSource.find().root if release == INSTALLED else unpacked(release)
    readers = {
        str(path.relative_to(root))
        for path in sorted((root / "vllm").rglob("*.py"))
        if "spec_state_indices_tensor" in re.sub("non_spec_state_indices_tensor", "", path.read_text(encoding="utf-8"))
    }
    manifest = next(m for m in MANIFESTS if m.name == "gdn-active-width")
    reviewed = {c.file for c in manifest.consumers} | {t.file for t in manifest.targets}
    assert readers - reviewed == set()


@pytest.fixture(scope="module")
def edited_wheel(tmp_path_factory):
    """An 0.33.0 wheel of the files that matter, with one line of GDN's build edited."""
    path = tmp_path_factory.mktemp("wheel") / "vllm-0.33.0-cp38-abi3-manylinux_2_28_x86_64.whl"
    installed = InstalledSource.find()
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted({file for file, _ in TARGETS}):
            text = installed.read(file)
            if file.endswith("gdn_attn.py"):
                before = "spec_state_indices_tensor[num_spec_decodes:].fill_(NULL_BLOCK_ID)"
                assert text.count(before) == 1
                text = text.replace(before, before.replace("num_spec_decodes", "num_decodes"))
            archive.writestr(file, text)
    return path


def test_check_of_an_edited_wheel_prints_the_drift_and_exits_1(edited_wheel):
    result = CliRunner().invoke(check, ["--json", "--wheel", str(edited_wheel)])
    document = json.loads(result.output)
    assert result.exit_code == 1
    assert document["ok"] is False
    by_name = {o["name"]: o for o in document["overlays"]}
    assert [o["name"] for o in document["overlays"] if o["status"] == "drifted"] == ["gdn-active-width"]
    (drift,) = by_name["gdn-active-width"]["drift"]
    assert drift["file"] == "vllm/v1/attention/backends/gdn_attn.py"
    assert drift["function"] == "GDNAttentionMetadataBuilder.build"
    assert drift["expected"] == SourceReader(InstalledSource.find()).fingerprint(drift["file"], drift["function"])
    assert drift["found"] not in (None, drift["expected"])
    renamed = shutil.copy(edited_wheel, edited_wheel.with_name("edited.whl"))
    table = CliRunner().invoke(check, ["--wheel", str(renamed)])
    assert table.exit_code == 1
    assert "drifted" in table.output
    assert "nearest release: 0.33.0" in table.output


def test_check_of_the_installed_release():
    result = CliRunner().invoke(check, ["--json"])
    document = json.loads(result.output)
    assert result.exit_code == 0
    assert document["ok"] is True
    assert {o["name"]: o["status"] for o in document["overlays"]} == {m.name: "needed" for m in MANIFESTS}
    assert CliRunner().invoke(check, []).exit_code == 0


def test_check_imports_neither_torch_nor_vllm():
    code = (
        "import sys; from dflash_verify.cli import main\n"
        "try: main(['check', '--json'])\n"
        "except SystemExit as e: assert e.code == 0\n"
        "assert 'torch' not in sys.modules and 'vllm' not in sys.modules"
    )
    env = os.environ | {"PYTHONPATH": str(HERE.parents[1] / "src")}
    subprocess.run([sys.executable, "-c", code], check=True, env=env, capture_output=True, timeout=60)


def test_fingerprint_records_a_new_release_that_check_then_knows(edited_wheel, tmp_path):
    manifests = tmp_path / "overlays"
    shutil.copytree(manifest_dir(), manifests)
    new = edited_wheel.with_name("vllm-0.34.0-cp38-abi3-manylinux_2_28_x86_64.whl")
    shutil.copy(edited_wheel, new)
    result = CliRunner().invoke(fingerprint, ["--wheel", str(new), "--manifests", str(manifests), "--json"])
    assert result.exit_code == 0, result.output
    recorded = {t["function"]: t for t in json.loads(result.output)["targets"]}
    assert recorded["GDNAttentionMetadataBuilder.build"]["like"] is None  # has to be read again
    assert recorded["SpeculativeConfig.compute_hash"]["like"] == "0.33.0"
    for path in sorted(manifests.glob("*.toml")):
        before = (manifest_dir() / path.name).read_text().splitlines()
        after = path.read_text().splitlines()
        added = [line for line in after if '"0.34.0"' in line]
        assert [line for line in after if line not in added] == before  # every other line as it was
        assert read_manifest(path).releases()[-1] == "0.34.0"
    known = tuple(read_manifest(path) for path in sorted(manifests.glob("*.toml")))
    assert survey(SourceReader(WheelSource.open(new)), known, {"width"}).release == "0.34.0"
    once = {path.name: path.read_text() for path in manifests.glob("*.toml")}
    again = CliRunner().invoke(fingerprint, ["--wheel", str(new), "--manifests", str(manifests)])
    assert again.exit_code == 0
    assert {path.name: path.read_text() for path in manifests.glob("*.toml")} == once


def test_what_is_no_wheel_is_refused_in_a_sentence(tmp_path):
    path = tmp_path / "torch-2.0-py3-none-any.whl"
    path.write_bytes(b"")
    result = CliRunner().invoke(check, ["--json", "--wheel", str(path)])
    assert result.exit_code == 1
    assert "not a vLLM wheel" in json.loads(result.output)["error"]
    result = CliRunner().invoke(fingerprint, ["--wheel", str(path)])
    assert result.exit_code == 1
    assert "not a vLLM wheel" in result.output
