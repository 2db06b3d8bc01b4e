"""Settings -> the exact commands of every host. Pure: `--dry-run` prints what `start` runs, and tests compare it.

Without a width nothing here mentions the plugin: no mount, no variable, the image's own entry point words. With one, both
ranks get the same mount and the same variables; what differs between ranks is the name, the rank and the network.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.bundle import COSTS, MOUNT, Bundle
from launcher.settings import HostSettings, Settings
from launcher.state import folder

MASK = "****"
STOP_S = 12  # SIGTERM to SIGKILL in `docker stop`; the whole of `stop` has 30 s
WORKER_SHUTDOWN_S = 5  # of these, what vLLM gives its worker processes
CONFIG_LABEL = "launcher.config"
COSTS_MOUNT = "/cache/costs"
CONTROL_FILE = "control.json"


@dataclass(frozen=True)
class Word:
    """One word of a command. home: begins with $HOME, which the host's shell fills in."""

    text: str
    home: bool = False

    def quoted(self) -> str:
        if not self.home:
            return shlex.quote(self.text)
        rest = self.text.removeprefix("$HOME")
        return '"$HOME"' + (shlex.quote(rest) if rest else "")


@dataclass(frozen=True)
class Rank:
    """One container (or, without docker, one process): a host and what runs there."""

    host: HostSettings
    container: str
    config: str  # hash of everything that the ranks must agree on
    words: tuple[Word, ...]
    secrets: tuple[tuple[str, str], ...]

    def command(self, *, shown: bool = False) -> str:
        """Shell text that starts it; `shown` masks secrets and breaks the line before every option."""
        exports = [f"export {name}={MASK if shown else shlex.quote(value)}" for name, value in self.secrets]
        words = _masked(self.words) if shown else self.words
        line = words[0].quoted()
        for word in words[1:]:
            line += (" \\\n  " if shown and word.text.startswith("-") and not word.home else " ") + word.quoted()
        return "\n".join([*exports, line])


def _masked(words: Sequence[Word]) -> list[Word]:
    """The words with the value of --api-key, in either spelling, hidden."""
    result: list[Word] = []
    for word in words:
        if result and result[-1].text == "--api-key":
            result.append(Word(MASK))
        elif word.text.startswith("--api-key="):
            result.append(Word(f"--api-key={MASK}"))
        else:
            result.append(word)
    return result


def vllm_arguments(settings: Settings) -> list[str]:
    """`serve MODEL ...`, the same on every rank."""
    s = settings
    arguments = ["serve", s["MODEL"]]
    if s["MODEL_REVISION"]:
        arguments += ["--revision", s["MODEL_REVISION"]]
    if s["SERVED_MODEL_NAME"]:
        arguments += ["--served-model-name", s["SERVED_MODEL_NAME"]]
    arguments += ["--host", s["LISTEN"], "--port", str(s.port)]
    arguments += ["--tensor-parallel-size", str(s.tp_size)]
    arguments += ["--max-num-seqs", str(s.max_num_seqs)]
    if s["MAX_MODEL_LEN"]:
        arguments += ["--max-model-len", s["MAX_MODEL_LEN"]]
    arguments += ["--kv-cache-dtype", s["KV_CACHE_DTYPE"]]
    arguments += ["--gpu-memory-utilization", s["GPU_MEMORY_UTILIZATION"]]
    if s["DRAFT_MODEL"]:
        speculation: dict[str, object] = {
            "method": s["DRAFT_METHOD"],
            "model": s["DRAFT_MODEL"],
            "num_speculative_tokens": s.draft_tokens,
        }
        if s["DRAFT_REVISION"]:
            speculation["revision"] = s["DRAFT_REVISION"]
        if s["DRAFT_TP"]:
            speculation["draft_tensor_parallel_size"] = int(s["DRAFT_TP"])
        arguments += ["--speculative-config", json.dumps(speculation)]
    if s["EXECUTOR"] == "ray":
        arguments += ["--distributed-executor-backend", "ray"]
    return [*arguments, *s.extra_args]


def node_arguments(settings: Settings, host: HostSettings) -> list[str]:
    """vLLM's own multi-node engine: rank 0 serves, the others run headless."""
    if len(settings.hosts) == 1:
        return []
    head = settings.hosts[0]
    nodes = ["--nnodes", str(len(settings.hosts)), "--node-rank", str(host.rank)]
    nodes += ["--master-addr", head.addr, "--master-port", str(settings.master_port)]
    return nodes if host.rank == 0 else [*nodes, "--headless"]


def environment(settings: Settings, host: HostSettings) -> dict[str, str]:
    """Variables of one rank, secrets apart."""
    result = {"VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": str(WORKER_SHUTDOWN_S)}
    if len(settings.hosts) > 1:
        result["VLLM_HOST_IP"] = host.addr
    if host.iface:
        result |= {"NCCL_SOCKET_IFNAME": host.iface, "GLOO_SOCKET_IFNAME": host.iface, "TP_SOCKET_IFNAME": host.iface}
    if host.rdma is not None:
        # "=": exactly these names; without it NCCL takes a prefix, and rocep1s0f1 would also mean rocep1s0f10.
        result |= {"NCCL_IB_HCA": "=" + ",".join(host.rdma)} if host.rdma else {"NCCL_IB_DISABLE": "1"}
    if host.gid is not None:
        result["NCCL_IB_GID_INDEX"] = str(host.gid)
    if settings["EXECUTOR"] == "ray" and settings.plugin_active:
        # Ray copies only names that it knows; the plugin itself must be installed in the cluster's image.
        result["VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"] = "DFLASH_"
    result |= {name: value for name, value in settings.passed_on.items() if name not in settings.secrets}
    return result | dict(settings.plugin_environment)


def config_digest(settings: Settings, bundle: Bundle | None) -> str:
    """12 hex digits over all that a running server was started with; secrets are not part of it."""
    # Measuring at the start changes nothing of what is served afterwards.
    variables = [
        {n: v for n, v in environment(settings, h).items() if n != "DFLASH_PROFILE_SECONDS"} for h in settings.hosts
    ]
    everything = [
        [settings["RUNTIME"], settings["BASE_IMAGE"], settings["VLLM_BIN"], settings["HF_CACHE"]],
        vllm_arguments(settings),
        [[node_arguments(settings, host), host.ssh] for host in settings.hosts],
        variables,
        bundle.digest if bundle else "",
    ]
    return hashlib.sha256(json.dumps(everything).encode()).hexdigest()[:12]


def make(settings: Settings, bundle: Bundle | None) -> list[Rank]:
    """Every rank in order, the head first. bundle: the plugin, None for stock."""
    config = config_digest(settings, bundle)
    words = _process if settings["RUNTIME"] == "host" else _docker
    return [
        Rank(
            host=host,
            container=container_name(settings["SERVER_NAME"], host.role),
            config=config,
            words=tuple(words(settings, host, bundle, config)),
            secrets=tuple(sorted(settings.secrets.items())),
        )
        for host in settings.hosts
    ]


def container_name(prefix: str, role: str) -> str:
    return f"{prefix}-{role}"


def _docker(settings: Settings, host: HostSettings, bundle: Bundle | None, config: str) -> list[Word]:
    restart = f"on-failure:{settings.restarts}" if settings.restarts else "no"
    words = _words("docker", "run", "--detach", "--pull", "never")
    words += _words("--name", container_name(settings["SERVER_NAME"], host.role))
    words += _words("--label", f"{CONFIG_LABEL}={config}")
    # An init process as PID 1: whatever vLLM leaves behind ends with the container.
    words += _words("--init", "--restart", restart, "--stop-timeout", str(STOP_S))
    words += _words("--gpus", "all", "--network", "host", "--ipc", "host")
    words += _words("--ulimit", "memlock=-1", "--ulimit", "stack=67108864")
    if host.rdma:
        words += _words("--device", "/dev/infiniband", "--cap-add", "IPC_LOCK")
    words += [
        *_words("--volume"),
        _under_home(settings["HF_CACHE"] or "$HOME/.cache/huggingface", ":/cache/huggingface"),
    ]
    words += _words("--env", "HF_HOME=/cache/huggingface")
    # One compile cache per configuration: vLLM's key leaves out the draft width (vllm-project/vllm#53366).
    words += [*_words("--volume"), Word(f"$HOME/.cache/vllm-{config}:/cache/vllm", home=True)]
    words += _words("--env", "VLLM_CACHE_ROOT=/cache/vllm")
    for name in sorted(settings.secrets):
        words += _words("--env", name)  # the value comes from docker's own environment
    for name, value in sorted(environment(settings, host).items()):
        words += _words("--env", f"{name}={value}")
    arguments = [*vllm_arguments(settings), *node_arguments(settings, host)]
    if bundle is None:
        return words + _words("--entrypoint", "vllm", settings["BASE_IMAGE"], *arguments)
    words += [*_words("--volume"), Word(f"{bundle.folder}:{MOUNT}:ro", home=True)]
    # Measured cost tables outlive the container.
    words += [*_words("--volume"), Word(f"{COSTS}:{COSTS_MOUNT}", home=True)]
    if switchable(settings):
        words += _words("--env", f"DFLASH_CONTROL_FILE={COSTS_MOUNT}/{CONTROL_FILE}")
    if "DFLASH_CACHE_DIR" not in settings.plugin_environment:
        words += _words("--env", f"DFLASH_CACHE_DIR={COSTS_MOUNT}")
    words += _words("--entrypoint", "sh", settings["BASE_IMAGE"])
    return words + _words(*plugin_entry("vllm"), *arguments)


def switchable(settings: Settings) -> bool:
    """Whether the width can be switched while serving: the warm-up does, to reach every captured width, and so does
    `dflash-verify bracket`. Only with more than one width, and unless the operator has a control file."""
    return settings.widths_asked.startswith("auto") and "DFLASH_CONTROL_FILE" not in settings.plugin_environment


def control_file(settings: Settings) -> str:
    """Where that file lies on the head, for a shell in double quotes."""
    return f"{folder()}/{CONTROL_FILE}" if settings["RUNTIME"] == "host" else f"{COSTS}/{CONTROL_FILE}"


def _process(settings: Settings, host: HostSettings, bundle: Bundle | None, config: str) -> list[Word]:
    """Without docker: a session of its own, so that `stop` finds every child."""
    variables = environment(settings, host)
    if settings["HF_CACHE"]:
        variables["HF_HOME"] = str(Path(settings["HF_CACHE"].replace("$HOME/", "~/", 1)).expanduser())
    if switchable(settings):
        variables["DFLASH_CONTROL_FILE"] = control_file(settings)
    words = _words("setsid")
    if bundle is not None:
        # Before what the operator has on Python's path; nothing is installed.
        words += _words("sh", "-c", f'PYTHONPATH="{bundle.folder}${{PYTHONPATH:+:$PYTHONPATH}}" exec "$@"', "sh")
    words += _words("env", *(f"{name}={value}" for name, value in sorted(variables.items())))
    return words + _words(vllm_program(settings), *vllm_arguments(settings))


def vllm_program(settings: Settings) -> str:
    """The `vllm` of a server without docker."""
    return settings["VLLM_BIN"] or "vllm"


def plugin_entry(program: str) -> list[str]:
    """Words after `sh` that run a program with the plugin on Python's path, before what the image put there."""
    return ["-c", f'PYTHONPATH={MOUNT}${{PYTHONPATH:+:$PYTHONPATH}} exec {program} "$@"', program.split(maxsplit=1)[0]]


def tool(settings: Settings, bundle: Bundle, arguments: Sequence[str], *, gpu: bool) -> str:
    """Shell text that runs one `dflash-verify` command in the image, and leaves nothing behind."""
    words = _words("docker", "run", "--rm", "--pull", "never", *(["--gpus", "all"] if gpu else []))
    words += [*_words("--volume"), Word(f"{bundle.folder}:{MOUNT}:ro", home=True)]
    for name, value in settings.plugin_environment.items():
        words += _words("--env", f"{name}={value}")
    words += _words("--entrypoint", "sh", settings["BASE_IMAGE"])
    words += _words(*plugin_entry("python3 -m dflash_verify.cli"), *arguments)
    return " ".join(word.quoted() for word in words)


def _words(*texts: str) -> list[Word]:
    return [Word(text) for text in texts]


def _under_home(path: str, suffix: str) -> Word:
    """A host path for a mount; ~/ and $HOME/ mean the home directory on that host."""
    if path.startswith("~/"):
        path = "$HOME" + path[1:]
    return Word(path + suffix, home=path.startswith("$HOME"))
