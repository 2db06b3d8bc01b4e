"""Train a small target and its DFlash2 drafter on the sources of Python's standard library; minutes on a CPU.

    python bench/block/train.py --seed 0 --out build/pair-0

The target learns next bytes. The drafter then learns, from the target's hidden states before a random anchor, the target's
own distribution at the next seven positions: once per position alone (its logits) and once given the token before (the
selector). vLLM loads the result: `vllm serve OUT/target --speculative-config '{"method": "dflash", "model": "OUT/draft",
"num_speculative_tokens": 7}'`.
"""

import argparse
import math
import sys
import sysconfig
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from pair import Drafter, Shape, new_target, run_target, save_pair

SKIPPED = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__", "pydoc_data", "encodings"}
HELD_OUT = 10  # every tenth file is kept for measuring
HELD_OUT_FILE = "held_out.txt"


def stdlib_text(held_out: bool) -> bytes:
    """Sources of the running Python's standard library, in path order; `held_out` selects the files not trained on."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [
        path
        for path in sorted(root.rglob("*.py"))
        if not SKIPPED & set(path.relative_to(root).parts) and not path.relative_to(root).parts[0].startswith("config-")
    ]
    return b"\n".join(path.read_bytes() for i, path in enumerate(files) if (i % HELD_OUT == 0) == held_out)


def held_out_text(pair: Path) -> bytes:
    """What the pair was not trained on. Raises OSError: a pair from before it was kept has to be trained again."""
    return (pair / HELD_OUT_FILE).read_bytes()


def windows(text: torch.Tensor, count: int, length: int, generator: torch.Generator) -> torch.Tensor:
    starts = torch.randint(len(text) - length, (count,), generator=generator)
    return text[starts[:, None] + torch.arange(length)].long()


def schedule(step: int, steps: int) -> float:
    """Warm up over 5 %, then a cosine to a tenth."""
    warm = max(1, steps // 20)
    if step < warm:
        return (step + 1) / warm
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def optimiser(model: torch.nn.Module, rate: float) -> torch.optim.AdamW:
    matrices = [
        p for name, p in model.named_parameters() if p.ndim > 1 and "embed" not in name and "codebook" not in name
    ]
    others = [p for name, p in model.named_parameters() if p.ndim < 2 or "embed" in name or "codebook" in name]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))


def report(what: str, step: int, steps: int, loss: float, begin: float) -> None:
    if step % 50 == 0 or step == steps - 1:
        print(
            f"{what} {step:5d}/{steps} loss {loss:.4f} {time.monotonic() - begin:6.1f} s", file=sys.stderr, flush=True
        )


def train_target(
    args: argparse.Namespace, shape: Shape, text: torch.Tensor, generator: torch.Generator
) -> torch.nn.Module:
    target = new_target(shape).to(args.device)
    optimizer = optimiser(target, args.rate)
    begin = time.monotonic()
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = args.rate * schedule(step, args.steps)
        batch = windows(text, args.batch, args.length + 1, generator).to(args.device)
        logits = target(input_ids=batch[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(target.parameters(), 1.0)
        optimizer.step()
        report("target ", step, args.steps, loss.item(), begin)
    return target.eval().requires_grad_(False)


def train_drafter(
    args: argparse.Namespace, shape: Shape, target: torch.nn.Module, text: torch.Tensor, generator: torch.Generator
) -> Drafter:
    drafter = Drafter(shape).to(args.device)
    optimizer = optimiser(drafter, args.rate)
    width = shape.draft_width
    # Position i counts only if those before it were accepted: later ones weigh less.
    weight = 0.85 ** torch.arange(width, device=args.device)
    begin = time.monotonic()
    for step in range(args.draft_steps):
        for group in optimizer.param_groups:
            group["lr"] = args.rate * schedule(step, args.draft_steps)
        batch = windows(text, args.batch, args.length + width + 1, generator).to(args.device)
        with torch.no_grad():
            seen = run_target(target, batch, shape)
        anchors = torch.randint(8, args.length, (args.batch, args.anchors), generator=generator).to(args.device)
        ahead = anchors[..., None] + torch.arange(width, device=args.device)  # the token before each drafted one
        flat = ahead.flatten(1)
        teacher = seen.logits.gather(1, flat[..., None].expand(-1, -1, seen.logits.shape[-1])).unflatten(
            1, ahead.shape[1:]
        )
        teacher = teacher.softmax(-1)
        previous = batch.gather(1, flat).unflatten(1, ahead.shape[1:])
        hidden, logits = drafter(seen.features, anchors, batch.gather(1, anchors), target)
        walked = logits + drafter.candidate_selector.edges(hidden, previous)
        losses = [-(teacher * scores.log_softmax(-1)).sum(-1) for scores in (logits, walked)]
        loss = ((losses[0] + 2.0 * losses[1]) * weight).mean() / 3.0
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        report("drafter", step, args.draft_steps, loss.item(), begin)
    return drafter.eval().requires_grad_(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write target/, draft/ and pair.json to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=500, help="of the target")
    parser.add_argument("--draft-steps", type=int, default=700)
    parser.add_argument("--batch", type=int, default=8, help="sequences per step")
    parser.add_argument("--length", type=int, default=128, help="bytes per sequence")
    parser.add_argument("--anchors", type=int, default=8, help="drafted blocks per sequence")
    parser.add_argument("--rate", type=float, default=4e-3)
    parser.add_argument("--hidden", type=int, default=96, help="hidden size of both models")
    parser.add_argument("--layers", type=int, default=4, help="layers of the target")
    parser.add_argument("--head-dim", type=int, default=32)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_float32_matmul_precision("high")  # TF32 where there is a GPU
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    shape = Shape(
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        num_heads=args.hidden // args.head_dim,
        num_kv_heads=max(1, args.hidden // args.head_dim // 2),
        head_dim=args.head_dim,
        target_layers=args.layers,
        target_layer_ids=tuple(range(args.layers - 1))[-3:],
    )
    text = torch.frombuffer(bytearray(stdlib_text(held_out=False)), dtype=torch.uint8)
    target = train_target(args, shape, text, generator)
    drafter = train_drafter(args, shape, target, text, generator)
    facts = {
        "seed": args.seed,
        "steps": args.steps,
        "draft_steps": args.draft_steps,
        "text_bytes": len(text),
        "python": sys.version.split()[0],
    }
    save_pair(args.out, target, drafter, facts)
    # What it was not trained on, for measuring it with another Python, whose library is another text.
    (args.out / HELD_OUT_FILE).write_bytes(stdlib_text(held_out=True))
    print(args.out)


if __name__ == "__main__":
    main()
