"""`dflash-verify verify-gain`: what block verification is worth on recorded probabilities.

File format, NumPy .npz, B recorded verification steps of N drafts over a vocabulary of V tokens:

| array          | shape       | type          | meaning                                                                  |
|----------------|-------------|---------------|--------------------------------------------------------------------------|
| `target`       | [B, N+1, V] | float32 or 64 | target probabilities after the first i drafts, as the verifier uses them |
|                |             |               | (after temperature, top-k, top-p); the last row may be left out          |
| `draft`        | [B, N, V]   | float32 or 64 | the distributions the drafts were drawn from                             |
| `draft_tokens` | [B, N]      | integer       | the drafts that were drawn                                               |
| `request`      | [B]         | integer       | optional: which request a step belongs to; steps of one request are one  |
|                |             |               | observation for the interval                                             |
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import numpy as np

# Steps read at once: target and draft rows of all of them are held in float64.
CHUNK_BYTES = 256 << 20

ARRAYS = {"target": ("B", "N+1", "V"), "draft": ("B", "N", "V"), "draft_tokens": ("B", "N"), "request": ("B",)}


@dataclass(frozen=True, slots=True)
class WidthGain:
    """Acceptance lengths (accepted drafts + 1) at one verify width.

    gain_percent: of block over token-wise; gain_tokens and its half-width of a 95 % interval over requests, in tokens a
    step (None with fewer than two requests). bound: of any lossless verifier.
    """

    width: int
    token_wise: float
    block: float
    bound: float
    gain_tokens: float
    gain_tokens_95: float | None
    gain_percent: float


def _load(path: Path) -> dict[str, np.ndarray]:
    try:
        archive = np.load(path)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError("it holds one array")
        with archive:
            arrays = {name: archive[name] for name in ARRAYS if name in archive.files}
        for name, array in arrays.items():
            if not isinstance(array, np.ndarray):  # np.load hands out the bytes of a member that is no .npy
                raise ValueError(f"its member {name} is no array")
    except Exception as error:  # zipfile, zlib, pickle and numpy each have their own for a damaged file
        reason = " ".join(str(error).split()) or type(error).__name__
        raise click.ClickException(
            f"{path} cannot be read as .npz ({reason}); see the file format in docs/block-verification.md."
        ) from error
    missing = [name for name in ("target", "draft", "draft_tokens") if name not in arrays]
    if missing:
        raise click.ClickException(
            f"{path} has no array {', '.join(missing)}: expected target, draft and draft_tokens; see docs/block-verification.md."
        )
    for name, array in arrays.items():
        if array.ndim != len(ARRAYS[name]):
            expected = ", ".join(ARRAYS[name])
            raise click.ClickException(f"{path}: {name} has shape {array.shape}: expected [{expected}].")
    if "request" in arrays and arrays["request"].dtype.kind not in "iu":
        raise click.ClickException(f"{path}: request is of type {arrays['request'].dtype}: expected integers.")
    if not arrays["draft_tokens"].shape[1]:
        raise click.ClickException(f"{path} records no drafts: draft_tokens has shape {arrays['draft_tokens'].shape}.")
    if len({len(array) for array in arrays.values()}) != 1 or not len(arrays["draft_tokens"]):
        raise click.ClickException(f"The arrays of {path} differ in their number of steps, or have none.")
    return arrays


def gains(arrays: dict[str, np.ndarray]) -> list[WidthGain]:
    """One WidthGain for every width 1 .. N of the recorded steps.

    Raises dflash_verify.verify.InvalidProbabilities for rows that are not distributions or shapes that do not fit.
    """
    from dflash_verify.verify.gain import survival_from_paths

    target, draft, tokens = arrays["target"], arrays["draft"], arrays["draft_tokens"]
    steps = len(tokens)
    chunk = max(1, CHUNK_BYTES // (8 * max(1, int(np.prod(target.shape[1:])))))
    parts = [
        survival_from_paths(target[i : i + chunk], draft[i : i + chunk], tokens[i : i + chunk])
        for i in range(0, steps, chunk)
    ]
    token, block, bound = (
        np.concatenate([getattr(part, name).numpy() for part in parts]).cumsum(axis=1)
        for name in ("token", "block", "bound")
    )
    requests = arrays.get("request", np.arange(steps))
    _, owner = np.unique(requests, return_inverse=True)
    per_request = np.bincount(owner)
    found = []
    for column in range(tokens.shape[1]):
        extra = block[:, column] - token[:, column]
        length, gain = 1.0 + float(token[:, column].mean()), float(extra.mean())
        found.append(
            WidthGain(
                width=column + 1,
                token_wise=length,
                block=length + gain,
                bound=1.0 + float(bound[:, column].mean()),
                gain_tokens=gain,
                gain_tokens_95=_half_width(extra, owner, per_request),
                gain_percent=100.0 * gain / length,
            )
        )
    return found


def _half_width(extra: np.ndarray, owner: np.ndarray, per_request: np.ndarray) -> float | None:
    """95 % half-width of the mean over steps, with requests as the independent units (linearised ratio)."""
    count = len(per_request)
    if count < 2:
        return None
    residual = np.bincount(owner, weights=extra) - extra.mean() * per_request
    variance = count / (count - 1) * float((residual**2).sum()) / len(extra) ** 2
    return float(1.96 * variance**0.5)


@click.command(name="verify-gain")
@click.argument("recorded", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def verify_gain(recorded: Path, as_json: bool) -> None:
    """What block verification is worth on RECORDED (target, draft) probabilities, for every width.

    Acceptance lengths are exact for the recorded distributions: the verifier's randomness and the draft at each position
    are integrated out, so no verification is simulated. RECORDED is an .npz file with the arrays target [B, N+1, V],
    draft [B, N, V], draft_tokens [B, N] and optionally request [B]; docs/block-verification.md describes it.
    """
    from rich.console import Console
    from rich.table import Table

    try:
        from dflash_verify.verify.reference import InvalidProbabilities
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise click.ClickException("verify-gain needs torch, which is not installed; pip install torch.") from error

    arrays = _load(recorded)
    try:
        found = gains(arrays)
    except InvalidProbabilities as error:
        raise click.ClickException(f"{recorded}: {error}") from error
    if as_json:
        click.echo(json.dumps({"steps": len(arrays["draft_tokens"]), "widths": [asdict(row) for row in found]}))
        return
    table = Table(title=f"Acceptance length on {len(arrays['draft_tokens'])} recorded steps")
    for heading in ("width", "token-wise", "block", "gain", "gain %", "bound"):
        table.add_column(heading, justify="right")
    for row in found:
        spread = "" if row.gain_tokens_95 is None else f" ± {row.gain_tokens_95:.4f}"
        table.add_row(
            str(row.width),
            f"{row.token_wise:.4f}",
            f"{row.block:.4f}",
            f"{row.gain_tokens:.4f}{spread}",
            f"{row.gain_percent:.2f}",
            f"{row.bound:.4f}",
        )
    console = Console()
    console.print(table)
    if found[-1].gain_tokens < 1e-9:
        console.print(
            "No gain at any width: the recorded drafts are point masses (a greedy drafter) or the target's are (temperature 0)."
        )
