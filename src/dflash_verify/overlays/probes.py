"""What `check --gpu` runs: vLLM's own graph managers, builders and kernels, overlays on against overlays off.

No model is loaded. The configurations are real but for the draft and target model, of which nothing here depends on more than a
few numbers.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

from dflash_verify.overlays.attach import MARKER, apply, revert
from dflash_verify.settings import load

DRAFT_WIDTH, SLOTS, MANY_SLOTS, WIDTHS = 7, 8, 64, (1, 3, 7)
CONV_WIDTH = 4

Schedule = list[tuple[int, int, int]]


@dataclass(frozen=True, slots=True)
class Probe:
    """One question that was put to the device, and its answer."""

    name: str
    ok: bool
    detail: str


def probe_config(
    schedule: Schedule | None,
    *,
    draft_width: int = DRAFT_WIDTH,
    max_num_seqs: int = SLOTS,
    capture_sizes: Sequence[int] | None = None,
    mode: str = "FULL_AND_PIECEWISE",
    device: str = "cpu",
    **speculative: Any,
) -> Any:
    """A real VllmConfig whose speculative config is a real SpeculativeConfig without the models that it would load."""
    import torch
    from vllm.config import DeviceConfig, VllmConfig
    from vllm.config.compilation import CUDAGraphMode
    from vllm.config.speculative import SpeculativeConfig

    config = VllmConfig(device_config=DeviceConfig(device=device))
    values = {
        "method": "dflash",
        "num_speculative_tokens": draft_width,
        "num_speculative_tokens_per_batch_size": schedule,
        "enable_adaptive_verification": False,
        "draft_model_config": None,
        "parallel_drafting": True,
    }
    drafter = object.__new__(SpeculativeConfig)
    for name, value in (values | speculative).items():
        object.__setattr__(drafter, name, value)
    text = SimpleNamespace(linear_key_head_dim=64, linear_value_head_dim=64)
    model = SimpleNamespace(hf_text_config=text, hf_config=text, dtype=torch.bfloat16)
    object.__setattr__(config, "speculative_config", drafter)
    object.__setattr__(config, "model_config", model)
    lengths = range(1, draft_width + 2)
    sizes = sorted(capture_sizes or {n * length for n in range(1, max_num_seqs + 1) for length in lengths})
    config.compilation_config.cudagraph_mode = CUDAGraphMode[mode]
    config.compilation_config.cudagraph_capture_sizes = sizes
    config.compilation_config.max_cudagraph_capture_size = sizes[-1]
    config.scheduler_config.max_num_seqs = max_num_seqs
    return config


@contextmanager
def single_rank() -> Iterator[None]:
    """Graph managers ask for the pipeline rank; here there is one, without torch.distributed."""
    from vllm.v1.worker.gpu import cudagraph_utils

    rank = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    platform = type(cudagraph_utils.current_platform)
    with (
        mock.patch.object(cudagraph_utils, "get_pp_group", return_value=rank),
        mock.patch.object(platform, "get_global_graph_pool", return_value=None, create=True),
    ):
        yield


def graph_managers(config: Any, draft_query_len: int = DRAFT_WIDTH + 1, device: str = "cpu") -> tuple[Any, Any]:
    """(target manager, drafter manager), as if their graphs had been captured. Call it within `single_rank`."""
    import torch
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager
    from vllm.v1.worker.gpu.spec_decode.dflash.cudagraph import DFlashCudaGraphManager

    on = torch.device(device)
    mode = config.compilation_config.cudagraph_mode
    target = ModelCudaGraphManager(config, on, mode, config.speculative_config.num_speculative_tokens + 1)
    # As DFlashSpeculator.init_cudagraph_manager does.
    draft = DFlashCudaGraphManager(config, on, CUDAGraphMode.FULL_DECODE_ONLY, decode_query_len=draft_query_len)
    target._graphs_captured = draft._graphs_captured = True
    return target, draft


def graph_mode(manager: Any, num_reqs: int, query_len: int) -> str:
    """How a batch of `num_reqs` requests of `query_len` tokens each would run: FULL, PIECEWISE or NONE."""
    return str(manager.dispatch(num_reqs, num_reqs * query_len, query_len, 0).cg_mode.name)


def run_probes(device: str = "cuda") -> list[Probe]:
    """Ask both graph managers for FULL graphs at every width, and run GDN and KDA steps narrowed and stock.

    The overlays are applied for the time of the call. On "cpu" the kernels need Triton's interpreter.
    """
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        return [Probe("device", False, "torch sees no CUDA device: run check --gpu on the machine that serves")]
    apply(load({"DFLASH_VERIFY_TOKENS": "auto:1,3,7"}))
    try:
        probes = [_graphs(device)]
        for name, recurrence in _recurrences().items():
            probes += [_narrow_step(name, recurrence, width, device) for width in WIDTHS if width < DRAFT_WIDTH]
    finally:
        revert()
    return probes


def _graphs(device: str) -> Probe:
    missing = []
    schedules: list[Schedule] = [[(1, SLOTS, width)] for width in WIDTHS]
    mixed: Schedule = [(i, i, width) for i, width in enumerate(WIDTHS, 1)]
    schedules.append(mixed)
    with single_rank():
        for slots in (1, SLOTS, MANY_SLOTS):
            for schedule in schedules:
                # With many slots only every eighth request count has sizes of its own, as in a plan.
                counts = range(1, slots + 1) if slots < MANY_SLOTS else range(8, slots + 1, 8)
                sizes = sorted({n * (width + 1) for n in counts for width in (*WIDTHS, DRAFT_WIDTH)})
                config = probe_config(schedule, max_num_seqs=slots, device=device, capture_sizes=sizes)
                target, draft = graph_managers(config, device=device)
                for n in range(1, slots + 1):
                    wanted = [("target", target, width + 1) for _, _, width in schedule]
                    for who, manager, length in [*wanted, ("drafter", draft, DRAFT_WIDTH + 1)]:
                        if graph_mode(manager, n, length) != "FULL":
                            missing.append(f"{who}, {n} requests of {length} tokens, schedule {schedule}")
    detail = f"FULL for target and drafter at widths {', '.join(map(str, WIDTHS))}"
    return Probe("graph managers", not missing, missing[0] if missing else detail)


# -- GDN and KDA ------------------------------------------------------------------------------------------------------

Recurrence = Callable[["_Step", Any, Any, Any], Any]  # (step, convolved input, recurrent state, metadata) -> output


@dataclass(frozen=True)
class _Step:
    """The inputs of one speculative step of one layer: n requests, K + 1 tokens each, H heads of size D."""

    heads: int
    head_dim: int
    conv_input: Any  # [tokens, 3 H D]
    conv_weight: Any  # [3 H D, CONV_WIDTH]
    gate: Any  # [1, tokens, H, D], log decay
    beta: Any  # [1, tokens, H], before the sigmoid for GDN
    decay: Any  # [tokens, H]
    A_log: Any  # [H]

    def qkv(self, mixed: Any) -> list[Any]:
        return [part.reshape(1, -1, self.heads, self.head_dim).contiguous() for part in mixed.chunk(3, dim=-1)]


def _recurrences() -> dict[str, Recurrence]:
    """The recurrent kernels that walk the rows, of the layers that this release has."""
    from vllm.third_party.flash_linear_attention.ops.fused_sigmoid_gating import fused_sigmoid_gating_delta_rule_update
    from vllm.third_party.flash_linear_attention.ops.kda import fused_recurrent_kda_fwd

    def rows(metadata: Any) -> dict[str, Any]:
        return {
            "cu_seqlens": metadata.spec_query_start_loc[: metadata.num_spec_decodes + 1],
            "ssm_state_indices": metadata.spec_state_indices_tensor,
            "num_accepted_tokens": metadata.num_accepted_tokens,
        }

    def gdn(step: _Step, mixed: Any, state: Any, metadata: Any) -> Any:
        q, k, v = step.qkv(mixed)
        return fused_sigmoid_gating_delta_rule_update(
            A_log=step.A_log,
            a=step.decay,
            b=step.beta[0],
            dt_bias=step.A_log,
            q=q,
            k=k,
            v=v,
            initial_state=state,
            inplace_final_state=True,
            use_qk_l2norm_in_kernel=True,
            **rows(metadata),
        )[0]

    def kda(forward: Any) -> Recurrence:
        def run(step: _Step, mixed: Any, state: Any, metadata: Any) -> Any:
            q, k, v = step.qkv(mixed)
            return forward(
                q=q,
                k=k,
                v=v,
                g=step.gate,
                beta=step.beta.sigmoid(),
                scale=step.head_dim**-0.5,
                initial_state=state,
                inplace_final_state=True,
                use_qk_l2norm_in_kernel=True,
                **rows(metadata),
            )[0]

        return run

    found = {"GDN (Qwen, Triton)": gdn, "KDA (Kimi, Bailing)": kda(fused_recurrent_kda_fwd)}
    try:
        from vllm.models.glm5next.nvidia.ops.third_party.kda.kernels import fused_recurrent_kda_fwd as glm
    except ModuleNotFoundError:  # before 0.30
        return found
    return found | {"KDA (GLM-5.3)": kda(glm)}


def _narrow_step(name: str, recurrence: Recurrence, width: int, device: str) -> Probe:
    """One step at `width` after a step of any width, narrowed and stock: eagerly, and from a graph captured before."""
    import torch
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder

    torch.manual_seed(width)
    n, length, columns = SLOTS, width + 1, DRAFT_WIDTH + 1
    heads, head_dim = (2, 64) if device == "cuda" else (1, 16)
    tokens, channels, slots = n * length, 3 * heads * head_dim, n * columns + 1
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def random(*shape: int) -> Any:
        return torch.randn(*shape, device=device, dtype=dtype)

    step = _Step(
        heads,
        head_dim,
        random(tokens, channels),
        random(channels, CONV_WIDTH),
        -random(1, tokens, heads, head_dim).abs(),
        random(1, tokens, heads),
        random(tokens, heads),
        torch.randn(heads, device=device),
    )
    conv_state = random(slots, channels, CONV_WIDTH - 1 + DRAFT_WIDTH)
    state = torch.randn(slots, heads, head_dim, head_dim, device=device)
    # Slots of another batch are in the rows when the graph is captured; the step before accepted 1 .. N + 1 tokens.
    table = 1 + torch.randperm(n * columns, device=device).to(torch.int32).view(n, columns)
    accepted = (1 + torch.arange(n, device=device, dtype=torch.int32) % columns).to(torch.int32)
    drafts = torch.full((n,), width, dtype=torch.int32)

    ours, stock = (_gdn_builder(GDNAttentionMetadataBuilder, device) for _ in range(2))
    original = getattr(GDNAttentionMetadataBuilder.build, MARKER).original

    def run(metadata: Any, conv: Any, recurrent: Any) -> Any:
        return recurrence(step, _convolution(step, conv, metadata), recurrent, metadata)

    expected_state = [conv_state.clone(), state.clone()]
    expected = run(original(stock, 0, _common(n, length, table), accepted, drafts), *expected_state).clone()
    eager_state = [conv_state.clone(), state.clone()]
    metadata = ours.build(0, _common(n, length, table), accepted, drafts)
    results = {"eager": (run(metadata, *eager_state), eager_state)}
    shown = metadata.spec_state_indices_tensor.shape[1]
    if device == "cuda":
        graph_state = [conv_state.clone(), state.clone()]
        captured = ours.build_for_cudagraph_capture(_common(n, length, table.flip(0)))
        for _ in range(2):  # warm-up outside of the capture, on copies
            run(captured, conv_state.clone(), state.clone())
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = run(captured, *graph_state)
        for live, before in zip(graph_state, (conv_state, state), strict=True):
            live.copy_(before)
        ours.build(0, _common(n, length, table), accepted, drafts)  # writes the buffers that the graph reads
        graph.replay()
        torch.cuda.synchronize()
        results["graph"] = (output, graph_state)
    wrong = [f"shows {shown} columns instead of {length}"] if shown != length else []
    for how, (output, states) in results.items():
        pairs = [("output", output, expected), *zip(("conv state", "state"), states, expected_state, strict=True)]
        for what, a, b in pairs:
            if not torch.equal(a, b):
                difference = (a.float() - b.float()).abs().max().item()
                wrong.append(f"{how} {what} differs from stock by up to {difference:.3g}")
    detail = f"equal to stock bit for bit ({', '.join(results)}), {shown} of {columns} columns shown"
    return Probe(f"{name}, width {width}", not wrong, "; ".join(wrong) or detail)


def _gdn_builder(builder: Any, device: str) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import MambaSpec

    spec = MambaSpec(
        block_size=16, shapes=((CONV_WIDTH,),), dtypes=(torch.float32,), num_speculative_blocks=DRAFT_WIDTH
    )
    return builder(spec, ["probe"], probe_config(None, device=device), torch.device(device))


def _common(n: int, length: int, table: Any) -> Any:
    """Common metadata of `n` requests of `length` tokens each, far from their start."""
    import torch
    from vllm.v1.attention.backend import CommonAttentionMetadata

    start = torch.arange(0, (n + 1) * length, length, dtype=torch.int32)
    seq_lens = torch.full((n,), 64, dtype=torch.int32)
    fields = {
        "query_start_loc": start.to(table.device),
        "query_start_loc_cpu": start,
        "seq_lens": seq_lens.to(table.device),
        "num_reqs": n,
        "num_actual_tokens": n * length,
        "max_query_len": length,
        "max_seq_len": 64,
        "block_table_tensor": table,
        "slot_mapping": torch.zeros(n * length, dtype=torch.int64, device=table.device),
        "is_prefilling": torch.zeros(n, dtype=torch.bool),
        "seq_lens_cpu_upper_bound": seq_lens,
        "_seq_lens_cpu": seq_lens,
    }
    known = CommonAttentionMetadata.__dataclass_fields__
    return CommonAttentionMetadata(**{name: value for name, value in fields.items() if name in known})


def _convolution(step: _Step, state: Any, metadata: Any) -> Any:
    """The short convolution as every GDN and KDA layer calls it."""
    from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update

    rows = metadata.spec_state_indices_tensor
    return causal_conv1d_update(
        step.conv_input.clone(),
        state,
        step.conv_weight,
        None,
        "silu",
        conv_state_indices=rows[:, 0][: metadata.num_spec_decodes],
        num_accepted_tokens=metadata.num_accepted_tokens,
        query_start_loc=metadata.spec_query_start_loc,
        max_query_len=rows.size(-1),
        validate_data=False,
    )
