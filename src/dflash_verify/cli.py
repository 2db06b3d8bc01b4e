"""The command `dflash-verify`. Each subcommand lives in the room it belongs to and is imported only when it is called,
so that `check` and `plan` answer in a moment and need neither torch nor vLLM until they ask for them."""

import importlib

import click

from dflash_verify import __version__

# name: (module, attribute, one line for --help)
COMMANDS = {
    "plan": (
        "dflash_verify.plan_command",
        "plan",
        "Show widths, schedule, capture sizes and graph memory for a setting.",
    ),
    "check": ("dflash_verify.overlays.command", "check", "Check every overlay against the vLLM that is installed."),
    "fingerprint": ("dflash_verify.overlays.command", "fingerprint", "Write the fingerprints of a new vLLM release."),
    "profile": (
        "dflash_verify.profile",
        "profile",
        "Measure step time per batch size and width; store the cost table.",
    ),
    "simulate": ("dflash_verify.simulate.command", "simulate", "Replay a trace against a cost table and a policy."),
    "verify-gain": (
        "dflash_verify.verify.command",
        "verify_gain",
        "What block verification is worth on recorded data.",
    ),
    "bench": ("dflash_verify.bench.command", "bench", "Measure one server: throughput, latency, acceptance."),
    "bracket": ("dflash_verify.bench.command", "bracket", "Bracketed A/B between widths, with drift."),
    "mixed": ("dflash_verify.bench.command", "mixed", "Ordinary and guided requests that provably decode together."),
    "report": ("dflash_verify.bench.command", "report", "One HTML page and one PNG from a run; --audit recomputes it."),
    "watch": ("dflash_verify.bench.command", "watch", "Live view of width, acceptance and goodput."),
    "demo": ("dflash_verify.cpu.demo", "demo", "The real vLLM engine on this CPU: stock, width 3, width 1."),
}


class LazyGroup(click.Group):
    """A click group that imports a subcommand's module when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, _, line) in COMMANDS.items()])


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="dflash-verify")
def main() -> None:
    """Propose a wide DFlash block, verify the width that pays."""


if __name__ == "__main__":
    main()
