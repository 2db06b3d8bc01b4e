"""The plan digest that every rank logs at its start: the same text on every rank, or nothing is served."""

import re
from collections.abc import Mapping

from launcher.errors import LaunchError

LINE = re.compile(r"dflash-verify:? plan digest=([0-9a-f]{12,64})\b")
# For grep on the host, so that a long log need not travel.
GREP = "dflash-verify:\\{0,1\\} plan digest="


def found(log: str) -> set[str]:
    """Every digest that a log names."""
    return set(LINE.findall(log))


def agree(logs: Mapping[str, str]) -> str:
    """The one digest of all ranks. logs: rank name -> its log. LaunchError when one is missing or differs."""
    by_rank = {name: found(log) for name, log in logs.items()}
    silent = [name for name, digests in by_rank.items() if not digests]
    if silent:
        raise LaunchError(
            f"{' and '.join(silent)} logged no plan digest, so the plugin is not active there: check that VLLM_PLUGINS does "
            "not leave out dflash_verify, and run ./start.sh check."
        )
    if len(set.union(*by_rank.values())) > 1:
        shown = ", ".join(f"{name} {'/'.join(sorted(digests))}" for name, digests in by_rank.items())
        raise LaunchError(
            f"the ranks have different plans ({shown}): they must have the same image, model files and settings; "
            "compare them with ./start.sh check."
        )
    return next(iter(by_rank.values())).pop()
