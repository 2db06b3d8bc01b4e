"""PyTorch in place of the two C++ operators that vLLM calls directly on a CPU."""

from typing import Any

import torch


def rms_norm(out: torch.Tensor, input: torch.Tensor, weight: torch.Tensor | None, epsilon: float) -> None:
    """RMSNorm over the last axis, written to `out`.

    out, input: [..., H]; weight: [H], or [L, H] with one row per outermost index of `input` (how DFlash normalises the
    context keys of all its layers at once). Called by the drafter's context K/V precomputation.
    """
    normed = torch.nn.functional.rms_norm(input.float(), input.shape[-1:], eps=epsilon)
    if weight is not None:
        if weight.dim() == 2:
            weight = weight.view(weight.shape[0], *[1] * (input.dim() - 2), weight.shape[1])
        normed = normed * weight.float()
    out.copy_(normed)


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    *unsupported: Any,
) -> None:
    """Rotate `query` and `key` in place, like the C++ operator; the arithmetic is vLLM's own PyTorch version.

    positions: [T]; query, key: [T, heads * head_size]; cos_sin_cache: [max positions, rotary dimension].
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    if any(unsupported):
        raise NotImplementedError("the CPU engine rotates whole heads forward only")
    rotated = RotaryEmbedding.forward_static(
        positions, query, key, head_size, cos_sin_cache.shape[-1], cos_sin_cache, is_neox
    )
    for tensor, value in zip((query, key), rotated, strict=True):
        if tensor is not None:
            tensor.copy_(value)


def install() -> None:
    """Put both into `vllm._custom_ops`, where the callers look them up at each call."""
    import vllm._custom_ops as ops

    ops.rms_norm = rms_norm
    ops.rotary_embedding = rotary_embedding
