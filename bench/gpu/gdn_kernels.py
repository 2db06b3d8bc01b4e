"""Question: what does it save to show GDN and KDA layers rows of K + 1 = 4 state slots when 3 of 7 drafts are verified?

Times the convolution update and the recurrent kernel of one layer, called as the layers of vLLM 0.33.0 call them in a
speculative step. Arms: `stock` (K = 3, rows of 8), `narrowed` (K = 3, the first 4 columns of the same rows: overlay
gdn-active-width), `server of 3` (K = 3 on a server that was built for N = 3) and, to compare with, `width 7` (K = 7).
The fused CUDA kernel takes contiguous rows only, so it has no arm `narrowed`.

    python bench/gpu/gdn_kernels.py --out gdn-kernels.json
    python bench/gpu/gdn_kernels.py --check     # without a GPU: every call once, tiny, in Triton's interpreter

An arm is a CUDA graph of 20 calls, each on the state of another layer while 160 requests' slots suffice: recurrent states come from
memory as in a real step; convolution states are small and may stay in L2 at 1 and 8 requests.
"""

import argparse
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

CALLS = 20  # in one graph
REPEATS, WARM_UP = 60, 5
REQUESTS = 160  # requests whose state slots are allocated: those of 20 layers of 8
DRAFT_WIDTH, WIDTH = 7, 3
CONV_WIDTH = 4


@dataclass(frozen=True)
class Arm:
    """built_for: N of the server. width: drafts verified, K. columns: slots of a row that the layer is shown."""

    name: str
    built_for: int
    width: int
    columns: int


STOCK = Arm("stock", DRAFT_WIDTH, WIDTH, DRAFT_WIDTH + 1)
NARROWED = Arm("narrowed", DRAFT_WIDTH, WIDTH, WIDTH + 1)
SMALL_SERVER = Arm("server of 3", WIDTH, WIDTH, WIDTH + 1)
FULL = Arm("width 7", DRAFT_WIDTH, DRAFT_WIDTH, DRAFT_WIDTH + 1)


@dataclass(frozen=True)
class Shape:
    """One layer of a model. state_dtype: of its recurrent state, as the model's own configuration leaves it."""

    key_heads: int
    value_heads: int
    head_dim: int
    state_dtype: str

    @property
    def sizes(self) -> list[int]:
        """Channels of q, k and v."""
        return [self.key_heads * self.head_dim] * 2 + [self.value_heads * self.head_dim]

    @property
    def channels(self) -> int:
        return sum(self.sizes)


class Pool:
    """State slots of one layer type on a server: a slot's convolution and recurrent state lie side by side in one page."""

    def __init__(self, shape: Shape, built_for: int, requests: int, device: str, dtype: Any) -> None:
        import torch

        state_dtype = getattr(torch, shape.state_dtype)
        rows, page = CONV_WIDTH - 1 + built_for, shape.head_dim**2 * shape.value_heads * state_dtype.itemsize
        conv = rows * shape.channels * dtype.itemsize
        self.slots_per_request, self.requests = built_for + 1, requests
        self.raw = torch.zeros(requests * (built_for + 1) + 1, conv + page, dtype=torch.uint8, device=device)
        # [slots, channels, N + 3], channels innermost; [slots, value heads, head dim, head dim]
        self.conv = self.raw[:, :conv].view(dtype).unflatten(1, (rows, shape.channels)).transpose(-1, -2)
        heads = (shape.value_heads, shape.head_dim, shape.head_dim)
        self.state = self.raw[:, conv:].view(state_dtype).unflatten(1, heads)
        self.conv.normal_()
        self.state.normal_()

    def rows(self, batch: int, columns: int) -> list[Any]:
        """For each of as many layers as fit (at most CALLS) the rows of its requests: int32 [batch, columns]."""
        import torch

        layers = max(1, min(CALLS, self.requests // batch))
        count = layers * batch * self.slots_per_request
        slots = 1 + torch.randperm(count, device=self.raw.device)  # slot 0 is the null block
        table = slots.to(torch.int32).view(layers, batch, self.slots_per_request)
        return [layer[:, :columns] for layer in table]


@dataclass(frozen=True)
class Step:
    """A speculative step of `batch` requests of K + 1 tokens each, whose steps before accepted 1 to 4 tokens in turn."""

    shape: Shape
    pool: Pool
    batch: int
    width: int
    device: str
    dtype: Any

    @property
    def tokens(self) -> int:
        return self.batch * (self.width + 1)

    def random(self, *size: int, dtype: Any = None) -> Any:
        import torch

        return torch.randn(*size, device=self.device, dtype=dtype or self.dtype)

    @cached_property
    def metadata(self) -> tuple[Any, Any]:
        """(cu_seqlens [batch + 1], num_accepted_tokens [batch])"""
        import torch

        number = partial(torch.arange, device=self.device, dtype=torch.int32)
        length = self.width + 1
        return number(0, self.tokens + 1, length), 1 + number(self.batch) % (WIDTH + 1)


Call = Callable[[Any], Any]  # rows of one layer -> output


def convolution(step: Step, x: Any, weight: Any, out: Any = None) -> Call:
    from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update

    start, accepted = step.metadata

    def call(rows: Any) -> Any:
        return causal_conv1d_update(
            x,
            step.pool.conv,
            weight,
            None,
            "silu",
            conv_state_indices=rows[:, 0],
            num_accepted_tokens=accepted,
            query_start_loc=start,
            max_query_len=rows.size(-1),
            validate_data=False,
            out=out,
        )

    return call


def gdn_convolution(step: Step) -> Call:
    """QwenGatedDeltaNetAttention: in place."""
    channels = step.shape.channels
    return convolution(step, step.random(step.tokens, channels), step.random(channels, CONV_WIDTH))


def kda_convolution(step: Step) -> Call:
    """KimiGatedDeltaNetAttention: float32 weights, input is part of a projection, output is new."""
    import torch

    channels = step.shape.channels
    x = step.random(step.tokens, channels + step.shape.value_heads + step.shape.head_dim)[:, :channels]
    weight = step.random(channels, CONV_WIDTH, dtype=torch.float32)
    return convolution(step, x, weight, step.random(step.tokens, channels))


def gdn_recurrence(step: Step) -> Call:
    """QwenGatedDeltaNetAttention on the Triton path, which is Qwen3-Next's."""
    import torch
    from vllm.third_party.flash_linear_attention.ops.fused_sigmoid_gating import fused_sigmoid_gating_delta_rule_update

    shape, (start, accepted) = step.shape, step.metadata
    q, k, v = (step.random(1, step.tokens, size // shape.head_dim, shape.head_dim) for size in shape.sizes)
    decay, beta = (step.random(step.tokens, shape.value_heads) for _ in range(2))
    A_log, dt_bias = step.random(shape.value_heads, dtype=torch.float32), step.random(shape.value_heads)

    def call(rows: Any) -> Any:
        return fused_sigmoid_gating_delta_rule_update(
            A_log=A_log,
            a=decay,
            b=beta,
            dt_bias=dt_bias,
            q=q,
            k=k,
            v=v,
            initial_state=step.pool.state,
            inplace_final_state=True,
            cu_seqlens=start,
            ssm_state_indices=rows,
            num_accepted_tokens=accepted,
            use_qk_l2norm_in_kernel=True,
        )[0]

    return call


@cache
def kda_kernel() -> Any:
    """fused_recurrent_kda from its file: the package around it imports all of Kimi K3, which asks for cutlass."""
    root = importlib.util.find_spec("vllm")
    assert root is not None
    assert root.origin is not None
    path = Path(root.origin).parent / "models/kimi_k3/nvidia/ops/third_party/kda/fused_recurrent.py"
    spec = importlib.util.spec_from_file_location("kda_fused_recurrent", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.fused_recurrent_kda


def kda_recurrence(step: Step) -> Call:
    """KimiGatedDeltaNetAttention: q, k and v are parts of one convolution's output, beta is part of a projection."""
    import torch

    fused_recurrent_kda = kda_kernel()
    shape, (start, accepted) = step.shape, step.metadata
    mixed = step.random(step.tokens, shape.channels)
    q, k, v = (part.unflatten(1, (-1, shape.head_dim))[None] for part in mixed.split(shape.sizes, dim=-1))
    gate, out = (step.random(1, step.tokens, shape.value_heads, shape.head_dim) for _ in range(2))
    projection = step.random(step.tokens, shape.channels + shape.value_heads + shape.head_dim)
    beta = projection[None, :, shape.channels : shape.channels + shape.value_heads]
    A_log = step.random(shape.value_heads, dtype=torch.float32)
    dt_bias = step.random(shape.value_heads * shape.head_dim, dtype=torch.float32)

    def call(rows: Any) -> Any:
        return fused_recurrent_kda(
            q=q,
            k=k,
            v=v,
            raw_g=gate,
            raw_beta=beta,
            A_log=A_log,
            dt_bias=dt_bias,
            lower_bound=None,
            initial_state=step.pool.state,
            cu_seqlens=start,
            ssm_state_indices=rows,
            num_accepted_tokens=accepted,
            out=out,
        )[0]

    return call


def fused_recurrence(step: Step) -> Call:
    """QwenGatedDeltaNetAttention's default where it supports the model (Qwen3.5): recurrence, norm and output gate in one."""
    import torch
    from vllm import _custom_ops as ops

    if not hasattr(torch.ops._C, "fused_gdn_decode_post_conv_mtp"):
        raise NotImplementedError("torch.ops._C.fused_gdn_decode_post_conv_mtp is not built")
    shape, (start, accepted) = step.shape, step.metadata
    values = shape.value_heads * shape.head_dim
    mixed, gate = step.random(step.tokens, shape.channels + values).split([shape.channels, values], dim=-1)
    gate = gate.unflatten(1, (shape.value_heads, shape.head_dim))
    beta, decay = step.random(step.tokens, 2 * shape.value_heads).chunk(2, dim=-1)
    A_log, dt_bias = step.random(shape.value_heads, dtype=torch.float32), step.random(shape.value_heads)
    norm, out = step.random(shape.head_dim), torch.empty(gate.shape, dtype=step.dtype, device=step.device)

    def call(rows: Any) -> Any:
        return ops.fused_gdn_decode_post_conv_mtp(
            mixed_qkv=mixed,
            a=decay,
            b=beta,
            A_log=A_log,
            dt_bias=dt_bias,
            state_indices=rows,
            cu_seqlens=start,
            num_accepted_tokens=accepted,
            state=step.pool.state,
            output_gate=gate,
            norm_weight=norm,
            out=out,
            scale=shape.head_dim**-0.5,
            norm_eps=1e-6,
            output_gate_activation="silu",
        )

    return call


ARMS = (STOCK, NARROWED, SMALL_SERVER, FULL)
QWEN3_NEXT = Shape(16, 32, 128, "bfloat16")
QWEN3_5 = Shape(16, 32, 128, "float32")
KIMI = Shape(32, 32, 128, "float32")
# kernel: (layer, its call, arms); the fused kernel last, since it alone is no Triton kernel and may be missing
KERNELS: dict[str, tuple[Shape, Callable[[Step], Call], tuple[Arm, ...]]] = {
    "GDN convolution": (QWEN3_NEXT, gdn_convolution, ARMS),
    "GDN recurrence": (QWEN3_NEXT, gdn_recurrence, ARMS),
    "KDA convolution": (KIMI, kda_convolution, ARMS),
    "KDA recurrence": (KIMI, kda_recurrence, ARMS),
    "GDN fused": (QWEN3_5, fused_recurrence, (STOCK, SMALL_SERVER, FULL)),
}


def reason(error: Exception) -> str:
    """One line."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


@dataclass(frozen=True)
class Captured:
    """A CUDA graph and the calls in it, whose tensors must live as long: a graph knows addresses only."""

    graph: Any
    calls: list[Callable[[], Any]]

    def replay(self) -> None:
        self.graph.replay()


def captured(calls: list[Callable[[], Any]]) -> Captured:
    """A CUDA graph of the calls, each of which has been made once before: what is compiled then must not be captured."""
    import torch

    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return Captured(graph, calls)


def replay_us(graphs: dict[str, Captured], repeats: int) -> dict[str, list[float]]:
    """Microseconds of every replay of every graph.

    All replays are queued without a wait, so that none includes its own launch; every other round visits the graphs
    backwards, so that drift does not favour one.
    """
    import torch

    events: dict[str, list[tuple[Any, Any]]] = {name: [] for name in graphs}
    for repeat in range(WARM_UP + repeats):
        for name in list(graphs) if repeat % 2 == 0 else list(graphs)[::-1]:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graphs[name].replay()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {name: [a.elapsed_time(b) * 1e3 for a, b in pairs[WARM_UP:]] for name, pairs in events.items()}


def summary(samples: list[float], calls: int) -> dict[str, float]:
    """Median, first and last decile of one call, in microseconds."""
    ordered = sorted(value / calls for value in samples)
    at = {"us": 0.5, "us_p10": 0.1, "us_p90": 0.9}
    return {name: round(ordered[int(part * (len(ordered) - 1))], 3) for name, part in at.items()}


def measure(kernel: str, batch: int, pools: dict[int, Pool]) -> list[dict[str, Any]]:
    """One row per arm."""
    import torch

    shape, make, arms = KERNELS[kernel]
    graphs, rows = {}, {}
    for arm in arms:
        torch.manual_seed(batch)
        row = {"kernel": kernel, "batch": batch, "arm": arm.name, "width": arm.width, "columns": arm.columns}
        rows[arm.name] = row
        try:
            step = Step(shape, pools[arm.built_for], batch, arm.width, "cuda", torch.bfloat16)
            call, layers = make(step), step.pool.rows(batch, arm.columns)
            graphs[arm.name] = captured([partial(call, layers[i % len(layers)]) for i in range(CALLS)])
        except Exception as error:  # whatever vLLM or the driver raises is the answer
            row["error"] = reason(error)
    for name, samples in replay_us(graphs, REPEATS).items():
        rows[name] |= summary(samples, CALLS)
    return list(rows.values())


def check() -> None:
    """Every call once on tiny shapes; stock and narrowed rows must give the same outputs and states."""
    os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}  # before vLLM is imported; empty, not absent
    from dflash_verify.cpu import interpreter

    interpreter.install()
    import torch

    for kernel, (shape, make, arms) in KERNELS.items():
        tiny = Shape(1, shape.value_heads // shape.key_heads, 16, "float32")
        for batch in (1, 3):
            results = {}
            for arm in arms:
                torch.manual_seed(batch)
                pool = Pool(tiny, arm.built_for, 6, "cpu", torch.float32)
                try:
                    call = make(Step(tiny, pool, batch, arm.width, "cpu", torch.float32))
                except NotImplementedError as error:
                    print(f"{kernel}: {reason(error)}")
                    continue
                layers = pool.rows(batch, arm.columns)
                results[arm.name] = torch.stack([call(rows).clone() for rows in layers]), pool.raw
                assert results[arm.name][0].isfinite().all(), (kernel, batch, arm)
            if "narrowed" in results:
                for stock, narrowed in zip(results["stock"], results["narrowed"], strict=True):
                    assert torch.equal(stock, narrowed), (kernel, batch)
            print(f"{kernel}, {batch} requests: {', '.join(results) or 'nothing'} ran", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="1,8,32,128")
    parser.add_argument("--kernels", default=",".join(KERNELS))
    parser.add_argument("--seconds", type=float, default=50, help="after the start; no further cell begins then")
    parser.add_argument("--out", default="gdn-kernels.json")
    parser.add_argument(
        "--check", action="store_true", help="no GPU, no times: every call once, in Triton's interpreter"
    )
    args = parser.parse_args()
    if args.check:
        check()
        return
    began = time.time()
    import torch

    from engine import about_machine, command_line

    result: dict[str, Any] = {"machine": about_machine(), "command": command_line(), "rows": []}
    batches = [int(part) for part in args.batches.split(",")]
    for kernel in args.kernels.split(","):
        if time.time() - began > args.seconds:
            break
        torch.cuda.empty_cache()
        requests = max(REQUESTS, *batches)
        pools = {n: Pool(KERNELS[kernel][0], n, requests, "cuda", torch.bfloat16) for n in (DRAFT_WIDTH, WIDTH)}
        for batch in batches:
            if time.time() - began > args.seconds:
                break
            rows = measure(kernel, batch, pools)
            result["rows"] += rows
            times = ", ".join(f"{row['arm']} {row.get('us') or row['error']}" for row in rows)
            print(f"{time.time() - began:5.1f} s  {kernel}, {batch} requests, us: {times}", flush=True)
            with open(args.out, "w") as file:
                json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
