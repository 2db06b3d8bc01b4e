"""Overlay gdn-active-width: the state rows of GDN and KDA layers are as wide as the step, not as the draft.

A speculative GDN step keeps one recurrent state per verified token, and the metadata hands each layer a row of N + 1 state
slots per request. At width K only the first K + 1 slots of a row are written, and the convolution takes its tile from the row's
length, so the row is shown K + 1 long. It is shown, not copied: the slot to resume from is that of the last token accepted at the
previous step, which may have been wider, and kernels find it by walking past the end of the row they were given.

That is why a layer has to be known before its rows are narrowed (`_walks_strides`): a kernel that insists on contiguous rows
would refuse the view, and one that copies or bounds-checks it would lose the slot to resume from.
"""

import importlib.util
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_verify.overlays.attach import AnyFunction, Context

# Layers that read the rows through their strides only, in every release that has them (overlays/gdn-active-width.toml
# lists what each one assumes). Anything else, and any layer that a custom build adds, gets stock rows.
_QWEN, _KIMI_K3 = "QwenGatedDeltaNetAttention", "KimiK3DeltaAttention"
_STRIDED_LAYERS = frozenset(
    {
        _QWEN,
        _KIMI_K3,
        "Glm5NextLinearAttention",
        "KimiGatedDeltaNetAttention",
        "OlmoHybridGatedDeltaNetAttention",
        "BailingMoeV3KimiDeltaAttention",
    }
)


def active_columns(
    query_start_loc_np: npt.NDArray[np.int32], num_drafts_np: npt.NDArray[np.int32], columns: int
) -> int | None:
    """K + 1 if every request of the batch verifies the same K >= 1 drafts, else None: then the rows stay as they are.

    query_start_loc_np: [num_reqs + 1], first token of each request. num_drafts_np: [num_reqs], drafts of each request, 0 for
    a decode without drafts, -1 for prefill and padding. columns: N + 1.
    """
    query_lens = np.diff(query_start_loc_np)
    if query_lens.size == 0 or query_lens.size != num_drafts_np.size:
        return None
    length = int(query_lens[0])
    if not 2 <= length < columns or (query_lens != length).any() or (num_drafts_np != length - 1).any():
        return None
    return length


def _narrowed(metadata: Any, columns: int) -> Any:
    rows = metadata.spec_state_indices_tensor  # [num_reqs, N + 1]
    if rows is not None and rows.ndim == 2 and rows.shape[1] > columns:
        metadata.spec_state_indices_tensor = rows[:, :columns]
    return metadata


def _walks_strides(layer: Any, device_type: str) -> bool:
    """Whether a layer reads the rows through their strides, without copying or bounds."""
    if device_type != "cuda":  # the CPU and XPU kernels take contiguous copies
        return False
    classes = type(layer).__mro__
    names = {c.__name__ for c in classes}
    if not names & _STRIDED_LAYERS:
        return False
    if _QWEN in names:
        # The fused CUDA kernel asks for contiguous rows and treats an accepted count beyond them as invalid. The first name
        # is that of releases up to 0.31.
        return not (
            getattr(layer, "enable_fused_gdn_decode", False) or getattr(layer, "enable_fused_gdn_spec_decode", False)
        )
    if _KIMI_K3 in names:
        if any(c.__module__.startswith("vllm.models.kimi_k3.amd") for c in classes):
            # Where the specialised decode exists, it would take a narrow uniform step for a full one.
            return not _amd_specialized_decode()
        return getattr(layer, "kda_spec_decode_backend", "native") != "flashinfer"
    return True


def _amd_specialized_decode() -> bool:
    return importlib.util.find_spec("vllm.models.kimi_k3.amd.specialized_decode") is not None


class _Builders:
    """Whether a builder's rows may be narrowed, decided once each."""

    def __init__(self) -> None:
        self._decided: dict[int, tuple[Any, bool]] = {}

    def may_narrow(self, builder: Any) -> bool:
        known = self._decided.get(id(builder))
        if known is None or known[0] is not builder:
            known = (builder, self._decide(builder))
            self._decided[id(builder)] = known
        return known[1]

    @staticmethod
    def _decide(builder: Any) -> bool:
        # A graph of adaptive verification is captured for one length and replayed for all.
        if getattr(builder.speculative_config, "enable_adaptive_verification", False):
            return False
        device_type = _device_type(builder)
        return all(_walks_strides(layer, device_type) for layer in _layers(builder))


def _layers(builder: Any) -> list[Any]:
    """The layers that will read what the builder makes."""
    known = builder.compilation_config.static_forward_context
    names = getattr(builder, "layer_names", None)
    if names is not None:
        return [known[name] for name in names if name in known]
    # Before 0.30 a GDN builder does not keep its names: then every recurrent layer of the model counts.
    from vllm.model_executor.layers.mamba.abstract import MambaBase

    return [layer for layer in known.values() if isinstance(layer, MambaBase)]


def _device_type(builder: Any) -> str:
    return str(builder.spec_state_indices_tensor.device.type)


def _build(original: AnyFunction, context: Context) -> AnyFunction:
    builders = _Builders()

    def build(
        self: Any,
        common_prefix_len: int,
        common_attn_metadata: Any,
        num_accepted_tokens: Any = None,
        num_decode_draft_tokens_cpu: Any = None,
        fast_build: bool = False,
    ) -> Any:
        metadata = original(
            self, common_prefix_len, common_attn_metadata, num_accepted_tokens, num_decode_draft_tokens_cpu, fast_build
        )
        if num_decode_draft_tokens_cpu is None or metadata.spec_state_indices_tensor is None:
            return metadata
        columns = active_columns(
            common_attn_metadata.query_start_loc_cpu.numpy(), num_decode_draft_tokens_cpu.numpy(), self.num_spec + 1
        )
        # A capture for a longer bound than this batch's own lengths must stay good for that bound.
        if columns is None or common_attn_metadata.max_query_len > columns or not builders.may_narrow(self):
            return metadata
        return _narrowed(metadata, columns)

    return build


def _update_block_table(original: AnyFunction, context: Context) -> AnyFunction:
    builders = _Builders()

    def update_block_table(self: Any, metadata: Any, blk_table: Any, slot_mapping: Any) -> Any:
        updated = original(self, metadata, blk_table, slot_mapping)
        rows = metadata.spec_state_indices_tensor
        # The batch is that of `metadata`, whose rows say what build() decided.
        if rows is None or updated.spec_state_indices_tensor is None or not builders.may_narrow(self):
            return updated
        return _narrowed(updated, rows.shape[1])

    return update_block_table


WRAPPERS = {
    "GDNAttentionMetadataBuilder.build": _build,
    "GDNAttentionMetadataBuilder.update_block_table": _update_block_table,
    "KimiK3KDAMetadataBuilder.build": _build,
}
