"""check, plan, bench: the plugin's own commands with the launcher's settings, run where they can run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from launcher import bundle as plugin
from launcher import ranks
from launcher.errors import LaunchError
from launcher.hosts import Host, clean_environment, on_all
from launcher.settings import Settings, load

COPY_S = 120
CHECK_S = 600
PLAN_S = 120
# Looked up, not imported: the answer costs nothing.
NEEDS = (
    "import sys; from importlib.util import find_spec; "
    "sys.exit(not all(map(find_spec, ('click', 'numpy', 'pydantic_settings', 'rich'))))"
)


def hosts_of(settings: Settings) -> list[Host]:
    return [Host.of(host, settings) for host in settings.hosts]


def check(root: Path, arguments: Sequence[str], *, dry_run: bool) -> int:
    """The overlay self-check in the image, on every host; 1 if one of them fails."""
    settings = load(root)
    bundle = plugin.make(root)
    if settings["RUNTIME"] == "host":
        text = _with_vllm(settings, bundle, ["check", *arguments])
    else:
        text = ranks.tool(settings, bundle, ["check", *arguments], gpu="--gpu" in arguments)
    hosts = hosts_of(settings)
    if dry_run:
        for host in hosts:
            print(f"# {host.name}\n{bundle.unpack_script(shown=True)}\n{text}\n")
        return 0

    def one(host: Host) -> tuple[int, str]:
        host.must(bundle.unpack_script(), COPY_S, "copying the plugin")
        result = host.run(text, CHECK_S)
        if result.code == 255 and host.ssh:
            raise LaunchError(host.complaint(result, "the self-check"))
        return (1 if result.code is None else result.code), "\n".join(filter(None, (result.out, result.err)))

    code = 0
    for host, (status, said) in zip(hosts, on_all(hosts, one), strict=True):
        print(f"# {host.name}\n{said}")
        code = code or status
    return code


def plan(root: Path, arguments: Sequence[str], *, dry_run: bool) -> int:
    """Widths, capture sizes and graph memory of the present settings."""
    settings = load(root)
    if not settings.widths_asked:
        print("DFLASH_VERIFY_TOKENS is unset or 0: vLLM runs stock, there is no plan.")
        return 0
    words = ["plan", *plan_arguments(settings), *arguments]
    python = _local_python(root)
    if dry_run:
        print(f"# head (this host)\n{' '.join(words)}")
        return 0
    if python:
        return subprocess.run(
            [python, "-m", "dflash_verify.cli", *words], env=_environment(root, settings), check=False
        ).returncode
    bundle = plugin.make(root)
    head = hosts_of(settings)[0]
    head.must(bundle.unpack_script(), COPY_S, "copying the plugin")
    if settings["RUNTIME"] == "host":
        print(head.must(_with_vllm(settings, bundle, words), PLAN_S, "planning"))
    else:
        print(head.must(ranks.tool(settings, bundle, words, gpu=False), PLAN_S, "planning in the image"))
    return 0


def planned_widths(root: Path, settings: Settings, bundle: plugin.Bundle, head: Host) -> list[int]:
    """The captured widths, and, printed on the way, what they cost; empty without a width."""
    if not settings.widths_asked:
        return []
    words = ["plan", *plan_arguments(settings), "--json"]
    python = _local_python(root)
    if python:
        done = subprocess.run(
            [python, "-m", "dflash_verify.cli", *words],
            env=_environment(root, settings),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise LaunchError(done.stderr.strip().removeprefix("Error: ") or "dflash-verify plan failed.")
        out = done.stdout
    elif settings["RUNTIME"] == "host":
        out = head.must(_with_vllm(settings, bundle, words), PLAN_S, "planning")
    else:
        out = head.must(ranks.tool(settings, bundle, words, gpu=False), PLAN_S, "planning in the image")
    try:
        document = json.loads(out)
        widths = [int(width) for width in document["widths"]]
        graphs, gib, hybrid = (document["graphs"][name] for name in ("total", "gib", "gib_hybrid"))
        largest = max(document["capture_sizes"], default=0)
    except (ValueError, KeyError, TypeError):
        raise LaunchError(f"dflash-verify plan printed no plan ({out[:100]!r}): run ./start.sh plan.") from None
    print(
        f"Plan: widths {', '.join(map(str, widths))}; {graphs} graphs up to {largest} tokens, about {gib} GiB "
        f"({hybrid} for a GDN hybrid)."
    )
    for note in document.get("notes", []):
        print(f"  {note}")
    return widths


def plan_arguments(settings: Settings) -> list[str]:
    arguments = ["--verify-tokens", settings.widths_asked, "--draft-tokens", str(settings.draft_tokens)]
    arguments += ["--max-num-seqs", str(settings.max_num_seqs)]
    return [*arguments, "--dspark"] if settings["DRAFT_METHOD"] == "dspark" else arguments


def bench(root: Path, arguments: Sequence[str], *, dry_run: bool) -> int:
    """`dflash-verify bench` against the running server, from this environment or, without one, from the image."""
    settings = load(root)
    address = settings["LISTEN"] if settings["LISTEN"] not in ("0.0.0.0", "::") else "127.0.0.1"
    words = ["bench", "--url", f"http://{address}:{settings.port}", "--model", settings.model_name, *arguments]
    python = _local_python(root)
    if dry_run:
        print("# head (this host)\ndflash-verify " + " ".join(words))
        return 0
    if python is None:
        raise LaunchError("bench needs the Python environment of this checkout: run ./start.sh setup once.")
    environment = _environment(root, settings)
    if settings.api_key:
        environment["OPENAI_API_KEY"] = settings.api_key
    return subprocess.run([python, "-m", "dflash_verify.cli", *words], env=environment, check=False).returncode


def _local_python(root: Path) -> str | None:
    """A Python here that can run the plugin's commands, the checkout's own environment first."""
    own = Path(os.environ.get("DFLASH_VENV") or root / ".venv") / "bin" / "python"
    for python in (str(own), sys.executable):
        try:
            done = subprocess.run([python, "-c", NEEDS], capture_output=True, check=False, env=clean_environment())
        except OSError:
            continue
        if done.returncode == 0:
            return python
    return None


def _environment(root: Path, settings: Settings) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(root / "src"), os.environ.get("PYTHONPATH", "")]))
    return clean_environment() | dict(settings.plugin_environment) | {"PYTHONPATH": path}


def _with_vllm(settings: Settings, bundle: plugin.Bundle, words: Sequence[str]) -> str:
    """Shell text for a server without docker: the Python that its `vllm` runs in."""
    vllm = ranks.Word(ranks.vllm_program(settings)).quoted()
    arguments = " ".join(ranks.Word(word).quoted() for word in words)
    return (
        f"vllm=$(command -v {vllm}) || exit 1\n"
        'python=$(dirname -- "$(readlink -f -- "$vllm")")/python\n'
        f'PYTHONPATH="{bundle.folder}${{PYTHONPATH:+:$PYTHONPATH}}" "$python" -m dflash_verify.cli {arguments}'
    )
