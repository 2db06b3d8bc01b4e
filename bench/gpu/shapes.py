"""Config-only checkpoints of real shapes (random weights): step time does not depend on what the weights say."""

import json
from pathlib import Path
from typing import Any

VOCAB = 151936


def qwen3(hidden: int, layers: int, intermediate: int, heads: int, kv_heads: int, **fields: Any) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    } | fields


def moe(base: dict[str, Any], experts: int, expert_size: int) -> dict[str, Any]:
    return base | {
        "num_experts": experts,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": expert_size,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def dflash2(
    hidden: int, target_layers: int, heads: int, kv_heads: int, intermediate: int, block: int = 8
) -> dict[str, Any]:
    """A DFlash2 drafter of 5 layers that reads five layers of its target."""
    return qwen3(hidden, 5, intermediate, heads, kv_heads) | {
        "architectures": ["DFlash2DraftModel"],
        "block_size": block,
        "num_target_layers": target_layers,
        "dflash_config": {
            "mask_token_id": VOCAB - 1,
            "target_layer_ids": [round(target_layers * at) for at in (0.1, 0.3, 0.5, 0.7, 0.9)],
            "selector_top_k": 16,
            "selector_rank": 128,
            "conv_kernel_size": 2,
            "conv_group_size": 128,
            "use_aux_hidden_state": True,
        },
    }


QWEN3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "partial_rotary_factor": 0.25,
    "shared_expert_intermediate_size": 512,
}

# name: (target, drafter)
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3-8b": (qwen3(4096, 36, 12288, 32, 8), dflash2(4096, 36, 32, 8, 12288)),
    "qwen3-30b-a3b": (
        moe(qwen3(2048, 48, 6144, 32, 4), 128, 768)
        | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"},
        dflash2(2048, 48, 16, 4, 6144),
    ),
    # The GDN hybrid of Qwen3-Next with its 48 layers, and 64 of its 512 experts: fewer are left to be read by a wide step
    # of few requests.
    "qwen3-next-48": (moe(qwen3(2048, 48, 5632, 16, 2), 64, 512) | QWEN3_NEXT, dflash2(2048, 48, 16, 4, 6144)),
}


def write(name: str, root: Path) -> tuple[str, str]:
    """Folders of target and drafter."""
    folders = []
    for part, config in zip(("target", "draft"), SHAPES[name], strict=True):
        folder = root / name / part
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=1))
        folders.append(str(folder))
    return folders[0], folders[1]
