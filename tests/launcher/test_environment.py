"""./start.sh setup and test with a stand-in for Python: what is installed, when, and what is said."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import ROOT, until

# Makes "environments" whose python records what pip is asked for. $PIP says what pip does.
PYTHON = f"""#!/bin/sh
here=$(dirname -- "$0")
case "$*" in
*"import sys, venv, ensurepip"*) [ "$OLD" != 1 ] ;;
*"-m venv --clear"*)
  for venv in "$@"; do :; done
  mkdir -p "$venv/bin" && touch "$venv/pyvenv.cfg" && cp "$0" "$venv/bin/python" ;;
*"-m pip --version"*) ;;
*"-m pip install"*)
  echo "$*" >>"$LOG"
  case $PIP in
  hang) echo "Collecting vllm"; exec sleep 60 ;;
  fail) echo "WARNING: Location 'x' is ignored"; echo "ERROR: No matching distribution found for vllm"; exit 1 ;;
  esac
  printf '#!/bin/sh\\necho "dflash-verify $*"\\n' >"$here/dflash-verify" && chmod +x "$here/dflash-verify" ;;
*) exec {sys.executable} "$@" ;;
esac
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    folder = tmp_path / "clone"
    folder.mkdir()
    for name in ("start.sh", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    (folder / "launcher").symlink_to(ROOT / "launcher")
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    return folder


def environment(clone: Path, **more: str) -> dict[str, str]:
    names = {"PATH": "/usr/bin:/bin", "HOME": str(clone.parent), "PYTHON": str(clone.parent / "python")}
    return (
        names
        | {"LOG": str(clone.parent / "pip.log"), "PIP": "", "OLD": "", "DFLASH_VENV": str(clone.parent / "env")}
        | more
    )


def setup(clone: Path, *words: str, **more: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [str(clone / "start.sh"), *(words or ["setup"])],
        env=environment(clone, **more),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def installations(clone: Path) -> int:
    log = clone.parent / "pip.log"
    return len(log.read_text().splitlines()) if log.exists() else 0


def test_what_is_missing_is_installed_once_and_announced(clone: Path) -> None:
    first = setup(clone)
    assert first.returncode == 0, first.stderr
    assert "about 3 minutes and 10 GB" in first.stdout
    assert "[vllm,bench,test]" in (clone.parent / "pip.log").read_text()
    second = setup(clone)
    assert (second.returncode, second.stdout, second.stderr) == (0, "", "")
    assert installations(clone) == 1


def test_demo_installs_and_then_runs(clone: Path) -> None:
    done = setup(clone, "demo", "--quick")
    assert done.returncode == 0
    assert done.stdout.endswith("dflash-verify demo --quick\n")


def test_a_changed_project_file_is_installed_again(clone: Path) -> None:
    setup(clone)
    with open(clone / "pyproject.toml", "a") as project:
        project.write("# changed\n")
    assert setup(clone).returncode == 0
    assert installations(clone) == 2


def test_an_interrupted_installation_is_continued(clone: Path) -> None:
    process = subprocess.Popen(
        [str(clone / "start.sh"), "setup"],
        env=environment(clone, PIP="hang"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    until(lambda: installations(clone) == 1)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "it continues where it stopped" in err
    assert setup(clone).returncode == 0
    assert installations(clone) == 2


def test_a_failed_installation_shows_pips_words_and_one_sentence(clone: Path) -> None:
    done = setup(clone, PIP="fail")
    assert done.returncode == 1
    assert "No matching distribution" in done.stderr
    assert "is ignored" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("start.sh: pip could not install")


def test_a_machine_without_a_usable_python_gets_one_sentence(clone: Path) -> None:
    bare = clone.parent / "bare"
    bare.mkdir()
    for name in ("bash", "dirname", "uname", "mkdir", "flock", "ls", "cat", "sha256sum", "cut", "env"):
        (bare / name).symlink_to(shutil.which(name) or name)
    (bare / "python3").symlink_to(clone.parent / "python")
    env = environment(clone, PATH=str(bare), OLD="1") | {"PYTHON": ""}
    # start.sh also looks at /usr/bin/python3, which this machine may have; the stand-in answers for that name only.
    text = (ROOT / "launcher" / "environment.sh").read_text().replace("/usr/bin/python3", str(bare / "python3"))
    (clone / "launcher").unlink()
    shutil.copytree(ROOT / "launcher", clone / "launcher", ignore=shutil.ignore_patterns("__pycache__"))
    (clone / "launcher" / "environment.sh").write_text(text)
    done = subprocess.run([str(clone / "start.sh"), "setup"], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("start.sh: no Python 3.11 to 3.14 with venv found")
    assert done.stderr.count("\n") == 1


def test_a_folder_that_is_no_environment_is_left_alone(clone: Path) -> None:
    (clone.parent / "env").mkdir()
    (clone.parent / "env" / "thesis.tex").write_text("x")
    done = setup(clone)
    assert done.returncode == 1
    assert "is no Python environment" in done.stderr
    assert (clone.parent / "env" / "thesis.tex").exists()


def suite(clone: Path, name: str, text: str) -> None:
    (clone / "tests" / name).mkdir(parents=True)
    (clone / "tests" / name / "test_it.py").write_text(text)


def test_test_runs_every_suite_and_counts_what_failed(clone: Path) -> None:
    suite(clone, "unit", "def test_a(): pass\ndef test_b(): assert 0\n")
    suite(clone, "launcher", "import pytest\n@pytest.mark.full\ndef test_a(): pass\ndef test_b(): pass\n")
    done = setup(clone, "test", "unit", "engine", "launcher")
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[-1].startswith("2 passed, 1 failed, 0 skipped in")
    assert any(line.startswith("unit") and "FAILED" in line for line in lines)
    assert any(line.startswith("engine") and "no tests" in line for line in lines)
    done = setup(clone, "test", "--full", "launcher")
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1].startswith("2 passed, 0 failed")


def test_a_suite_that_cannot_be_collected_fails(clone: Path) -> None:
    suite(clone, "unit", "import nothing_of_that_name\n")
    done = setup(clone, "test", "unit")
    assert done.returncode == 1
    assert ", 1 failed" in done.stdout.splitlines()[-1]


def test_an_unknown_suite_is_refused_before_anything_is_installed(clone: Path) -> None:
    done = setup(clone, "test", "units")
    assert done.returncode == 1
    assert "unknown test suite 'units'" in done.stderr
    assert installations(clone) == 0
