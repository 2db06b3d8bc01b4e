"""Paged attention in PyTorch: the one backend that target and drafter use on a CPU.

Correctness first: one `scaled_dot_product_attention` per request. Causal and bidirectional queries, per-request
causality, grouped heads and sliding windows (symmetric for bidirectional queries, as in vLLM's flash attention backend).
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.nn.functional import scaled_dot_product_attention
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder, AttentionType
from vllm.v1.kv_cache_layout import KVCacheLayout


@dataclass(frozen=True)
class TorchAttentionMetadata:
    """What one forward needs; query lengths are read from the device copy, which is the authoritative one."""

    num_reqs: int
    query_start_loc: torch.Tensor  # [num_reqs + 1]
    seq_lens: torch.Tensor  # [num_reqs]
    block_table: torch.Tensor  # [num_reqs, max blocks]
    causal: bool | torch.Tensor  # for all, or [num_reqs]


class TorchAttentionMetadataBuilder(AttentionMetadataBuilder):
    """Picks the fields of vLLM's common metadata."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        common = common_attn_metadata
        return TorchAttentionMetadata(
            num_reqs=common.num_reqs,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            causal=common.causal,
        )


class TorchAttentionImpl(AttentionImpl):
    """Cache per layer: [num_blocks, num_kv_heads, block_size, 2 * head_size], keys before values on the last axis."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        if alibi_slopes is not None or sinks is not None or logits_soft_cap:
            raise NotImplementedError("the CPU engine has no ALiBi, attention sinks or soft-capping")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Store key and value [T, num_kv_heads, head_size] at slots [T]; negative slots are padding."""
        slots = slot_mapping.long()
        stored = slots >= 0
        blocks, offsets = slots[stored] // kv_cache.shape[2], slots[stored] % kv_cache.shape[2]
        new = torch.cat((key[: len(slots)], value[: len(slots)]), dim=-1)
        # The slice between two index arrays puts the indexed axis first: [T, heads, 2 * head_size].
        kv_cache[blocks, :, offsets] = new[stored].to(kv_cache.dtype)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: TorchAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of query [T, num_heads * head_size] over the cache, written to `output` of the same shape."""
        if attn_metadata is None:  # a dummy run without a cache
            return output.zero_()
        m = attn_metadata
        heads = (-1, self.num_heads, self.head_size)
        query, out = query.view(heads), output.view(heads)
        starts, seq_lens = m.query_start_loc.tolist(), m.seq_lens.tolist()
        causal = m.causal.tolist() if isinstance(m.causal, torch.Tensor) else [m.causal] * m.num_reqs
        block_size = kv_cache.shape[2]
        for i in range(m.num_reqs):
            first, last, seq_len = starts[i], starts[i + 1], seq_lens[i]
            if last <= first or seq_len <= 0:  # padding of the batch
                continue
            blocks = m.block_table[i, : -(-seq_len // block_size)].long()
            cached = kv_cache[blocks].transpose(0, 1).flatten(1, 2)[:, :seq_len]  # [kv heads, seq_len, 2 * head_size]
            k, v = cached.to(query.dtype).split(self.head_size, dim=-1)
            attended = scaled_dot_product_attention(
                query[first:last].transpose(0, 1)[None],
                k[None],
                v[None],
                attn_mask=self._mask(last - first, seq_len, causal[i]),
                scale=self.scale,
                enable_gqa=self.num_heads != self.num_kv_heads,
            )
            out[first:last] = attended[0].transpose(0, 1)
        return output

    def _mask(self, query_len: int, seq_len: int, causal: bool) -> torch.Tensor | None:
        """[query_len, seq_len], true where a query attends; None where all do. Queries are the last positions."""
        if not causal and self.sliding_window is None:
            return None
        ahead = torch.arange(seq_len)[None, :] - torch.arange(seq_len - query_len, seq_len)[:, None]
        mask = ahead <= 0 if causal else torch.ones_like(ahead, dtype=torch.bool)
        if self.sliding_window is not None:
            mask &= ahead.abs() < self.sliding_window
        return mask


class TorchAttentionBackend(AttentionBackend):
    """What vLLM asks about the backend."""

    # vLLM calls do_kv_cache_update before forward; the drafter also calls it itself, for its context.
    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar = [torch.float32, torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar = ["auto", "float32", "bfloat16", "float16"]

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"  # configuration code looks the name up in an enumeration, so it must be a known one

    @staticmethod
    def get_impl_cls() -> type[TorchAttentionImpl]:
        return TorchAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TorchAttentionMetadataBuilder]:
        return TorchAttentionMetadataBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True
