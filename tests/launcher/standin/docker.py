"""Stands in for `docker` on PATH: records every call, and runs a small process that answers like the container.

$STANDIN is one host's folder: calls.jsonl, image-id, behaviour.json (what to do wrong), containers/NAME.json and .log.
A container is a session of its own; ending it ends the whole session, as a container's PID namespace would.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(os.environ["STANDIN"])
PYTHON = os.environ["STANDIN_PYTHON"]
MOUNT = "/opt/dflash-verify"
POLL_S = 0.05
VALUED = {
    "--name", "--label", "--restart", "--stop-timeout", "--gpus", "--network", "--ipc", "--ulimit", "--device",
    "--cap-add", "--volume", "--env", "--entrypoint", "--pull",
}  # fmt: skip


def behaviour() -> dict[str, str]:
    path = HERE / "behaviour.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def record(name: str) -> Path:
    return HERE / "containers" / f"{name}.json"


def load(name: str) -> dict[str, object]:
    try:
        return dict(json.loads(record(name).read_text()))
    except FileNotFoundError:
        sys.exit(f"Error response from daemon: No such container: {name}")


def save(name: str, data: dict[str, object]) -> None:
    part = record(name).with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(data))
    part.replace(record(name))


def parse_run(words: list[str]) -> tuple[dict[str, list[str]], str, list[str]]:
    """Options, image, arguments of `docker run`."""
    options: dict[str, list[str]] = {}
    index = 0
    while words[index].startswith("-"):
        word = words[index]
        if word in VALUED:
            options.setdefault(word, []).append(words[index + 1])
            index += 1
        else:
            options.setdefault(word, [])
        index += 1
    return options, words[index], words[index + 1 :]


def environment(options: dict[str, list[str]]) -> dict[str, str]:
    """What the container sees: only what it was given. `--env NAME` takes the value from docker's own environment."""
    result = {name: os.environ[name] for name in ("PATH", "HOME", "STANDIN", "STANDIN_PYTHON")}
    for text in options.get("--env", []):
        name, equals, value = text.partition("=")
        if equals:
            result[name] = on_host(options, value)
        elif name in os.environ:
            result[name] = os.environ[name]
    return result


def on_host(options: dict[str, list[str]], path: str) -> str:
    """A path in the container, where it lies on this host."""
    for volume in options.get("--volume", []):
        source, target = volume.split(":")[:2]
        if path.startswith(f"{target}/"):
            return source + path.removeprefix(target)
    return path


def inside(options: dict[str, list[str]], arguments: list[str]) -> list[str]:
    """The container's process, with the plugin's mount where it lies on this host."""
    command = [*options["--entrypoint"], *arguments]
    for volume in options.get("--volume", []):
        source, target = volume.split(":")[:2]
        if target == MOUNT:
            command = [word.replace(MOUNT, source) for word in command]
    return command


def run(words: list[str]) -> int:
    options, image, arguments = parse_run(words)
    if not (HERE / "image-id").exists():
        sys.exit(f"docker: Error response from daemon: No such image: {image}")
    canned = json.loads((HERE / "canned.json").read_text()) if (HERE / "canned.json").exists() else {}
    if "--detach" not in options and "--json" in arguments:
        for command in set(canned) & set(arguments):
            print(json.dumps(canned[command]))
            return 0
    if "--detach" not in options:
        return subprocess.run(inside(options, arguments), env=environment(options), check=False).returncode
    if message := behaviour().get("run_fails"):
        sys.exit(f"docker: Error response from daemon: {message}")
    name = options["--name"][0]
    if record(name).exists():
        sys.exit(f'docker: Error response from daemon: Conflict. The container name "/{name}" is already in use.')
    with open(HERE / "containers" / f"{name}.log", "w") as log:
        child = subprocess.Popen(
            [
                PYTHON,
                __file__,
                "supervise",
                name,
                json.dumps(inside(options, arguments)),
                json.dumps(environment(options)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    labels = dict(label.split("=", 1) for label in options.get("--label", []))
    save(name, {"pid": child.pid, "labels": labels, "exit": None, "restarts": 0})
    print(f"{child.pid:064x}")
    return 0


def supervise(name: str, command: str, variables: str) -> int:
    """PID 1 of the container: passes SIGTERM on, writes the exit code down, ends what is left of the session."""
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    child = subprocess.Popen(json.loads(command), env=json.loads(variables))
    code = child.wait()
    with contextlib.suppress(SystemExit):
        save(name, load(name) | {"exit": code if code >= 0 else 128 - code})
    os.killpg(os.getpid(), signal.SIGKILL)
    return code


def alive(data: dict[str, object]) -> bool:
    try:
        state = Path(f"/proc/{data['pid']}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX" and data["exit"] is None


def end(name: str, patience_s: float) -> None:
    data = load(name)
    if not alive(data):
        return
    pid = int(str(data["pid"]))
    if patience_s:
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + patience_s
    while alive(load(name)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    data = load(name)
    save(name, data | {"exit": 137 if data["exit"] is None else data["exit"]})


def inspect(form: str, name: str) -> str:
    data = load(name)
    running = alive(data)
    labels = dict(data["labels"])  # type: ignore[call-overload]
    form = re.sub(r'{{index \.Config\.Labels "([^"]+)"}}', lambda match: str(labels.get(match[1], "")), form)
    for field, value in {
        "{{.State.Status}}": "running" if running else "exited",
        "{{.State.Running}}": str(running).lower(),
        "{{.RestartCount}}": str(data["restarts"]),
    }.items():
        form = form.replace(field, value)
    assert "{{" not in form, form
    return form


def main(words: list[str]) -> int:
    if words[0] == "supervise":
        return supervise(*words[1:])
    with open(HERE / "calls.jsonl", "a") as calls:
        calls.write(json.dumps({"argv": words, "hf_token": os.environ.get("HF_TOKEN")}) + "\n")
    if "down" in behaviour():
        sys.exit("Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?")
    match words:
        case ["version", *_]:
            print("28.0.0")
        case ["image", "inspect", "--format", _, _]:
            if not (HERE / "image-id").exists():
                return 1
            print((HERE / "image-id").read_text())
        case ["pull", *_]:
            (HERE / "image-id").write_text("sha256:" + "5" * 64)
        case ["run", *rest]:
            return run(rest)
        case ["wait", name]:
            while alive(load(name)):
                time.sleep(POLL_S)
            print(load(name)["exit"])
        case ["inspect", *rest]:
            print(inspect(rest[rest.index("--format") + 1], rest[-1]))
        case ["logs", *rest]:
            load(rest[-1])
            lines = (HERE / "containers" / f"{rest[-1]}.log").read_text(errors="replace").splitlines(keepends=True)
            tail = int(rest[rest.index("--tail") + 1]) if "--tail" in rest else len(lines)
            sys.stdout.write("".join(lines[-tail:]))
        case ["stop", "-t", patience, name]:
            end(name, float(patience))
        case ["rm", "--force", "--volumes", name]:
            end(name, 0)
            record(name).unlink()
        case ["ps", *rest]:
            wanted = re.compile(rest[rest.index("--filter") + 1].removeprefix("name=")) if "--filter" in rest else None
            for path in (HERE / "containers").glob("*.json"):
                if wanted is None or wanted.search(f"/{path.stem}"):
                    print(path.stem)
        case _:
            sys.exit(f"the docker stand-in does not know: {words}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
