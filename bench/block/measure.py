"""Acceptance length of trained pairs under token-wise and block verification; prints the table of docs/block-verification.md.

    python bench/block/measure.py build/pair-0 build/pair-1 build/pair-2 --json build/block-gain.json

Every cell is a speculative decoding loop of its own: the drafter proposes 7 tokens, the target verifies the first `width`
of them, and the next step starts where this one ended, so that a method meets the contexts it makes itself. What is
reported is the exact acceptance of each step (the verifier's randomness and the last draft integrated out, see
dflash_verify.verify.survival_from_paths), averaged over the steps of the loop. Two loops differ in their contexts too, so the
gain is taken within each loop: what the other method would have accepted in the same contexts. The interval is over pairs,
which differ in weights, prompts and random numbers.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pair import Drafter, Proposal, load_pair, propose, run_target
from scipy import stats
from train import held_out_text, windows

from dflash_verify.verify import rule_of, survival_from_paths

WIDTHS = (1, 3, 5, 7)
PROMPT = 64


@dataclass(frozen=True)
class Sampling:
    temperature: float
    top_k: int = 0  # 0: off
    top_p: float = 1.0

    def __str__(self) -> str:
        filters = f", top-k {self.top_k}, top-p {self.top_p}" if self.top_k else ""
        return f"{self.temperature:g}{filters}"


SAMPLINGS = (Sampling(0.0), Sampling(0.6), Sampling(1.0), Sampling(1.0, top_k=20, top_p=0.95))


def target_probabilities(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """[..., V] -> the distribution requests with `sampling` draw from, in float64."""
    logits = logits.double()
    if sampling.temperature == 0.0:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    logits = logits / sampling.temperature
    if sampling.top_k:
        kth = logits.topk(sampling.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if sampling.top_p < 1.0:
        ordered, index = logits.sort(dim=-1, descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        dropped = torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, index, before >= sampling.top_p)
        logits = logits.masked_fill(dropped, float("-inf"))
    return logits.softmax(-1)


@dataclass(frozen=True)
class Step:
    """One verification of every sequence: target [B, K+1, V], proposal of N drafts, accepted [B]."""

    target: torch.Tensor
    proposal: Proposal
    accepted: torch.Tensor


def decode(
    target: Any,
    drafter: Drafter,
    prompts: torch.Tensor,
    method: str,
    width: int,
    sampling: Sampling,
    steps: int,
    seed: int,
) -> list[Step]:
    """`steps` speculative steps of every prompt [B, L], all sequences in one batch."""
    generator = torch.Generator(prompts.device).manual_seed(seed)
    batch, device = prompts.shape[0], prompts.device
    row = torch.arange(batch, device=device)
    tokens = torch.zeros(batch, PROMPT + 1 + steps * (width + 1), dtype=torch.long, device=device)
    tokens[:, :PROMPT] = prompts
    seen = run_target(target, prompts, drafter.shape)
    first = target_probabilities(seen.logits[:, -1], sampling)
    anchor = torch.full((batch,), PROMPT, device=device)  # position of the last token, which the target has not read
    tokens[:, PROMPT] = torch.multinomial(first, 1, generator=generator)[:, 0]
    features, done = seen.features, []
    for _ in range(steps):
        proposal = propose(drafter, target, features, anchor, tokens[row, anchor], sampling.temperature, generator)
        span = anchor[:, None] + torch.arange(width + 1, device=device)
        tokens[row[:, None], span[:, 1:]] = proposal.tokens[:, :width]
        seen = run_target(target, tokens[:, : int(span.max()) + 1], drafter.shape)
        features = seen.features
        probs = target_probabilities(seen.logits[row[:, None], span], sampling)
        rule = rule_of(method, probs, proposal.probs[:, :width], proposal.tokens[:, :width])
        drawn = torch.rand(batch, width, generator=generator, dtype=torch.float64, device=device)
        accepted = rule.accepted(drawn)
        done.append(Step(probs, proposal, accepted))
        anchor = anchor + accepted + 1
        tokens[row, anchor] = torch.multinomial(rule.next_probs[row, accepted], 1, generator=generator)[:, 0]
    return done


@dataclass(frozen=True)
class Cell:
    """Acceptance lengths of one loop, decoded with `method`.

    token, block: exact for the contexts of this loop, under either method (so their difference compares the same
    contexts); emitted: what the loop emitted; bound: what no lossless verifier exceeds in these contexts.
    """

    pair: str
    sampling: str
    method: str
    width: int
    steps: int
    token: float
    block: float
    emitted: float
    bound: float


def measure_cell(
    pair: str,
    models: tuple[Any, Drafter],
    prompts: torch.Tensor,
    method: str,
    width: int,
    sampling: Sampling,
    steps: int,
    seed: int,
) -> Cell:
    done = decode(*models, prompts, method, width, sampling, steps, seed)
    paths = survival_from_paths(
        torch.cat([step.target for step in done]),
        torch.cat([step.proposal.probs[:, :width] for step in done]),
        torch.cat([step.proposal.tokens[:, :width] for step in done]),
    )
    return Cell(
        pair=pair,
        sampling=str(sampling),
        method=method,
        width=width,
        steps=len(paths.token),
        token=1 + float(paths.token.sum(-1).mean()),
        block=1 + float(paths.block.sum(-1).mean()),
        emitted=1 + float(torch.cat([step.accepted for step in done]).double().mean()),
        bound=1 + float(paths.bound.sum(-1).mean()),
    )


def record(path: Path, models: tuple[Any, Drafter], prompts: torch.Tensor, sampling: Sampling, steps: int) -> None:
    """Write the steps of one loop at full width as `dflash-verify verify-gain` reads them."""
    done = decode(*models, prompts, "token", models[1].shape.draft_width, sampling, steps, seed=0)
    np.savez_compressed(
        path,
        target=torch.cat([step.target for step in done]).float().cpu().numpy(),
        draft=torch.cat([step.proposal.probs for step in done]).float().cpu().numpy(),
        draft_tokens=torch.cat([step.proposal.tokens for step in done]).cpu().numpy().astype(np.int16),
        request=np.tile(np.arange(prompts.shape[0]), steps),
    )


def interval(values: Sequence[float]) -> str:
    """Mean and 95 % half-width by Student's t."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return f"{mean:.3f}"
    half = stats.t.ppf(0.975, len(values) - 1) * float(np.std(values, ddof=1)) / len(values) ** 0.5
    return f"{mean:.3f} ± {half:.3f}"


def table(cells: Sequence[Cell]) -> str:
    """Markdown: one line per sampling setting and width."""
    lines = [
        "| temperature | width | token-wise | block | gain in the same contexts | | bound |",
        "|---|---|---|---|---|---|---|",
    ]
    by_key: dict[tuple[str, int], dict[str, dict[str, Cell]]] = {}
    for cell in cells:
        by_key.setdefault((cell.sampling, cell.width), {}).setdefault(cell.method, {})[cell.pair] = cell
    for (sampling, width), methods in by_key.items():
        if "greedy" in methods:
            lengths = interval([cell.token for cell in methods["greedy"].values()])
            lines.append(f"| {sampling} | {width} | {lengths} | the same | 0 | 0 | |")
            continue
        token, block = methods["token"], methods["block"]
        same = [np.mean([cell.block - cell.token for cell in (token[pair], block[pair])]) for pair in token]
        percent = 100 * float(np.mean(same)) / float(np.mean([cell.token for cell in token.values()]))
        lines.append(
            f"| {sampling} | {width} | {interval([cell.token for cell in token.values()])} | "
            f"{interval([cell.block for cell in block.values()])} | {interval(same)} | {percent:+.2f} % | "
            f"{np.mean([cell.bound for cell in block.values()]):.3f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pairs", type=Path, nargs="*", help="folders that train.py wrote")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--steps", type=int, default=20, help="verification steps per sequence and cell")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="where to keep the cells")
    parser.add_argument("--from-json", type=Path, nargs="+", help="print the table of cells measured before")
    parser.add_argument("--record", type=Path, help="only write one .npz for verify-gain, from the first pair")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.from_json:
        print(table([Cell(**cell) for path in args.from_json for cell in json.loads(path.read_text())]))
        return
    cells: list[Cell] = []
    for folder in args.pairs:
        number = json.loads((folder / "pair.json").read_text())["seed"]
        text = torch.frombuffer(bytearray(held_out_text(folder)), dtype=torch.uint8)
        models = load_pair(folder, args.device)
        prompts = windows(text, args.sequences, PROMPT, torch.Generator().manual_seed(1000 + number)).to(args.device)
        if args.record:
            record(args.record, models, prompts, SAMPLINGS[-1], args.steps)
            return
        for sampling in SAMPLINGS:
            for width in WIDTHS:
                for method in ("token", "block") if sampling.temperature else ("greedy",):
                    begin = time.monotonic()
                    cells.append(
                        measure_cell(folder.name, models, prompts, method, width, sampling, args.steps, 7000 + number)
                    )
                    print(cells[-1], f"{time.monotonic() - begin:.1f} s", file=sys.stderr, flush=True)
        if args.json:
            args.json.write_text(json.dumps([asdict(cell) for cell in cells], indent=1))
    print(table(cells))


if __name__ == "__main__":
    main()
