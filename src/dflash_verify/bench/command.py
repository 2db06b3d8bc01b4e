"""The commands that measure: bench, bracket, mixed, report and watch."""

import asyncio
import functools
import json
import time
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click
from rich.console import Console
from rich.live import Live
from rich.table import Table

from dflash_verify import __version__
from dflash_verify.bench import errors

if TYPE_CHECKING:
    from dflash_verify.bench.stats import Interval

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

_DEFAULT_WORKLOADS = ("structured", "code", "prose")


class IntList(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.2 on
    """ "1,2,4" as a tuple of positive numbers."""

    name = "N,N,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of whole numbers like 1,2,4", param, ctx)
        if not numbers or min(numbers) < 1:
            self.fail(f"{value!r} must hold numbers from 1", param, ctx)
        return numbers


def _options(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    def apply(function: F) -> F:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return apply


_server_options = _options(
    click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="OpenAI-compatible vLLM server."),
    click.option("--model", help="Served model name; default: the first one."),
    click.option("--api-key", envvar="OPENAI_API_KEY", help="Bearer key, if the server asks for one."),
    click.option(
        "--stall-s", default=120.0, show_default=True, help="A request without a chunk for so long has failed."
    ),
)
_workload_options = _options(
    click.option(
        "--workload", "-w", "workloads", multiple=True, help="Preset; repeatable. Default: structured, code, prose."
    ),
    click.option(
        "--prompts",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help='Own prompts: one a line, or JSON lines with "prompt" (.jsonl).',
    ),
    click.option("--concurrency", "-c", type=IntList(), help="Simultaneous streams, e.g. 1,2,4."),
    click.option("--repeats", type=click.IntRange(1), help="Runs per prompt; default: the preset's."),
    click.option("--max-tokens", type=click.IntRange(1), help="Tokens per request; default: the preset's."),
    click.option("--seed", default=0, show_default=True, help="Base of all sampling seeds."),
    click.option(
        "--warmups", type=click.IntRange(0), default=1, show_default=True, help="Uncounted runs before each workload."
    ),
    click.option("--sample-s", default=1.0, show_default=True, help="Period of reading /metrics during a run."),
    click.option(
        "--keep-prefix-cache", is_flag=True, help="Let requests hit the prefix cache (it is said in the report)."
    ),
    click.option(
        "--out", type=click.Path(file_okay=False, path_type=Path), help="Run directory; resumed if it exists."
    ),
    click.option("--json", "as_json", is_flag=True, help="Print summary.json instead of a table."),
)


_EXTRA = ("httpx", "prometheus_client", "jsonschema", "jinja2", "matplotlib")


def _needs_extra(function: F) -> F:
    """A missing package of the extra becomes one sentence."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except ModuleNotFoundError as error:
            if error.name not in _EXTRA:
                raise
            raise click.ClickException(
                f'The package {error.name} is missing here; measuring needs: pip install "dflash-verify[bench]".'
            ) from None

    return cast(F, call)


def _run(main: Coroutine[Any, Any, T]) -> T:
    """Run a measurement; a BenchError becomes one sentence and exit code 1."""
    try:
        return asyncio.run(main)
    except errors.BenchError as error:
        raise click.ClickException(str(error)) from None


def _say(text: str) -> None:
    click.echo(text, err=True)


def _console() -> Console:
    """The terminal; a pipe or a narrow window gets long lines instead of cells broken to three letters."""
    return Console(width=max(Console().width, 130))


def _out(out: Path | None, kind: str) -> Path:
    return out or Path(f"dflash-{kind}-{time.strftime('%Y%m%d-%H%M%S')}")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@_server_options
@_workload_options
@_needs_extra
def bench(url: str, model: str | None, api_key: str | None, stall_s: float, **options: Any) -> None:
    """Measure one server: throughput, latency, verify width and acceptance.

    Presets: structured, code, prose, chat, json, object. Every request goes into records.jsonl of the run directory.
    """
    from dflash_verify.bench.endpoint import Endpoint
    from dflash_verify.bench.gpu import Gpus
    from dflash_verify.bench.records import Store
    from dflash_verify.bench.runner import Options, Runner, cells_of, run_visit, wait_ready
    from dflash_verify.bench.workloads import choose

    out = _out(options["out"], "bench")

    async def main() -> None:
        names = options["workloads"] or (() if options["prompts"] else _DEFAULT_WORKLOADS)
        chosen = choose(tuple(names), options["prompts"], repeats=options["repeats"], max_tokens=options["max_tokens"])
        concurrency = options["concurrency"] or (1,)
        run_options = Options(options["seed"], options["warmups"], options["sample_s"], options["keep_prefix_cache"])
        async with Endpoint(url, model=model, api_key=api_key, stall_s=stall_s) as endpoint:
            facts = await wait_ready(endpoint, timeout_s=0)
            manifest = _manifest(
                "bench",
                url,
                arms=[{"name": "server", "kind": "as is"}],
                workloads=chosen,
                concurrency=concurrency,
                options=run_options,
            )
            store = Store(out, manifest)
            try:
                now = await endpoint.snapshot()
                store.visits += 1
                store.add(
                    {
                        "kind": "visit",
                        "visit": store.visits,
                        "arm": "server",
                        "pass_index": 0,
                        "max_num_seqs": 0,
                        "server": facts,
                        "identity": now.identity,
                        "info": now.info,
                    }
                )
                gpus = Gpus.of_this_machine() if endpoint.is_local else Gpus(None)
                runner = Runner(endpoint, store, run_options, gpus=gpus, say=_say)
                await run_visit(runner, chosen, cells_of(chosen, concurrency, arm="server"))
            finally:
                store.close()
                _finish(out)

    try:
        _run(main())
    finally:
        if (out / "summary.json").exists():
            _print(out, as_json=options["as_json"])


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@_server_options
@_workload_options
@click.option(
    "--config", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Arms as TOML; see --example."
)
@click.option("--example", is_flag=True, help="Print a commented TOML and exit.")
@click.option(
    "--control-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Without --config: the running server's DFLASH_CONTROL_FILE; arms A1 full, B narrow, A2 full switch live.",
)
@click.option(
    "--draft",
    type=click.IntRange(1),
    default=7,
    show_default=True,
    help="Without --config: the draft width N of the server.",
)
@click.option(
    "--narrow",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="Without --config: the narrow verify width.",
)
@click.option("--auto/--no-auto", default=False, help="Without --config: also measure the automatic width.")
@click.option("--passes", type=click.IntRange(1), help="Rounds over all arms; the order alternates.")
@click.option("--report/--no-report", "with_report", default=True, help="Write report.html and report.png at the end.")
@_needs_extra
def bracket(
    url: str,
    model: str | None,
    api_key: str | None,
    stall_s: float,
    config: Path | None,
    example: bool,
    control_file: Path | None,
    draft: int,
    narrow: int,
    auto: bool,
    passes: int | None,
    with_report: bool,
    **options: Any,
) -> None:
    """Bracketed A/B between widths: the baseline is measured before and after, so that drift shows.

    Start it again with the same --out to resume: complete runs are kept. Writes report.html and report.png.
    """
    from dflash_verify.bench.example import EXAMPLE

    if example:
        click.echo(EXAMPLE, nl=False)
        return
    from dflash_verify.bench.bracket import (
        Config,
        check_control_file,
        check_live,
        live_config,
        load_config,
        run_bracket,
    )
    from dflash_verify.bench.endpoint import Endpoint, check_key
    from dflash_verify.bench.gpu import Gpus
    from dflash_verify.bench.records import Store
    from dflash_verify.bench.report import write_report
    from dflash_verify.bench.runner import Options, Runner
    from dflash_verify.bench.workloads import choose

    given = click.get_current_context().get_parameter_source
    overrides = {
        key: value
        for key, value in {
            "url": url if given("url") is click.core.ParameterSource.COMMANDLINE else None,
            "model": model,
            "workloads": options["workloads"] or None,
            "concurrency": options["concurrency"],
            "passes": passes,
            "repeats": options["repeats"],
            "max_tokens": options["max_tokens"],
            "seed": options["seed"] if given("seed") is click.core.ParameterSource.COMMANDLINE else None,
            "warmups": options["warmups"] if given("warmups") is click.core.ParameterSource.COMMANDLINE else None,
        }.items()
        if value is not None
    }
    out = _out(options["out"], "bracket")

    async def main() -> None:
        if config is not None:
            plan = Config.model_validate({**load_config(config).model_dump(), **overrides})
        elif control_file is not None:
            if narrow > draft:
                raise errors.BenchError(
                    f"--narrow {narrow} is wider than --draft {draft}: a server verifies at most what was proposed."
                )
            plan = live_config(control_file.absolute(), draft, narrow, auto=auto, **overrides)
        else:
            raise errors.BenchError(
                "bracket needs arms: --control-file for a server that switches live, or --config FILE with commands "
                "(`dflash-verify bracket --example > bracket.toml`)."
            )
        names = () if options["prompts"] and "workloads" not in overrides else plan.workloads
        chosen = choose(names, options["prompts"], repeats=plan.repeats, max_tokens=plan.max_tokens)
        run_options = Options(plan.seed, plan.warmups, options["sample_s"], options["keep_prefix_cache"])
        manifest = _manifest(
            "bracket",
            plan.url,
            arms=[arm.model_dump() for arm in plan.arm],
            workloads=chosen,
            concurrency=plan.concurrency,
            options=run_options,
            passes=plan.passes,
            max_num_seqs=plan.max_num_seqs,
            baselines=plan.baseline_names,
            differs_in=plan.differs_in,
        )
        check_key(api_key)
        if plan.control_file is not None:
            check_control_file(plan.control_file)
        # What is complete needs no server to be shown again.
        if plan.live and not (out / "manifest.json").exists():
            await check_live(plan, api_key)
        store = Store(out, manifest)

        def make_runner(endpoint: Endpoint) -> Runner:
            gpus = Gpus.of_this_machine() if endpoint.is_local else Gpus(None)
            return Runner(endpoint, store, run_options, gpus=gpus, say=_say)

        try:
            await run_bracket(plan, chosen, store, make_runner, api_key=api_key, stall_s=stall_s, say=_say)
        except (errors.BenchError, asyncio.CancelledError):
            _say(f"Everything measured is in {out}; the same command with --out {out} resumes.")
            raise
        finally:
            store.close()
            _finish(out)
        for path in write_report(out) if with_report else ():
            _say(f"wrote {path}")

    try:
        _run(main())
    finally:
        if (out / "summary.json").exists():
            _print(out, as_json=options["as_json"])


def _manifest(kind: str, url: str, *, workloads: Any, options: Any, **rest: Any) -> dict[str, Any]:
    """What was planned, as manifest.json."""
    return {
        "kind": kind,
        "tool": f"dflash-verify {__version__}",
        "created": time.time(),
        "url": url,
        "passes": 1,
        "max_num_seqs": [],
        "baselines": [],
        "differs_in": [],
        "workloads": [w.model_dump(by_alias=True) for w in workloads],
        "options": asdict(options),
        **rest,
    }


def _finish(out: Path) -> None:
    """Write summary.json from the records on disk."""
    from dflash_verify.bench.records import read_manifest, read_records, write_summary
    from dflash_verify.bench.summary import summarise

    write_summary(out, summarise(read_manifest(out), read_records(out)).as_json())


def _middle(value: "Interval | None", digits: int) -> str:
    return "–" if value is None else f"{value.median:.{digits}f}"


def _print(out: Path, *, as_json: bool) -> None:
    from dflash_verify.bench.records import read_manifest, read_records
    from dflash_verify.bench.summary import summarise
    from dflash_verify.bench.verdict import arm_labels, sentences

    if as_json:
        click.echo((out / "summary.json").read_text(), nl=False)
        return
    manifest = read_manifest(out)
    summary = summarise(manifest, read_records(out))
    labels = arm_labels(manifest)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in (
        "workload",
        "streams",
        "arm",
        "tok/s",
        "95 %",
        "per stream",
        "TTFT ms",
        "width",
        "tok/step",
        "texts",
        "runs",
    ):
        table.add_column(name, justify="left" if name in ("workload", "arm", "95 %") else "right")
    for r in summary.rows:
        table.add_row(
            r.workload,
            f"{r.concurrency}" + (f" of {r.max_num_seqs}" if r.max_num_seqs else ""),
            labels[r.arm],
            _middle(r.tok_s, 1),
            "–" if r.tok_s is None else f"{r.tok_s.low:.1f} … {r.tok_s.high:.1f}",
            _middle(r.stream_tok_s, 1),
            _middle(r.ttft_ms, 0),
            "–" if r.mean_width is None else f"{r.mean_width:.2f}",
            _middle(r.tokens_per_step, 2),
            str(len(set(r.text_hashes.values()))) if r.text_hashes else "–",
            str(r.runs),
        )
    _console().print(table)
    for sentence in sentences(manifest, summary) if summary.comparisons else []:
        click.echo(sentence)
    click.echo(f"Records: {out}")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@_server_options
@click.option("--ordinary", default="structured", show_default=True, help="Workload of the ordinary stream.")
@click.option("--guided", default="object", show_default=True, help="Workload with a schema for the guided requests.")
@click.option("--max-tokens", type=click.IntRange(1), help="Length of the ordinary stream; default: the preset's.")
@click.option(
    "--repeats", type=click.IntRange(1), default=6, show_default=True, help="Six are the fewest for a verdict."
)
@click.option(
    "--lead-tokens",
    type=click.IntRange(1),
    default=16,
    show_default=True,
    help="Emitted before a guided request starts.",
)
@click.option("--min-overlap-s", default=5.0, show_default=True, help="Needed together in every repeat, or:")
@click.option("--min-overlap-steps", default=50, show_default=True, help="steps needed together.")
@click.option("--seed", default=0, show_default=True)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory for mixed.json; a run directory shows it in its report.",
)
@click.option("--json", "as_json", is_flag=True, help="Print mixed.json.")
@_needs_extra
def mixed(
    url: str,
    model: str | None,
    api_key: str | None,
    stall_s: float,
    ordinary: str,
    guided: str,
    max_tokens: int | None,
    out: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Ordinary and guided requests that provably decode together, and what the guided ones cost.

    Exit code 1 when the overlap is not reached or a guided answer is not valid JSON.
    """
    from dflash_verify.bench.endpoint import Endpoint
    from dflash_verify.bench.mixed import MixedOptions, MixedResult, probe
    from dflash_verify.bench.report import mixed_verdict
    from dflash_verify.bench.runner import wait_ready
    from dflash_verify.bench.workloads import choose

    async def main() -> MixedResult:
        (free,) = choose((ordinary,), None, max_tokens=max_tokens)
        (constrained,) = choose((guided,), None)
        async with Endpoint(url, model=model, api_key=api_key, stall_s=stall_s) as endpoint:
            await wait_ready(endpoint, timeout_s=0)
            return await probe(endpoint, free, constrained, MixedOptions(**options))

    result = json.loads(json.dumps(_run(main()).as_json()))
    directory = _out(out, "mixed")
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "mixed.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    if as_json:
        click.echo(path.read_text(), nl=False)
    else:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        for name in (
            "beside the ordinary stream",
            "repeat",
            "together s",
            "steps",
            "ordinary tok/s",
            "steps by width",
            "valid",
            "cut off",
        ):
            table.add_column(name)
        for p in result["phases"]:
            table.add_row(
                {"alone": "nothing"}.get(p["phase"], p["phase"]),
                str(p["repeat"] + 1),
                f"{p['overlap_s']:.1f}",
                str(p["overlap_steps"]),
                f"{p['ordinary_tok_s']:.1f}",
                ", ".join(f"{w}: {n:.0f}" for w, n in p["widths"].items()) or "–",
                str(p["json_valid"]),
                str(p["cut_off"]),
            )
        _console().print(table)
        click.echo(mixed_verdict(result))
        click.echo(f"Records: {path}")
    if result["problems"]:
        raise SystemExit(1)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--audit",
    is_flag=True,
    help="Recompute every aggregate from the records and check the plan; exit code 1 on a finding.",
)
@click.option(
    "--mixed", "mixed_file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="mixed.json to include."
)
@_needs_extra
def report(directory: Path, audit: bool, mixed_file: Path | None) -> None:
    """One HTML page and one PNG from a run directory."""
    from dflash_verify.bench.audit import audit as find
    from dflash_verify.bench.report import write_report

    if audit:
        findings = find(directory)
        for finding in findings:
            click.echo(f"FINDING {finding}")
        click.echo(f"audit of {directory}: " + (f"{len(findings)} finding(s)" if findings else "passed"))
        if findings:
            raise SystemExit(1)
        return
    try:
        for path in write_report(directory, mixed_file):
            click.echo(f"wrote {path}")
    except errors.BenchError as error:
        raise click.ClickException(str(error)) from None


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@_server_options
@click.option("--period-s", default=1.0, show_default=True, help="Seconds between two readings of /metrics.")
@click.option("--once", is_flag=True, help="Show one period and exit.")
@_needs_extra
def watch(url: str, model: str | None, api_key: str | None, stall_s: float, period_s: float, once: bool) -> None:
    """Live view of width, acceptance per position, goodput, step time per width and the last decision."""
    from dflash_verify.bench.endpoint import Endpoint
    from dflash_verify.bench.watch import moment, view

    async def main() -> None:
        async with Endpoint(url, model=model, api_key=api_key, stall_s=stall_s) as endpoint:
            before = await endpoint.snapshot()
            with Live(console=Console(), auto_refresh=False, transient=False) as live:
                while True:
                    await asyncio.sleep(period_s)
                    now = await endpoint.snapshot()
                    live.update(view(endpoint.url, now, moment(before, now)), refresh=True)
                    if once:
                        return
                    before = now

    try:
        _run(main())
    except KeyboardInterrupt:
        return
