"""Settings of the launcher: .env, overruled by what is given inline, validated as a whole before anything happens.

A name that is set but empty is the operator's choice: for most it means "vLLM's default", and where that makes no
sense it is an error. Names with the plugin's prefix are checked here too, also while vLLM runs stock: a misspelt
DFLASH_VERIFY_TOKENS is what makes it run stock.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from launcher import dotenv
from launcher.errors import LaunchError

PLUGIN_PREFIX = "DFLASH_"
# Of the plugin's prefix, but not for servers: start.sh's own environment and the CPU engine of demo and tests.
NOT_FOR_SERVERS = ("DFLASH_VENV", "DFLASH_CPU")
# Libraries in the container that are configured by the environment; a name from .env is passed on as it is.
PASSED_ON = ("VLLM_", "NCCL_", "HF_", "GLOO_", "UCX_", "TORCH_", "CUDA_", "TRITON_", "OMP_", "FLASHINFER_")
SECRETS = ("HF_TOKEN", "VLLM_API_KEY")
_SECRET = re.compile(r"(?:TOKEN|KEY|SECRET|PASSWORD)$")

# name -> default. .env.example has the same values, with what each is for (a test compares them).
DEFAULTS = {
    "NODES": "2",
    "RUNTIME": "docker",
    "HEAD_ADDR": "192.168.100.10",
    "WORKER_HOST": "192.168.100.11",
    "WORKER_ADDR": "",
    "SSH_PORT": "",
    "SSH_KEY": "",
    "SSH_CONFIG": "",
    "HEAD_IFACE": "",
    "WORKER_IFACE": "",
    "HEAD_RDMA": "",
    "WORKER_RDMA": "",
    "LISTEN": "0.0.0.0",
    "PORT": "8000",
    "MASTER_PORT": "29501",
    "BASE_IMAGE": "vllm/vllm-openai:v0.33.0",
    "SERVER_NAME": "vllm",
    "RESTARTS": "0",
    "VLLM_BIN": "",
    "HF_CACHE": "",
    "MODEL": "local-inference-lab/GLM-5.3-Flash-NVFP4",
    "MODEL_REVISION": "",
    "SERVED_MODEL_NAME": "",
    "DRAFT_MODEL": "incoai/GLM-5.3-Flash-DFlash2",
    "DRAFT_REVISION": "",
    "DRAFT_METHOD": "dflash",
    "DRAFT_TP": "",
    "TP_SIZE": "",
    "EXECUTOR": "mp",
    "MAX_NUM_SEQS": "8",
    "MAX_MODEL_LEN": "",
    "KV_CACHE_DTYPE": "auto",
    "GPU_MEMORY_UTILIZATION": "0.85",
    "EXTRA_ARGS": "",
    "DFLASH_TOKENS": "7",
    "DFLASH_VERIFY_TOKENS": "",
    "DFLASH_BLOCK_VERIFY": "",
    "HF_TOKEN": "",
    "VLLM_API_KEY": "",
    "START_TIMEOUT_S": "1800",
    "MIN_FREE_GB": "20",
}


@dataclass(frozen=True)
class HostSettings:
    """One host: rank 0 is the head, where the launcher runs.

    ssh: destination for ssh, empty for this host. addr: what the ranks reach it by. iface: socket interface, empty for
    the libraries' choice. rdma: NIC names; None leaves the choice to NCCL, empty turns RDMA off. gid: GID index or None.
    """

    rank: int
    ssh: str
    addr: str
    iface: str
    rdma: tuple[str, ...] | None
    gid: int | None

    @property
    def role(self) -> str:
        return "head" if self.rank == 0 else "worker"


@dataclass(frozen=True)
class Settings:
    """Everything that the commands are made from; `values` are the validated texts of DEFAULTS' names."""

    values: Mapping[str, str] = field(repr=False)  # holds secrets
    hosts: tuple[HostSettings, ...]
    port: int
    master_port: int
    max_num_seqs: int
    tp_size: int
    draft_tokens: int  # N; 0 without a drafter
    widths_asked: str  # DFLASH_VERIFY_TOKENS as given; empty for stock
    restarts: int
    start_timeout_s: int
    min_free_gb: int
    extra_args: tuple[str, ...]
    plugin_environment: Mapping[str, str]  # empty when vLLM runs stock
    passed_on: Mapping[str, str] = field(repr=False)

    def __getitem__(self, name: str) -> str:
        return self.values[name]

    @property
    def plugin_active(self) -> bool:
        return bool(self.plugin_environment)

    @property
    def secrets(self) -> dict[str, str]:
        """Environment of the container that no printed command may show."""
        given = {name: self.values[name] for name in SECRETS if self.values[name]}
        return given | {name: value for name, value in self.passed_on.items() if is_secret(name)}

    @property
    def api_key(self) -> str:
        """What a client must send, empty when the server asks for nothing."""
        args = list(self.extra_args)
        for index, arg in enumerate(args):
            if arg.startswith("--api-key="):
                return arg.partition("=")[2]
            if arg == "--api-key" and index + 1 < len(args):
                return args[index + 1]
        return self.values["VLLM_API_KEY"]

    @property
    def model_name(self) -> str:
        return self.values["SERVED_MODEL_NAME"] or self.values["MODEL"]


def is_secret(name: str) -> bool:
    return name in SECRETS or bool(_SECRET.search(name))


def gather(root: Path, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Defaults, overruled by .env (or .env.example while there is no .env), overruled by what is set inline."""
    environ = os.environ if environ is None else environ
    path = root / ".env"
    from_file = dotenv.read(path if path.exists() else root / ".env.example")
    _refuse_unknown(from_file, " in .env")
    values = DEFAULTS | from_file
    inline = [name for name in environ if name in values or name.startswith(PLUGIN_PREFIX)]
    _refuse_unknown(inline)
    return values | {name: environ[name] for name in inline}


def _refuse_unknown(names: Iterable[str], where: str = "") -> None:
    known = DEFAULTS.keys() | PLUGIN_VARIABLES.keys()
    for name in names:
        if name in known or name.startswith(PASSED_ON):
            continue
        plugins = name.startswith(PLUGIN_PREFIX)
        candidates = [n for n in sorted(known) if not plugins or n.startswith(PLUGIN_PREFIX)]
        near = max(candidates, key=lambda candidate: _likeness(name, candidate))
        raise LaunchError(f"{name}{where} is not a setting: did you mean {near}? Rename or remove it.")


def _likeness(one: str, other: str) -> float:
    """0 to 1. The prefix says nothing about which of the plugin's variables was meant."""
    return difflib.SequenceMatcher(None, one.removeprefix(PLUGIN_PREFIX), other.removeprefix(PLUGIN_PREFIX)).ratio()


def load(root: Path, environ: Mapping[str, str] | None = None) -> Settings:
    """The validated settings; LaunchError with one sentence for the first value that cannot be used."""
    return validate(gather(root, environ))


def validate(values: Mapping[str, str]) -> Settings:
    """Texts -> Settings. Nothing is computed from a text before its form is known."""
    check = _Checker(values)
    nodes = int(check.choice("NODES", "1", "2"))
    executor = check.choice("EXECUTOR", "mp", "ray")
    runtime = check.choice("RUNTIME", "docker", "host")
    if nodes == 2 and runtime == "host":
        raise LaunchError("RUNTIME=host serves on this machine only and NODES is 2: set RUNTIME=docker, or NODES=1.")
    if nodes == 2 and executor == "ray":
        raise LaunchError(
            "EXECUTOR=ray lets Ray place the ranks and NODES is 2: set NODES=1 and TP_SIZE, and start the Ray cluster first."
        )
    tp_size = check.whole("TP_SIZE", 1, 1024, blank=nodes)
    if tp_size % nodes:
        raise LaunchError(f"TP_SIZE={tp_size} cannot be split over {nodes} hosts: use a multiple of {nodes}.")
    for name, accepts in PLUGIN_VARIABLES.items():
        if values.get(name, "").strip():  # blank is unset
            accepts(check, name)
    table = values.get("DFLASH_COST_TABLE", "").strip()
    if runtime == "host" and table and not Path(table).is_file():
        raise LaunchError(f"DFLASH_COST_TABLE={table} is not a file: correct it, or empty it for the stored table.")
    draft_tokens, plugin = _speculation(check, tp_size)
    check.text("MODEL")
    check.form("BASE_IMAGE", r"[A-Za-z0-9][A-Za-z0-9._/:@-]*", "an image, such as name:tag or name@sha256:DIGEST")
    for name in ("MODEL_REVISION", "DRAFT_REVISION", "SERVED_MODEL_NAME", "VLLM_BIN"):
        check.text(name, blank=True)
    check.form("HF_CACHE", r"(?:(?:/|~/|\$HOME/)[^:\n]*)?", "an absolute path, or one that begins with ~/")
    check.form("SERVER_NAME", r"[A-Za-z0-9][A-Za-z0-9_.-]{0,60}", "letters, digits, _ . -")
    check.form("LISTEN", r"[0-9A-Za-z.:]+", "an IP address or host name, such as 0.0.0.0")
    check.form("KV_CACHE_DTYPE", r"[A-Za-z0-9_]+", "one of vLLM's names, such as auto or fp8")
    check.fraction("GPU_MEMORY_UTILIZATION")
    check.whole("MAX_MODEL_LEN", 1, 100_000_000, blank=0)
    port, master_port = check.whole("PORT", 1, 65535), check.whole("MASTER_PORT", 1, 65535)
    if nodes == 2 and port == master_port:
        raise LaunchError(f"PORT and MASTER_PORT are both {port}: give them different ports.")
    restarts = check.whole("RESTARTS", 0, 100)
    if restarts and nodes == 2:
        raise LaunchError(
            "RESTARTS is for one host and NODES is 2: a rank that restarts alone cannot rejoin, set it to 0."
        )
    return Settings(
        values=dict(values),
        hosts=_hosts(check, nodes),
        port=port,
        master_port=master_port,
        max_num_seqs=check.whole("MAX_NUM_SEQS", 1, 1024),
        tp_size=tp_size,
        draft_tokens=draft_tokens,
        widths_asked=plugin.get("DFLASH_VERIFY_TOKENS", ""),
        restarts=restarts,
        start_timeout_s=check.whole("START_TIMEOUT_S", 1, 86_400),
        min_free_gb=check.whole("MIN_FREE_GB", 0, 100_000),
        extra_args=check.words("EXTRA_ARGS"),
        plugin_environment=plugin,
        passed_on={n: v for n, v in values.items() if n not in DEFAULTS and n.startswith(PASSED_ON)},
    )


def _speculation(check: _Checker, tp_size: int) -> tuple[int, dict[str, str]]:
    """N, and the plugin's environment: empty when neither a width nor block verification is asked for."""
    check.choice("DRAFT_METHOD", "dflash", "dspark")
    draft = check.text("DRAFT_MODEL", blank=True)
    draft_tokens = check.whole("DFLASH_TOKENS", 1, 255) if draft else 0
    draft_tp = check.whole("DRAFT_TP", 1, 1024, blank=tp_size)
    if draft_tp not in (1, tp_size):
        raise LaunchError(f"DRAFT_TP={draft_tp} is not supported by vLLM: use 1, or TP_SIZE, which is {tp_size}.")
    asked = _verify_tokens(check.values["DFLASH_VERIFY_TOKENS"], draft_tokens, draft)
    block = check.choice("DFLASH_BLOCK_VERIFY", "", "0", "1") == "1"
    if block and not draft:
        raise LaunchError("DFLASH_BLOCK_VERIFY=1 needs a drafter and DRAFT_MODEL is empty: set DRAFT_MODEL.")
    if not asked and not block:
        return draft_tokens, {}
    names = [
        n for n, v in check.values.items() if n.startswith(PLUGIN_PREFIX) and v.strip() and n not in NOT_FOR_SERVERS
    ]
    environment = {name: check.values[name] for name in sorted(names)}
    if not asked:
        environment.pop("DFLASH_VERIFY_TOKENS", None)
    return draft_tokens, environment


def _verify_tokens(text: str, draft_tokens: int, draft: str) -> str:
    """DFLASH_VERIFY_TOKENS if it asks for a width, else an empty text."""
    value = text.strip()
    if re.fullmatch(r"0*", value):
        return ""
    listed = re.fullmatch(r"auto(?::([0-9]{1,3}(?:,[0-9]{1,3})*))?|([0-9]{1,3})", value)
    accepted = f"0 to {draft_tokens}, auto, or a list such as auto:1,3,{draft_tokens}"
    if not listed:
        raise LaunchError(f"DFLASH_VERIFY_TOKENS={text!r} is not a width: use {accepted}.")
    if not draft:
        raise LaunchError(f"DFLASH_VERIFY_TOKENS={value} needs a drafter and DRAFT_MODEL is empty: set DRAFT_MODEL.")
    widest = max(int(part) for part in (listed[1] or listed[2] or "0").split(","))
    if widest > draft_tokens:
        raise LaunchError(f"DFLASH_VERIFY_TOKENS={value} is wider than DFLASH_TOKENS={draft_tokens}: use {accepted}.")
    return value


def _hosts(check: _Checker, nodes: int) -> tuple[HostSettings, ...]:
    name = r"[A-Za-z0-9][A-Za-z0-9_.:%-]*"
    said = "a host name or IP address"
    head_addr = check.form("HEAD_ADDR", name, said) if nodes == 2 else "127.0.0.1"
    hosts = [_host(check, 0, "", head_addr)]
    if nodes == 2:
        check.whole("SSH_PORT", 1, 65535, blank=22)
        for name_of_file in ("SSH_KEY", "SSH_CONFIG"):
            path = check.text(name_of_file, blank=True)
            if path and not Path(path).expanduser().is_file():
                raise LaunchError(f"{name_of_file}={path} is not a file: correct it, or empty it for ssh's own choice.")
        ssh = check.form("WORKER_HOST", rf"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*@)?{name}", "host or user@host")
        addr = check.form("WORKER_ADDR", rf"(?:{name})?", said) or ssh.rpartition("@")[2]
        if addr == head_addr:
            raise LaunchError(f"HEAD_ADDR and the worker's address are both {addr}: give each host its own.")
        hosts.append(_host(check, 1, ssh, addr))
    return tuple(hosts)


def _host(check: _Checker, rank: int, ssh: str, addr: str) -> HostSettings:
    prefix = "HEAD" if rank == 0 else "WORKER"
    iface = check.form(f"{prefix}_IFACE", r"[A-Za-z0-9_.:-]{0,40}", "a network interface, such as enp1s0f1np1")
    name = f"{prefix}_RDMA"
    text = check.form(
        name,
        r"off|(?:[A-Za-z0-9_]+(?::[0-9]{1,3})?(?:,[A-Za-z0-9_]+(?::[0-9]{1,3})?)*)?",
        "off, or NICs with their GID index, such as rocep1s0f1:3,roceP2p1s0f1:3",
    )
    if text in ("", "off"):
        return HostSettings(rank, ssh, addr, iface, () if text else None, None)
    pairs = [part.partition(":") for part in text.split(",")]
    gids = {gid for _, _, gid in pairs if gid}
    if len(gids) > 1:
        raise LaunchError(
            f"{name}={text} has GID indices {' and '.join(sorted(gids))}, and NCCL takes one per host: "
            "give the NICs the same index (show_gids lists them)."
        )
    return HostSettings(rank, ssh, addr, iface, tuple(nic for nic, _, _ in pairs), int(gids.pop()) if gids else None)


class _Checker:
    """One text -> one value, or one sentence that names the variable, the value and what is accepted."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self.values = values

    def text(self, name: str, *, blank: bool = False) -> str:
        value = self.values[name]
        if not value.strip() and not blank:
            raise LaunchError(f"{name} is empty: set it in .env or inline.")
        if value.startswith("-"):
            raise LaunchError(f"{name}={value!r} begins with a dash and would be read as an option: correct it.")
        return value

    def form(self, name: str, pattern: str, accepted: str) -> str:
        return self._accept(name, lambda value: value if re.fullmatch(pattern, value) else None, accepted)

    def choice(self, name: str, *choices: str) -> str:
        shown = " or ".join(choice or "nothing" for choice in choices)
        return self._accept(name, lambda value: value if value in choices else None, shown)

    def whole(self, name: str, low: int, high: int, *, blank: int | None = None) -> int:
        """`blank`: what an empty text stands for; without it an empty text is an error."""

        def read(value: str) -> str | None:
            if value == "" and blank is not None:
                return str(blank)
            return value if re.fullmatch(r"[0-9]{1,9}", value) and low <= int(value) <= high else None

        return int(self._accept(name, read, f"a whole number from {low} to {high}"))

    def fraction(self, name: str) -> None:
        def read(value: str) -> str | None:
            return value if re.fullmatch(r"0?\.[0-9]{1,6}|1(?:\.0{1,6})?", value) and float(value) > 0 else None

        self._accept(name, read, "a number above 0 and up to 1, such as 0.85")

    def words(self, name: str) -> tuple[str, ...]:
        """Words with the quoting rules of a shell, and nothing else of it: no expansion, no substitution."""
        try:
            return tuple(shlex.split(self.values[name]))
        except ValueError as error:
            raise LaunchError(f"{name}: {str(error).lower()}; balance its quotes.") from None

    def _accept(self, name: str, read: Callable[[str], str | None], accepted: str) -> str:
        value = self.values[name]
        result = read(value)
        if result is None:
            found = f"{name}={value!r}" if value else f"{name} is empty, which"
            raise LaunchError(f"{found} is not accepted: use {accepted}.")
        return result


def _whole(low: int, high: int) -> Callable[[_Checker, str], object]:
    return lambda check, name: check.whole(name, low, high)


def _switch(check: _Checker, name: str) -> object:
    return check.choice(name, "0", "1")


def _path(check: _Checker, name: str) -> object:
    # The container has a working directory of its own.
    return check.form(name, r"(?s:/.*)", "an absolute path, as the server sees it")


# Every variable of the plugin and what it accepts, when it is not blank. The plugin's own table needs packages, which a
# host that only serves does not have; a test compares the two.
PLUGIN_VARIABLES: Mapping[str, Callable[[_Checker, str], object]] = {
    "DFLASH_VERIFY_TOKENS": lambda check, name: None,  # depends on the drafter: _verify_tokens
    "DFLASH_TOKENS": _whole(1, 255),
    "DFLASH_BLOCK_VERIFY": _switch,
    "DFLASH_VERIFY_STRICT": _switch,
    "DFLASH_MAX_GRAPHS": _whole(1, 100_000),
    "DFLASH_ESTIMATOR": lambda check, name: check.choice(name, "class", "hazard"),
    "DFLASH_COST_TABLE": _path,
    "DFLASH_CACHE_DIR": _path,
    "DFLASH_CONTROL_FILE": _path,
    "DFLASH_TRACE_FILE": _path,
    "DFLASH_PROFILE_SECONDS": _whole(0, 3600),
    "DFLASH_CPU": _switch,
    "DFLASH_VENV": lambda check, name: None,  # start.sh's own
}
