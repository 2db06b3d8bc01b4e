"""What a summary says, in sentences."""

from collections.abc import Sequence
from typing import Any

from dflash_verify.bench.bracket import Arm
from dflash_verify.bench.summary import Comparison, Row, Summary


def arm_labels(manifest: dict[str, Any]) -> dict[str, str]:
    return {
        arm["name"]: arm["name"] if arm.get("kind") == "as is" else Arm.model_construct(**arm).label
        for arm in manifest["arms"]
    }


def percent(ratio: float) -> str:
    return f"{(ratio - 1) * 100:+.1f} %"


def place(item: Row | Comparison) -> str:
    """Workload and concurrency, and the server's request slots where the bracket varies them."""
    slots = f", {item.max_num_seqs} slots" if item.max_num_seqs else ""
    return f"{item.workload} at {item.concurrency} stream{'s' if item.concurrency > 1 else ''}{slots}"


def sentences(manifest: dict[str, Any], summary: Summary) -> list[str]:
    """The verdict, one sentence per arm, then drift and output equality."""
    labels = arm_labels(manifest)
    if not summary.rows:
        return ["Nothing has been measured yet."]
    if not summary.comparisons:
        return [_single(row) for row in summary.rows if row.tok_s is not None]
    said = []
    for arm, label in labels.items():
        own = [c for c in summary.comparisons if c.arm == arm and c.effect.verdict != "drift"]
        if own:
            said.append(f"{label} against {labels[own[0].baseline]}: {_outcomes(own)}.")
    if summary.max_drift is not None:
        said.append(f"The baseline itself drifted by at most {summary.max_drift * 100:.1f} % between its two visits.")
    else:
        said.append("There is no second baseline, so drift is unknown.")
    said.append(_texts(summary.comparisons, labels))
    if summary.gpu and summary.gpu["throttled"]:
        said.append("A GPU was slowed down for heat or power during the runs: distrust the figures.")
    return said


def _single(row: Row) -> str:
    assert row.tok_s is not None
    steps = f", {row.tokens_per_step.median:.2f} tokens per verify step" if row.tokens_per_step else ""
    width = f" at mean width {row.mean_width:.2f}" if row.mean_width is not None else ""
    return f"{place(row).capitalize()}: {row.tok_s.median:.1f} tok/s [{row.tok_s.low:.1f}, {row.tok_s.high:.1f}]{steps}{width}."


def _outcomes(comparisons: Sequence[Comparison]) -> str:
    words = {
        "faster": "faster on ",
        "slower": "slower on ",
        "no difference": "no difference on ",
        "too few runs": "too few runs to say on ",
    }
    parts = []
    for verdict, intro in words.items():
        own = [c for c in comparisons if c.effect.verdict == verdict]
        if own:
            parts.append(intro + _places(own, with_change=verdict in ("faster", "slower")))
    return "; ".join(parts)


def _places(comparisons: Sequence[Comparison], *, with_change: bool) -> str:
    """ "prose (+5.0 % at 1 stream, +14.0 % at 4) and code (+2.0 % at 1 stream)"."""
    by_workload: dict[str, list[Comparison]] = {}
    for c in comparisons:
        by_workload.setdefault(c.workload, []).append(c)
    phrases = []
    for workload, own in by_workload.items():
        if with_change:
            details = [
                f"{percent(c.effect.ratio.median)} at {_streams(c)}"
                + ((" stream" if c.concurrency == 1 else " streams") if i == 0 else "")
                for i, c in enumerate(own)
            ]
            listed = ", ".join(details)
        else:
            plural = len(own) > 1 or own[0].concurrency > 1
            listed = f"at {_and([_streams(c) for c in own])} stream{'s' if plural else ''}"
        phrases.append(f"{workload} ({listed})")
    return _and(phrases)


def _streams(c: Comparison) -> str:
    return f"{c.concurrency} of {c.max_num_seqs}" if c.max_num_seqs else str(c.concurrency)


def _and(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _texts(comparisons: Sequence[Comparison], labels: dict[str, str]) -> str:
    greedy = [c for c in comparisons if c.texts != "sampled"]
    different = [c for c in greedy if c.texts != "equal"]
    if not greedy:
        return "All workloads were sampled, so outputs cannot be compared."
    if not different:
        return "At temperature 0 every arm wrote the same texts."
    listed = ", ".join(f"{labels[c.arm]} on {place(c)} ({c.texts})" for c in different)
    base = any(c.effect.verdict == "drift" for c in different)
    own = " The baseline does not even repeat itself, so this server is not deterministic." if base else ""
    return f"At temperature 0 texts differ from the baseline's: {listed}.{own}"
