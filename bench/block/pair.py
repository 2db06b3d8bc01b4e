"""A small target and the DFlash2 drafter for it, in PyTorch: trainable here, loadable by vLLM.

The target is transformers' Qwen3. The drafter computes what vLLM's DFlash2Qwen3ForCausalLM computes, with the same tensor
names: keys and values of the context come from the target's hidden states (`fc`, `hidden_norm`, then each layer's
projections), the query block is the anchor token and the mask tokens after it, attention is not causal inside the block,
every sub-layer sits between two grouped convolutions over the block, and a selector walks the most likely candidates,
scoring each edge from one token to the next. Embedding and head are the target's.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from dflash_verify.cpu.models import EOS_ID, MASK_ID, PAD_ID, VOCAB_SIZE, write_tokenizer


@dataclass(frozen=True)
class Shape:
    hidden_size: int = 128
    intermediate_size: int = 384
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    target_layers: int = 4
    draft_layers: int = 2
    target_layer_ids: tuple[int, ...] = (0, 1, 2)
    draft_width: int = 7
    conv_taps: int = 3
    conv_group_size: int = 16
    selector_rank: int = 64
    selector_top_k: int = 16
    max_positions: int = 2048
    rope_theta: float = 10000.0
    eps: float = 1e-6


def qwen3_config(shape: Shape, layers: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_positions,
        rms_norm_eps=shape.eps,
        tie_word_embeddings=False,
        rope_theta=shape.rope_theta,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        attn_implementation="sdpa",
    )


def new_target(shape: Shape) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(qwen3_config(shape, shape.target_layers))


@dataclass(frozen=True)
class TargetOutput:
    """logits [B, L, V]; features [B, L, len(target_layer_ids) * H]: what the drafter reads."""

    logits: torch.Tensor
    features: torch.Tensor


def run_target(target: Qwen3ForCausalLM, tokens: torch.Tensor, shape: Shape) -> TargetOutput:
    """tokens: [B, L], right-padded rows are fine (attention is causal)."""
    out = target(input_ids=tokens, output_hidden_states=True, use_cache=False)
    # hidden_states[0] is the embedding, [i + 1] the residual stream after layer i (the last one is normalised).
    return TargetOutput(out.logits, torch.cat([out.hidden_states[i + 1] for i in shape.target_layer_ids], dim=-1))


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


def rotate(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary embedding, halves paired (neox). x: [..., heads, head_dim]; positions: x.shape[:-2]."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = positions[..., None].float() * frequency
    cos, sin = angle.cos()[..., None, :], angle.sin()[..., None, :]
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class GroupedConv(nn.Module):
    """Two causal convolutions over the block, around a sub-layer; their kernels depend on the position's own state."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.taps, self.groups = shape.conv_taps, shape.hidden_size // shape.conv_group_size
        base = torch.zeros(2, shape.conv_taps, shape.hidden_size)
        base[:, 0] = 1.0
        self.base_kernel = nn.Parameter(base)
        self.kernel_projection = nn.Linear(shape.hidden_size, 2 * shape.conv_taps * self.groups, bias=False)
        nn.init.normal_(self.kernel_projection.weight, std=0.02 * shape.hidden_size**-0.5)

    def kernels(self, x: torch.Tensor) -> torch.Tensor:
        """[..., block, H] -> [..., block, 2, taps, groups], what each position adds to the base kernels."""
        return self.kernel_projection(x).unflatten(-1, (2, self.taps, self.groups))

    def convolve(self, x: torch.Tensor, delta: torch.Tensor, side: int) -> torch.Tensor:
        block = x.unflatten(-1, (self.groups, -1))
        kernel = self.base_kernel[side].unflatten(-1, (self.groups, -1)) + delta[..., side, :, :, None]
        out = kernel[..., 0, :, :] * block
        for tap in range(1, self.taps):
            out = out + kernel[..., tap, :, :] * F.pad(block, (0, 0, 0, 0, tap, 0))[..., : x.shape[-2], :, :]
        return out.flatten(-2)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        inner, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, inner, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv, bias=False)
        self.o_proj = nn.Linear(inner, shape.hidden_size, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.eps)

    def keys_values(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        key = self.k_proj(x).unflatten(-1, (-1, self.shape.head_dim))
        value = self.v_proj(x).unflatten(-1, (-1, self.shape.head_dim))
        return rotate(self.k_norm(key), positions, self.shape.rope_theta), value

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, context: torch.Tensor, visible: torch.Tensor
    ) -> torch.Tensor:
        """x: [B, A, S, H] query blocks at positions [B, A, S]; context: [B, L, H] at 0 .. L-1; visible: [B, A, L]."""
        batch, anchors, size, _ = x.shape
        query = rotate(
            self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.shape.head_dim))), positions, self.shape.rope_theta
        )
        own_key, own_value = self.keys_values(x, positions)
        length = context.shape[1]
        key, value = self.keys_values(context, torch.arange(length, device=x.device).expand(batch, -1))
        group = self.shape.num_heads // self.shape.num_kv_heads
        query = query.unflatten(-2, (self.shape.num_kv_heads, group)) * self.shape.head_dim**-0.5
        over_context = torch.einsum("basngd,blnd->bangsl", query, key)
        over_context = over_context.masked_fill(~visible[:, :, None, None, None, :], float("-inf"))
        over_block = torch.einsum("basngd,batnd->bangst", query, own_key)
        weights = torch.cat((over_context, over_block), dim=-1).softmax(-1)
        mixed = torch.einsum("bangsl,blnd->basngd", weights[..., :length], value)
        mixed = mixed + torch.einsum("bangst,batnd->basngd", weights[..., length:], own_value)
        return self.o_proj(mixed.reshape(batch, anchors, size, -1))


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(shape), MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.eps)
        self.attention_conv, self.mlp_conv = GroupedConv(shape), GroupedConv(shape)

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, context: torch.Tensor, visible: torch.Tensor
    ) -> torch.Tensor:
        inner = self.input_layernorm(x)
        delta = self.attention_conv.kernels(inner)
        inner = self.self_attn(self.attention_conv.convolve(inner, delta, 0), positions, context, visible)
        x = x + self.attention_conv.convolve(inner, delta, 1)
        inner = self.post_attention_layernorm(x)
        delta = self.mlp_conv.kernels(inner)
        return x + self.mlp_conv.convolve(self.mlp(self.mlp_conv.convolve(inner, delta, 0)), delta, 1)


class Selector(nn.Module):
    """The score of going from one token to the next, on top of each candidate's own logit."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.randn(VOCAB_SIZE, shape.selector_rank) * 0.3)
        self.successor_codebook = nn.Parameter(torch.zeros(VOCAB_SIZE, shape.selector_rank))
        self.hidden_projection = nn.Linear(shape.hidden_size, shape.selector_rank, bias=False)

    def edges(self, hidden: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """hidden [..., H], previous [...] token ids -> scores of every next token, [..., V]."""
        return (self.predecessor_codebook[previous] * self.hidden_projection(hidden)) @ self.successor_codebook.T


class Drafter(nn.Module):
    """vLLM's DFlash2, tensor names included."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(len(shape.target_layer_ids) * shape.hidden_size, shape.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.eps)
        self.norm = RMSNorm(shape.hidden_size, shape.eps)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.draft_layers))
        self.candidate_selector = Selector(shape)

    def forward(
        self, features: torch.Tensor, anchors: torch.Tensor, anchor_tokens: torch.Tensor, target: Qwen3ForCausalLM
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states and logits of the draft positions of several blocks per sequence.

        features: [B, L, F] of the target; anchors, anchor_tokens: [B, A], position and id of each block's first token, whose
        own features do not exist yet. Returns hidden [B, A, N, H] and logits [B, A, N, V] (before the selector).
        """
        context = self.hidden_norm(self.fc(features))
        size = 1 + self.shape.draft_width
        tokens = torch.full((*anchors.shape, size), MASK_ID, device=features.device)
        tokens[..., 0] = anchor_tokens
        positions = anchors[..., None] + torch.arange(size, device=features.device)
        visible = torch.arange(features.shape[1], device=features.device) < anchors[..., None]
        x = target.model.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, positions, context, visible)
        hidden = self.norm(x)[..., 1:, :]
        return hidden, target.lm_head(hidden)


@dataclass(frozen=True)
class Proposal:
    """tokens [B, N]; probs [B, N, V]: the distributions they were drawn from, in float64."""

    tokens: torch.Tensor
    probs: torch.Tensor


def propose(
    drafter: Drafter,
    target: Qwen3ForCausalLM,
    features: torch.Tensor,
    lengths: torch.Tensor,
    last_tokens: torch.Tensor,
    temperature: float,
    generator: torch.Generator,
) -> Proposal:
    """One block per sequence, as the DFlash2 speculator walks it; greedy at temperature 0.

    features: [B, L, F]; lengths: [B], the position of the anchor `last_tokens` (features before it are read).
    """
    hidden, logits = drafter(features, lengths[:, None], last_tokens[:, None], target)
    hidden, logits = hidden[:, 0], logits[:, 0]
    values, candidates = logits.topk(drafter.shape.selector_top_k, dim=-1)
    previous, tokens, rows = last_tokens, [], []
    for i in range(drafter.shape.draft_width):
        edges = drafter.candidate_selector.edges(hidden[:, i], previous).gather(-1, candidates[:, i])
        scores = (values[:, i] + edges).double()
        if temperature:
            probs = (scores / temperature).softmax(-1)
            index = torch.multinomial(probs, 1, generator=generator)
        else:
            index = scores.argmax(-1, keepdim=True)
            probs = torch.zeros_like(scores).scatter_(-1, index, 1.0)
        previous = candidates[:, i].gather(-1, index).squeeze(-1)
        tokens.append(previous)
        rows.append(torch.zeros_like(logits[:, i], dtype=torch.float64).scatter_(-1, candidates[:, i], probs))
    return Proposal(torch.stack(tokens, 1), torch.stack(rows, 1))


def save_pair(folder: Path, target: Qwen3ForCausalLM, drafter: Drafter, facts: dict[str, Any]) -> None:
    """Write target/ and draft/ as `vllm serve target --speculative-config {"model": draft, ...}` reads them, and pair.json."""
    target.to(torch.float32).save_pretrained(folder / "target")
    write_tokenizer(folder / "target")
    draft = folder / "draft"
    draft.mkdir(parents=True, exist_ok=True)
    shape = drafter.shape
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in drafter.state_dict().items()}
    save_file(tensors, draft / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["DFlash2DraftModel"],
        "model_type": "qwen3",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.draft_layers,
        "num_target_layers": shape.target_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.rope_theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "block_size": 1 + shape.draft_width,
        "dflash_config": {
            "mask_token_id": MASK_ID,
            "target_layer_ids": list(shape.target_layer_ids),
            "conv_kernel_size": shape.conv_taps,
            "conv_group_size": shape.conv_group_size,
            "selector_rank": shape.selector_rank,
            "selector_top_k": shape.selector_top_k,
        },
    }
    (draft / "config.json").write_text(json.dumps(config, indent=1))
    write_tokenizer(draft)
    (folder / "pair.json").write_text(json.dumps({"shape": asdict(shape), **facts}, indent=1))


def load_pair(folder: Path, device: str) -> tuple[Qwen3ForCausalLM, Drafter]:
    """What save_pair wrote, in float32, for inference."""
    shape = json.loads((folder / "pair.json").read_text())["shape"]
    shape["target_layer_ids"] = tuple(shape["target_layer_ids"])
    drafter = Drafter(Shape(**shape))
    drafter.load_state_dict(load_file(folder / "draft" / "model.safetensors"))
    target = Qwen3ForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    return target.to(device).eval().requires_grad_(False), drafter.to(device).eval().requires_grad_(False)
