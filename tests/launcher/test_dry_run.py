"""`--dry-run` prints the exact commands; goldens/ holds them. `UPDATE_GOLDENS=1 pytest tests/launcher` writes them anew."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import ROOT

GOLDENS = Path(__file__).parent / "goldens"
# What a change of the plugin's source or version moves, and what another user's home moves.
VARYING = [
    (r"plugin-[0-9a-f]{12}", "plugin-CONTENT"),
    (r"\(\d+ files\)", "(N files)"),
    (r"(launcher\.config=|\.cache/vllm-)[0-9a-f]{12}", r"\1CONFIG"),
    (r'" -f20\) [0-9a-f]{12}"', '" -f20) CONFIG"'),
    (r"\S*/vllm-launcher/", "STATE/"),
]
SPARK = {
    "HEAD_IFACE": "enp1s0f1np1",
    "WORKER_IFACE": "enp1s0f0np0",
    "HEAD_RDMA": "rocep1s0f1:3,roceP2p1s0f1:3",
    "WORKER_RDMA": "rocep1s0f0:5",
    "HF_TOKEN": "hf_secret",
    "EXTRA_ARGS": "--enable-auto-tool-choice --tool-call-parser glm47 --api-key sk-secret",
}


def checkout(folder: Path, env: str | None = None) -> Path:
    """A fresh clone as far as start.sh can see."""
    folder.mkdir()
    shutil.copy(ROOT / "start.sh", folder)
    for name in ("launcher", "src", "overlays", "pyproject.toml", ".env.example"):
        (folder / name).symlink_to(ROOT / name)
    if env is not None:
        (folder / ".env").write_text(env)
    return folder


def launch(folder: Path, *words: str, **inline: str) -> "subprocess.CompletedProcess[str]":
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder.parent)} | inline
    return subprocess.run(
        [str(folder / "start.sh"), *words], env=environment, capture_output=True, text=True, check=False, timeout=60
    )


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if "__pycache__" not in path.parts)


def dry_run(tmp_path: Path, **inline: str) -> str:
    done = launch(checkout(tmp_path / "clone"), "--dry-run", **inline)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("name", "inline"),
    [
        ("two-hosts-stock", SPARK),
        ("two-hosts-auto", SPARK | {"DFLASH_VERIFY_TOKENS": "auto", "DRAFT_TP": "1", "DRAFT_REVISION": "abc"}),
        ("one-host-width-3", {"NODES": "1", "TP_SIZE": "4", "DFLASH_VERIFY_TOKENS": "3", "RESTARTS": "2"}),
        ("one-host-without-docker", {"NODES": "1", "RUNTIME": "host", "DFLASH_VERIFY_TOKENS": "3"}),
        ("ray", {"NODES": "1", "EXECUTOR": "ray", "TP_SIZE": "8", "DFLASH_VERIFY_TOKENS": "auto"}),
    ],
)
def test_the_commands_are_the_golden_ones(tmp_path: Path, name: str, inline: dict[str, str]) -> None:
    text = dry_run(tmp_path, **inline)
    for pattern, replacement in VARYING:
        text = re.sub(pattern, replacement, text)
    golden = GOLDENS / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDENS"):
        golden.write_text(text)
    assert text == golden.read_text()


def test_width_zero_unset_and_empty_are_the_same_bytes_without_a_trace_of_the_plugin(tmp_path: Path) -> None:
    texts = {
        launch(checkout(tmp_path / str(number)), "--dry-run", **inline).stdout
        for number, inline in enumerate([{}, {"DFLASH_VERIFY_TOKENS": "0"}, {"DFLASH_VERIFY_TOKENS": ""}])
    }
    assert len(texts) == 1
    for text in (texts.pop(), (GOLDENS / "two-hosts-stock.txt").read_text()):
        assert not re.search(r"DFLASH_|dflash[-_]verify|PYTHONPATH", text)


def test_both_ranks_get_the_width_that_is_asked_for(tmp_path: Path) -> None:
    head, worker = dry_run(tmp_path, DFLASH_VERIFY_TOKENS="auto").split("# worker")
    assert head.count("DFLASH_VERIFY_TOKENS=auto") == worker.count("DFLASH_VERIFY_TOKENS=auto") == 1


def test_ranks_differ_in_name_rank_and_network_only(tmp_path: Path) -> None:
    head, worker = dry_run(tmp_path, DFLASH_VERIFY_TOKENS="auto", HEAD_IFACE="a0", WORKER_IFACE="b0").split("# worker")
    lines = [{line.rstrip(" \\") for line in text.splitlines() if line.startswith("  --")} for text in (head, worker)]
    assert {line.split("=")[0] for line in lines[0] ^ lines[1]} == {
        "  --name vllm-head",
        "  --name vllm-worker",
        "  --env VLLM_HOST_IP",
        "  --env NCCL_SOCKET_IFNAME",
        "  --env GLOO_SOCKET_IFNAME",
        "  --env TP_SOCKET_IFNAME",
        "  --node-rank 0",
        "  --node-rank 1",
        "  --headless",
    }


def test_secrets_are_masked(tmp_path: Path) -> None:
    text = dry_run(tmp_path, **SPARK)
    assert "hf_secret" not in text
    assert "sk-secret" not in text
    assert "export HF_TOKEN=****" in text


def test_a_dry_run_creates_nothing(tmp_path: Path) -> None:
    folder = checkout(tmp_path / "clone")
    before = tree(tmp_path)
    for words in (["--dry-run"], ["stop", "--dry-run"], ["restart", "--dry-run"], ["check", "--dry-run"]):
        assert launch(folder, *words, DFLASH_VERIFY_TOKENS="3").returncode == 0
    assert tree(tmp_path) == before


def test_a_width_that_is_none_is_one_sentence_and_creates_nothing(tmp_path: Path) -> None:
    folder = checkout(tmp_path / "clone")
    before = tree(tmp_path)
    done = launch(folder, "--dry-run", DFLASH_VERIFY_TOKENS="3; touch pwned")
    assert done.returncode != 0
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "'3; touch pwned' is not a width" in done.stderr
    assert tree(tmp_path) == before


def test_profile_restarts_a_policy_with_time_to_measure_on_both_ranks(tmp_path: Path) -> None:
    folder = checkout(tmp_path / "clone")
    done = launch(folder, "profile", "--dry-run", DFLASH_VERIFY_TOKENS="auto")
    assert done.stdout.count("DFLASH_PROFILE_SECONDS=600") == 2
    # Measured once; the same server afterwards, without the time to measure, is not another configuration.
    labels = set(
        re.findall(
            r"launcher\.config=\w+", done.stdout + launch(folder, "--dry-run", DFLASH_VERIFY_TOKENS="auto").stdout
        )
    )
    assert len(labels) == 1
    refused = launch(folder, "profile", "--dry-run", DFLASH_VERIFY_TOKENS="3")
    assert refused.returncode == 1
    assert "set it to auto" in refused.stderr


def test_bench_asks_the_server_of_the_settings_and_hides_its_key(tmp_path: Path) -> None:
    inline = {"PORT": "8123", "LISTEN": "10.0.0.1", "SERVED_MODEL_NAME": "m", "VLLM_API_KEY": "sk-secret"}
    done = launch(checkout(tmp_path / "clone"), "bench", "--repeats", "3", "--dry-run", **inline)
    assert done.stdout.splitlines()[-1] == "dflash-verify bench --url http://10.0.0.1:8123 --model m --repeats 3"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["strat"], "unknown command 'strat'"),
        (["start", "--dryrun"], "--dry-run"),
        (["logs", "wrker"], "head worker"),
        (["setup", "--dry-run"], "setup does not know '--dry-run'"),
        (["setup", "--foo"], "setup does not know '--foo'"),
        (["demo", "--dry-run"], "demo does not know '--dry-run'"),
        (["watch-ranks", "--dry-run"], "watch-ranks does not know '--dry-run'"),
        (["--dry-run", "strat"], "unknown command 'strat'"),
    ],
)
def test_a_word_that_is_not_known_is_named(tmp_path: Path, words: list[str], said: str) -> None:
    done = launch(checkout(tmp_path / "clone"), *words)
    assert done.returncode == 1
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_dry_run_of_status_and_logs_prints_what_they_would_ask_and_asks_nothing(tmp_path: Path) -> None:
    folder = checkout(tmp_path / "clone", "WORKER_HOST=user@nowhere.invalid\n")
    before = tree(tmp_path)
    status = launch(folder, "status", "--dry-run")
    assert status.returncode == 0
    head, worker = status.stdout.split("# worker (user@nowhere.invalid)")
    assert "docker inspect" in head
    assert "vllm-worker" in worker
    assert "health" not in status.stdout
    logs = launch(folder, "logs", "worker", "-f", "--dry-run")
    assert logs.returncode == 0
    assert logs.stdout.splitlines()[0] == "# worker (user@nowhere.invalid)"
    assert "docker logs --follow --tail 200 vllm-worker" in logs.stdout
    assert tree(tmp_path) == before


def test_the_option_may_come_before_the_command(tmp_path: Path) -> None:
    folder = checkout(tmp_path / "clone")
    first, last = (launch(folder, *words) for words in (("--dry-run", "stop"), ("stop", "--dry-run")))
    assert first.returncode == 0
    assert "docker stop" in first.stdout
    assert first.stdout == last.stdout


def test_start_sh_works_through_a_symbolic_link(tmp_path: Path) -> None:
    folder = checkout(tmp_path / "clone", "MODEL=from/the-clone\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "serve").symlink_to("../clone/start.sh")
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    done = subprocess.run(
        [str(tmp_path / "bin" / "serve"), "--dry-run"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "serve from/the-clone" in done.stdout
    assert done.stdout == launch(folder, "--dry-run").stdout


def test_a_misspelt_variable_is_one_sentence_before_anything_is_printed(tmp_path: Path) -> None:
    done = launch(checkout(tmp_path / "clone"), "--dry-run", NODES="1", DFLASH_VERFY_TOKENS="3")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "did you mean DFLASH_VERIFY_TOKENS?" in done.stderr


def test_plan_without_docker_runs_in_the_python_of_the_servers_vllm(tmp_path: Path) -> None:
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    # A host's own Python has no packages.
    bare = getattr(sys, "_base_executable", sys.executable)
    programs = {
        "python3": f'exec "{bare}" "$@"',
        "python": 'echo "planned by the python of vllm: $*"',
        "vllm": "exit 1",
        "docker": "exit 1",
    }
    for name, text in programs.items():
        (bin_ / name).write_text(f"#!/bin/sh\n{text}\n")
        (bin_ / name).chmod(0o755)
    inline = {"NODES": "1", "RUNTIME": "host", "DFLASH_VERIFY_TOKENS": "3", "PATH": f"{bin_}:/usr/bin:/bin"}
    done = launch(checkout(tmp_path / "clone"), "plan", **inline)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("planned by the python of vllm: -m dflash_verify.cli plan --verify-tokens 3")


def test_usage_says_what_plan_needs(tmp_path: Path) -> None:
    said = launch(checkout(tmp_path / "clone"), "help").stdout
    assert re.search(r"plan .*\n? .*\.venv.*docker and the image", said)


def test_the_first_start_makes_a_private_settings_file(tmp_path: Path) -> None:
    folder = checkout(tmp_path / "clone")
    assert launch(folder, "start", HEAD_ADDR="not an address").returncode == 1
    assert not (folder / ".env").exists()  # nothing happens before everything is valid
    done = launch(folder, "start", NODES="1", RUNTIME="host", VLLM_BIN="/nowhere/vllm")
    assert done.returncode == 1
    assert "/nowhere/vllm" in done.stderr
    assert (folder / ".env").read_text() == (ROOT / ".env.example").read_text()
    assert (folder / ".env").stat().st_mode & 0o777 == 0o600
