"""`dflash-verify simulate`: what a policy would have served, from a trace and a cost table."""

import json
from pathlib import Path

import click

from dflash_verify.simulate.policies import Auto, EmaMin, Oracle, Policy, Static
from dflash_verify.simulate.replay import Result, StepNoise, replay
from dflash_verify.simulate.trace import Trace, TraceError
from dflash_verify.width.acceptance import ESTIMATORS
from dflash_verify.width.controller import WidthController
from dflash_verify.width.cost import CostModel, CostTable, CostTableError, read_json

POLICIES = "auto, static:K, ema-min or oracle"


def make_policy(
    name: str, cost: CostTable, *, belief: CostTable | None, trusted: bool = True, estimator: str = "class"
) -> Policy:
    """A policy by its name. belief: the table that auto starts from; trusted: whether it was measured on this server.

    Raises ValueError with one sentence for a name that is none.
    """
    if name == "auto":
        model = CostModel(cost.widths, cost.draft_width, belief, trusted=trusted)
        return Auto(WidthController(cost.widths, cost.draft_width, model, estimator=estimator))
    if name == "ema-min":
        return EmaMin(cost.widths, cost.draft_width)
    if name == "oracle":
        return Oracle(cost)
    kind, _, text = name.partition(":")
    if kind == "static" and text.isdecimal():
        if int(text) not in cost.widths:
            listed = ", ".join(str(width) for width in cost.widths)
            raise ValueError(f"--policy {name}: width {text} is not among the widths {listed}")
        return Static(int(text))
    raise ValueError(f"--policy is {name!r}; expected {POLICIES}")


def parse_widths(text: str, cost: CostTable) -> CostTable:
    """The cost table over the widths of `--widths`."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"--widths is {text!r}; expected integers like 1,3,7")
    return cost.restrict([int(part) for part in parts])


@click.command()
@click.option("--cost", "cost_path", type=click.Path(path_type=Path), required=True, help="Step time table (JSON).")
@click.option("--trace", "trace_path", type=click.Path(path_type=Path), required=True, help="Acceptance trace (JSON).")
@click.option("--policy", default="auto", show_default=True, help=f"{POLICIES}.")
@click.option("--widths", help="Widths to choose from, e.g. 1,3,7; the draft width must be among them.  [default: all]")
@click.option(
    "--belief", help="Cost table that auto starts from and doubts, or none.  [default: the true one, trusted]"
)
@click.option("--noise", type=float, default=0.0, help="Error of the step times that auto sees, percent.")
@click.option(
    "--spikes", type=float, default=1.0, show_default=True, help="With --noise: percent of steps seen tripled."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the noise.")
@click.option("--delay", type=click.IntRange(1, 2), default=1, show_default=True, help="Steps until auto sees a step.")
@click.option("--estimator", type=click.Choice(sorted(ESTIMATORS)), default="class", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--plot", "plot_path", type=click.Path(path_type=Path), help="Also draw every policy into a PNG.")
def simulate(
    cost_path: Path,
    trace_path: Path,
    policy: str,
    widths: str | None,
    belief: str | None,
    noise: float,
    spikes: float,
    seed: int,
    delay: int,
    estimator: str,
    as_json: bool,
    plot_path: Path | None,
) -> None:
    """Replay a trace against a cost table and a policy.

    `auto` is the class that serves. A step's width is decided one step ahead, with observations that are --delay steps
    old: 1 as in vLLM's synchronous scheduler, 2 as in its asynchronous one.
    """
    try:
        cost = CostTable.from_json(read_json(cost_path), str(cost_path))
        if widths is not None:
            cost = parse_widths(widths, cost)
        trace = Trace.load(trace_path)
        if trace.draft_width != cost.draft_width:
            raise ValueError(
                f"{trace_path} has draft width {trace.draft_width} and {cost_path} {cost.draft_width}; expected the same"
            )
        if seed < 0:
            raise ValueError(f"--seed is {seed}; expected 0 or more")
        if plot_path is not None and (not plot_path.name or plot_path.is_dir()):
            raise ValueError(f"--plot is {str(plot_path)!r}; expected a file name like widths.png")
        if not 0.0 <= noise < 1000.0 or not 0.0 <= spikes <= 100.0:
            raise ValueError(f"--noise is {noise} and --spikes {spikes}; expected percentages")
        believed, trusted = cost, True
        if belief == "none":
            believed, trusted = None, False  # type: ignore[assignment]
        elif belief is not None:
            path = Path(belief)
            believed, trusted = CostTable.from_json(read_json(path), str(path)).restrict(cost.widths), False
        error = StepNoise(noise, spikes / 100.0, seed) if noise else None

        def run(name: str) -> Result:
            chosen = make_policy(name, cost, belief=believed, trusted=trusted, estimator=estimator)
            return replay(trace, cost, chosen, name=name, delay=delay, noise=error)

        result = run(policy)
        if plot_path is not None:
            from dflash_verify.simulate.plot import draw

            names = [f"static:{width}" for width in cost.widths] + ["ema-min", "auto", "oracle"]
            draw(
                plot_path, trace, cost, {name: result if name == policy else run(name) for name in names}, focus=result
            )
    except (CostTableError, TraceError, ValueError) as problem:
        raise click.ClickException(str(problem)) from None
    if as_json:
        click.echo(json.dumps(result.to_json(cost.widths)))
        return
    click.echo(f"{policy}: {result.tok_s:.2f} tok/s ({result.tokens} tokens in {result.ms:.1f} ms)")
    total = len(result.widths)
    for width, count in result.steps(cost.widths).items():
        click.echo(f"  width {width}: {count} steps ({100.0 * count / total:.1f} %)")
    rates = sorted(result.request_tok_s.values())
    click.echo(f"  per request: {rates[0]:.2f} / {rates[len(rates) // 2]:.2f} / {rates[-1]:.2f} tok/s (min/median/max)")
