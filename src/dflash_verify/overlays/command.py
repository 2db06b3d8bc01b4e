"""`dflash-verify check` and `dflash-verify fingerprint`: neither imports vLLM nor torch (but for `check --gpu`)."""

import json
import os
import re
import sys
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from dflash_verify.overlays.fingerprint import InstalledSource, Source, SourceError, SourceReader, WheelSource
from dflash_verify.overlays.manifest import ManifestError, load_manifests, manifest_dir
from dflash_verify.overlays.release import record_release
from dflash_verify.overlays.survey import Status, survey
from dflash_verify.plugin import asked_for

ENTRY_POINT = "dflash_verify"  # of vllm.general_plugins
_STYLE = {"needed": "green", "applied": "green", "not needed": "cyan", "off": "dim", "drifted": "red", "missing": "red"}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@click.option(
    "--wheel",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Check this vLLM wheel instead of the vLLM that is installed.",
)
@click.option(
    "--gpu", is_flag=True, help="Also run the kernel-facing overlays on the GPU against the unpatched result."
)
def check(as_json: bool, wheel: Path | None, gpu: bool) -> None:
    """Check every overlay against a vLLM: the same comparison that a server makes when it starts.

    Exit code 0 if every overlay fits or is not needed, 1 if a function has drifted or is missing, or if VLLM_PLUGINS keeps
    vLLM from loading the plugin that DFLASH_VERIFY_TOKENS asks for.
    """
    if gpu and wheel is not None:
        raise click.UsageError("--gpu runs the vLLM that is installed; it cannot be combined with --wheel")
    try:
        source = _source(wheel)
        result = survey(SourceReader(source), load_manifests(), {"width", "block"})
    except (SourceError, ManifestError) as error:
        if as_json:
            click.echo(json.dumps({"ok": False, "error": str(error), "overlays": []}))
        else:
            click.echo(f"dflash-verify check: {error}", err=True)
        sys.exit(1)
    probes = []
    if gpu and result.ok:
        from dflash_verify.overlays.probes import run_probes

        probes = run_probes()
    ok = result.ok and all(probe.ok for probe in probes)
    not_allowed = _not_allowed()
    if not_allowed and asked_for():
        ok = False  # the server would start as stock vLLM although a width is asked for
    if as_json:
        document = {
            "ok": ok,
            "version": result.version,
            "release": result.release,
            "overlays": [_as_dict(result, o.name) for o in result.overlays],
        }
        if gpu:
            document["gpu"] = [asdict(probe) for probe in probes]
        if not_allowed:
            document["plugin"] = not_allowed
        click.echo(json.dumps(document, indent=2))
    else:
        console = Console()
        console.print(_table(result))
        for probe in probes:
            console.print(
                f"{'ok  ' if probe.ok else 'FAIL'} {probe.name}: {probe.detail}", style=None if probe.ok else "red"
            )
        if not_allowed:
            console.print(not_allowed, style="red" if asked_for() else "yellow")
        if result.ok:
            console.print(f"vLLM {result.version}: every overlay fits.")
            if not all(probe.ok for probe in probes):
                console.print("The device does not: see the lines marked FAIL.", style="red")
        else:
            console.print(
                f"vLLM {result.version} is not supported as it is (nearest release: {result.release}). "
                "A server with DFLASH_VERIFY_TOKENS set refuses to start; docs/adding-a-release.md says how to add a release.",
                style="red",
            )
    sys.exit(0 if ok else 1)


@click.command()
@click.option(
    "--wheel",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    required=True,
    help="The vLLM wheel of the new release.",
)
@click.option("--release", help="The release to record, if the wheel's own version is not it.")
@click.option(
    "--manifests",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="The directory of the manifests. [default: overlays/ of this checkout]",
)
@click.option("--json", "as_json", is_flag=True, help="Print what was recorded as JSON.")
def fingerprint(wheel: Path, release: str | None, manifests: Path | None, as_json: bool) -> None:
    """Record the fingerprints of a new vLLM release in the manifests, for review and commit.

    Functions whose source equals that of a known release need no review; for the others the table says that their wrapper
    has to be read against the new source.
    """
    directory = manifests or manifest_dir()
    if manifests is None and directory.name != "overlays":
        raise click.UsageError("dflash-verify is not run from a checkout: name its overlays/ with --manifests")
    try:
        source = WheelSource.open(wheel)
        release = release or source.version
        if not re.fullmatch(r"\d+\.\d+\.\d+", release):
            raise click.UsageError(f"{release} is no release like 0.34.0: name the one to record with --release")
        recorded = record_release(directory, source, release)
    except (SourceError, ManifestError) as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps({"release": release, "targets": [asdict(r) for r in recorded]}, indent=2))
        return
    table = Table("overlay", "function", "fingerprint", "review", title=f"vLLM {release} in {directory}")
    for r in recorded:
        review = (
            f"no: as in {r.like}" if r.like else "[yellow]yes: changed[/]" if r.fingerprint else "[red]yes: absent[/]"
        )
        table.add_row(r.overlay, r.function, r.fingerprint or "-", review)
    Console().print(table)


def _not_allowed() -> str:
    """One sentence if vLLM's allow-list leaves the plugin out, else ""."""
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is None or ENTRY_POINT in allowed.split(","):
        return ""
    return f"VLLM_PLUGINS={allowed!r} does not list {ENTRY_POINT}, so vLLM will not load the plugin: add it, or unset VLLM_PLUGINS."


def _source(wheel: Path | None) -> Source:
    return InstalledSource.find() if wheel is None else WheelSource.open(wheel)


def _as_dict(result: Status, name: str) -> dict[str, object]:
    overlay = result[name]
    drift = [asdict(t) for t in overlay.targets if t.found != t.expected] if not overlay.ok else []
    return {
        "name": overlay.name,
        "status": overlay.state,
        "title": overlay.title,
        "release": overlay.release,
        "reason": overlay.reason,
        "drift": drift,
    }


def _table(result: Status) -> Table:
    table = Table("overlay", "status", "matches", "what", title=f"vLLM {result.version}")
    for overlay in result.overlays:
        status = f"[{_STYLE[overlay.state]}]{overlay.state}[/]"
        what = overlay.title if overlay.state == "needed" else overlay.reason
        table.add_row(overlay.name, status, overlay.release or "-", what)
    return table
