"""docker/: linted, and true to what it stands beside."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from .conftest import ROOT

sys.path.insert(0, str(ROOT))

from launcher.settings import DEFAULTS

DOCKER = ROOT / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
SHELL = [
    "start.sh",
    ".ci/run",
    "launcher/environment.sh",
    "launcher/suites.sh",
    "docker/entrypoint.sh",
    "bench/gpu/series.sh",
]


def tool(name: str) -> str:
    found = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert found, f"{name} is missing: pip install -e '.[test]'"
    return found


def clean(*command: str) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_every_shell_script_is_in_the_list() -> None:
    tracked = [
        path
        for folder in ("launcher", "docker", ".ci", "bench")
        for path in (ROOT / folder).rglob("*")
        if path.is_file()
    ]
    scripts = {p for p in tracked if p.suffix == ".sh" or p.read_bytes()[:2] == b"#!"} | {ROOT / "start.sh"}
    assert scripts == {ROOT / name for name in SHELL}


@pytest.mark.parametrize("script", SHELL)
def test_shell_scripts_are_clean(script: str) -> None:
    clean(tool("shellcheck"), "--external-sources", script)
    clean(tool("shfmt"), "--diff", "--indent", "2", script)


def test_the_dockerfile_is_clean() -> None:
    clean(tool("hadolint"), "--no-color", "docker/Dockerfile")


def test_the_image_runs_as_a_user_and_installs_nothing_into_the_base() -> None:
    stages = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]
    assert stages[-1].startswith("${BASE_IMAGE}\n")
    assert "pip" not in re.sub(r"#.*", "", stages[-1])
    assert "dflash_verify.cli check" in stages[-1]
    assert re.findall(r"^USER (\S+)", stages[-1], re.MULTILINE)[-1] not in ("0", "root")
    assert "HEALTHCHECK" in stages[-1]


def test_the_build_context_is_what_the_dockerfile_copies() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = set()
    for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.MULTILINE):
        copied |= {word.rstrip("/") for word in line.split()[:-1] if not word.startswith("--")}
    assert allowed == copied
    assert all((ROOT / name).exists() for name in copied)
    assert "*" in (ROOT / ".dockerignore").read_text().splitlines()


def test_compose_uses_the_launchers_settings() -> None:
    text = (DOCKER / "compose.yaml").read_text()
    asked = dict(re.findall(r"\$\{(\w+)(?::-([^}]*))?", text))
    assert set(asked) <= set(DEFAULTS)
    different = {name for name, default in asked.items() if default and default != DEFAULTS[name]}
    assert different == {"TP_SIZE"}  # empty there means one rank per host
    service = yaml.safe_load(text)["services"]["vllm"]
    assert service["build"]["dockerfile"] == "docker/Dockerfile"
    mounts = [volume for s in yaml.safe_load(text)["services"].values() for volume in s["volumes"]]
    for source in [mount.split(":")[0] for mount in mounts if mount.startswith("./")]:
        assert (DOCKER / source).is_file()


def test_the_dashboard_asks_for_series_that_exist() -> None:
    text = (DOCKER / "grafana" / "dashboard.json").read_text()
    board = json.loads(text)
    expressions = " ".join(target["expr"] for panel in board["panels"] for target in panel["targets"])
    ours = set(re.findall(r"dflash_verify_\w+", expressions))
    source = (ROOT / "src" / "dflash_verify" / "metrics.py").read_text()
    assert {name.removesuffix("_total") for name in ours} <= set(re.findall(r'"(dflash_verify_\w+)"', source))
    theirs = set(re.findall(r"vllm:\w+", expressions))
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "v1"
    vllm_source = "".join((folder / name).read_text() for name in ("metrics/loggers.py", "spec_decode/metrics.py"))
    for name in theirs:
        assert f'"{re.sub("_(total|bucket)$", "", name)}"' in vllm_source, name


def test_the_panels_do_not_overlap() -> None:
    board = json.loads((DOCKER / "grafana" / "dashboard.json").read_text())
    cells = [
        (x, y)
        for panel in board["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


@pytest.mark.parametrize(
    ("variables", "check_code", "served"),
    [
        ({}, 1, True),
        ({"DFLASH_VERIFY_TOKENS": ""}, 1, True),
        ({"DFLASH_VERIFY_TOKENS": "0", "DFLASH_BLOCK_VERIFY": "0"}, 1, True),
        ({"DFLASH_VERIFY_TOKENS": "3"}, 1, False),
        ({"DFLASH_VERIFY_TOKENS": "auto"}, 1, False),
        ({"DFLASH_BLOCK_VERIFY": "1"}, 1, False),
        ({"DFLASH_VERIFY_TOKENS": "auto"}, 0, True),
    ],
)
def test_the_start_gate_stops_a_width_that_does_not_fit_and_leaves_stock_alone(
    tmp_path: Path, variables: dict[str, str], check_code: int, served: bool
) -> None:
    for name, text in {
        "python3": f'echo "$@" >>"{tmp_path}/checked"; echo drifted; exit {check_code}',
        "vllm": 'printf "%s|" "$@"',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        [str(DOCKER / "entrypoint.sh"), "a model", "--x", "$y"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"} | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == (0 if served else 1)
    assert done.stdout == ("serve|a model|--x|$y|" if served else "")
    assert ("drifted" in done.stderr) == (not served)
    active = variables.get("DFLASH_VERIFY_TOKENS", "") not in ("", "0") or variables.get("DFLASH_BLOCK_VERIFY") == "1"
    assert (tmp_path / "checked").exists() == active


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_the_health_check_says_what_the_server_says(status: int, code: int) -> None:
    class Api(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return None

    with HTTPServer(("127.0.0.1", 0), Api) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/health"
        done = subprocess.run(
            [sys.executable, str(DOCKER / "healthcheck.py")],
            env=os.environ | {"HEALTH_URL": url, "http_proxy": "http://127.0.0.1:9"},
            check=False,
            capture_output=True,
        )
        server.shutdown()
    assert done.returncode == code
