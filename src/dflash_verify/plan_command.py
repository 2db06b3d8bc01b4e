"""`dflash-verify plan`: what a setting would do, without a server, a GPU or vLLM."""

from __future__ import annotations

import json
import os

import click
from rich.console import Console
from rich.table import Table

from dflash_verify.plan import EngineFacts, Plan, make_plan
from dflash_verify.settings import SettingsError, load


@click.command()
@click.option("--verify-tokens", help="Width, auto or auto:K,K,...  [default: DFLASH_VERIFY_TOKENS]")
@click.option(
    "--draft-tokens", type=click.IntRange(1, 255), help="N, tokens proposed per step.  [default: DFLASH_TOKENS]"
)
@click.option("--max-num-seqs", type=click.IntRange(1, 4096), default=256, show_default=True, help="Request slots.")
@click.option("--max-num-batched-tokens", type=click.IntRange(1), help="Tokens per step; larger sizes are left out.")
@click.option("--max-graphs", type=click.IntRange(1), help="Bound on captured graphs.  [default: DFLASH_MAX_GRAPHS]")
@click.option("--capture-sizes", help="Your own capture list, comma separated: it wins, and gaps are said.")
@click.option("--dspark", is_flag=True, help="The drafter is DSpark: N rows per request instead of N + 1.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def plan(
    verify_tokens: str | None,
    draft_tokens: int | None,
    max_num_seqs: int,
    max_num_batched_tokens: int | None,
    max_graphs: int | None,
    capture_sizes: str | None,
    dspark: bool,
    as_json: bool,
) -> None:
    """Show widths, schedule, capture sizes and graph memory for a setting."""
    given = {"DFLASH_VERIFY_TOKENS": verify_tokens, "DFLASH_TOKENS": draft_tokens, "DFLASH_MAX_GRAPHS": max_graphs}
    environ = dict(os.environ) | {name: str(value) for name, value in given.items() if value is not None}
    try:
        settings = load(environ, check_names=True)
        if settings.tokens is None:
            raise SettingsError(
                "The draft width is not known: give --draft-tokens or set DFLASH_TOKENS (7 for a block of 8)."
            )
        n = settings.tokens
        facts = EngineFacts(
            draft_width=n,
            max_num_seqs=max_num_seqs,
            draft_query_len=n if dspark else n + 1,
            max_num_batched_tokens=max_num_batched_tokens,
            user_capture_sizes=_sizes(capture_sizes),
        )
        result = make_plan(settings, facts)
    except SettingsError as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        click.echo(json.dumps(result.as_json()))
    else:
        _show(result)


def _sizes(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise SettingsError(f"--capture-sizes {text!r} is not a list of token counts: write it like 8,16,32.")
    return sizes


def _show(result: Plan) -> None:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("draft width N", str(result.draft_width))
    table.add_row("verify widths", ", ".join(map(str, result.widths)) + f" ({result.mode})")
    table.add_row("vLLM schedule", json.dumps([list(entry) for entry in result.schedule]))
    table.add_row("capture sizes", f"{len(result.capture_sizes)}: " + " ".join(map(str, result.capture_sizes)))
    full = ", ".join(f"{count} at width {width}" for width, count in result.graphs.target.items())
    table.add_row(
        "graphs", f"{result.graphs.total}: {full}, {result.graphs.draft} drafter, {result.graphs.piecewise} piecewise"
    )
    table.add_row(
        "estimate",
        "about {seconds:.0f} s and {gib:.1f} GiB to capture (8B dense; {seconds_hybrid:.0f} s and {gib_hybrid:.1f} GiB for a GDN "
        "hybrid of 48 layers), besides the activations of the largest".format(**result.estimates),
    )
    table.add_row("digest", result.digest)
    for note in result.notes:
        table.add_row("note", note)
    Console(soft_wrap=True).print(table)
