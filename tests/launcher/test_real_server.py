"""./start.sh without docker, with the real vLLM and the real plugin on this CPU: what the stand-in only pretends."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_verify.cpu import PLUGIN_PATH
from dflash_verify.cpu.models import generate

from .conftest import until
from .test_dry_run import checkout

PORT = 18474
START_S = 400


@pytest.fixture
def clone(tmp_path: Path) -> Iterator[Path]:
    models = generate(tmp_path / "models")
    # The CPU engine of the demo, for a `vllm` that the launcher knows nothing special about.
    vllm = tmp_path / "vllm"
    vllm.write_text(
        f'#!/bin/sh\nexport DFLASH_CPU=1 PYTHONPATH="${{PYTHONPATH:+$PYTHONPATH:}}{PLUGIN_PATH}"\n'
        f'exec {shlex.quote(str(Path(sys.executable).parent / "vllm"))} "$@"\n'
    )
    vllm.chmod(0o755)
    extra = (
        "--dtype float32 --enforce-eager --max-num-batched-tokens 512 --block-size 16 --kv-cache-memory-bytes 16777216 "
        "--no-enable-prefix-caching --seed 0"
    )
    settings = {
        "NODES": "1",
        "RUNTIME": "host",
        "VLLM_BIN": str(vllm),
        "MODEL": str(models.target),
        "SERVED_MODEL_NAME": "tiny",
        "DRAFT_MODEL": str(models.drafter("dflash2")),
        "MAX_NUM_SEQS": "2",
        "MAX_MODEL_LEN": "1024",
        "PORT": str(PORT),
        "START_TIMEOUT_S": str(START_S),
        "EXTRA_ARGS": extra,
    }
    folder = checkout(tmp_path / "clone", "".join(f"{name}='{value}'\n" for name, value in settings.items()))
    try:
        yield folder
    finally:
        launch(folder, "stop")


def launch(folder: Path, *words: str, **inline: str) -> tuple[int, str]:
    environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(folder.parent)} | inline
    done = subprocess.run(
        [str(folder / "start.sh"), *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=START_S + 120,
    )
    return done.returncode, done.stdout


def engines(folder: Path) -> list[str]:
    """Processes of the server that run anywhere: those that have this test's home."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if f"HOME={folder.parent}\0".encode() in (path / "environ").read_bytes():
                found.append((path / "cmdline").read_text(errors="replace").replace("\0", " "))
        except OSError:
            continue
    return found


def test_a_policy_serves_is_switched_through_every_width_and_leaves_no_engine(clone: Path) -> None:
    code, out = launch(clone, "start", DFLASH_VERIFY_TOKENS="auto:3,7")
    assert code == 0, out + launch(clone, "logs")[1][-4000:]
    ready = re.search(r"READY http://127\.0\.0\.1:\d+  tiny  widths 3, 7, plan digest ([0-9a-f]{12})", out)
    assert ready, out
    assert "had no reason to use" not in out
    code, out = launch(clone, "status")
    assert code == 0, out
    assert f"plan {ready[1]}" in out
    code, log = launch(clone, "logs")
    assert code == 0
    assert "control file" in log
    assert len(engines(clone)) > 1
    assert launch(clone, "stop")[0] == 0
    until(lambda: not engines(clone))
