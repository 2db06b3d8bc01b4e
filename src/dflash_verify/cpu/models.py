"""A tiny target and tiny drafters, generated here: no download, a second on one core, the same bytes every time.

The target is a Qwen3 with random weights in which one thing is arranged: sixteen frequent letters follow each other in a
fixed cycle, and attention and MLP disturb that rule often enough for the next token to depend on the whole context, so
that a wrong key or value in the cache changes the text. The drafters know the rule but not the disturbance, and two of
its sixteen steps wrongly: drafts are partly right, as with a trained drafter.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

Drafter = Literal["dflash2", "dspark", "dflash"]

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>", "<|mask|>")
EOS_ID, PAD_ID, MASK_ID = 256, 259, 260  # 0 to 255 are the byte values
VOCAB_SIZE = 264
HIDDEN_SIZE = 64
MAX_POSITIONS = 1024
RANK = 64
LETTERS = b"etaoinshrdlucmgw"  # the cycle: each is followed by the one before it in this list
UNKNOWN_TO_DRAFTERS = b"id"  # the drafters believe that these repeat

# Constant logits, in nats. A grammar lets a model write white space for ever, and one tool call after the other; a trained
# model would not.
WHITE_SPACE_LOGIT = -6.0
EOS_LOGIT = 0.2

# How far attention and MLP disturb the rule, and how strong the rule is. Chosen together so that the target's greedy text
# breaks the rule about once in eight tokens, depending on the context, and that its most likely token has a probability
# of about 0.65 at temperature 1: neither a point, on which any verification is right, nor flat.
TARGET_DISTURBANCE = 1.1
DRAFTER_DISTURBANCE = 0.05
LETTER_LOGIT_SCALE = 2.4

CHAT_TEMPLATE = (
    "{% if tools %}tools: {{ tools | map(attribute='function') | map(attribute='name') | join(', ') }}\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": MAX_POSITIONS,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "torch_dtype": "float32",
    "bos_token_id": None,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
}

_DRAFT_LAYERS = {"target_layer_ids": [1, 2], "mask_token_id": MASK_ID}
_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "target": {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 4},
    "dflash2": {
        "architectures": ["DFlash2DraftModel"],
        "num_hidden_layers": 2,
        "num_target_layers": 4,
        "block_size": 8,
        "dflash_config": {
            **_DRAFT_LAYERS,
            "conv_kernel_size": 3,
            "conv_group_size": 16,
            "selector_rank": RANK,
            "selector_top_k": len(LETTERS),
        },
    },
    "dflash": {
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": 2,
        "num_target_layers": 4,
        "block_size": 8,
        "dflash_config": _DRAFT_LAYERS,
    },
    "dspark": {
        "architectures": ["Qwen3DSparkModel"],
        "num_hidden_layers": 2,
        "num_target_layers": 4,
        "block_size": 7,
        "markov_rank": RANK,
        "markov_head_type": "vanilla",
        **_DRAFT_LAYERS,
    },
}


@dataclass(frozen=True)
class Models:
    """Folders of one generated family; all drafters fit the one target."""

    root: Path

    @property
    def target(self) -> Path:
        return self.root / "target"

    def drafter(self, name: Drafter) -> Path:
        return self.root / name


def generate(root: Path) -> Models:
    """Write target and drafters below `root`, whatever was there before."""
    tensors = _weights()
    for name, config in _CONFIGS.items():
        _write(root / name, {**_QWEN3, **config}, tensors[name])
    return Models(root)


def _write(folder: Path, config: Mapping[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    write_tokenizer(folder)


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer: token i < 256 is byte i, so prompts and texts can be read as they are."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    # Byte-level tokenizers name bytes by printable characters; the alphabet is sorted by code point: the bytes that are
    # printable stand for themselves, the others follow from 256 on, in order.
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    stands_in = iter(sorted(c for c in alphabet if ord(c) > 255))
    vocab = {chr(b) if chr(b) in alphabet else next(stands_in): b for b in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": SPECIAL_TOKENS[0],
                "pad_token": SPECIAL_TOKENS[3],
                "model_max_length": MAX_POSITIONS,
                "chat_template": CHAT_TEMPLATE,
                "clean_up_tokenization_spaces": False,
            },
            indent=1,
        )
    )


class _Random:
    """Seeded normal matrices, scaled by fan-in."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def matrix(self, *shape: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator) * gain * shape[-1] ** -0.5

    def decoder_layers(self, prefix: str, count: int, disturbance: float) -> dict[str, torch.Tensor]:
        """Qwen3 decoder layers whose contribution to the residual stream is scaled by `disturbance`."""
        heads, kv_heads, head_dim = (
            int(str(_QWEN3[k])) for k in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
        inner = int(str(_QWEN3["intermediate_size"]))
        tensors: dict[str, torch.Tensor] = {}
        for i in range(count):
            layer = {
                "self_attn.q_proj": self.matrix(heads * head_dim, HIDDEN_SIZE),
                "self_attn.k_proj": self.matrix(kv_heads * head_dim, HIDDEN_SIZE),
                "self_attn.v_proj": self.matrix(kv_heads * head_dim, HIDDEN_SIZE),
                "self_attn.o_proj": self.matrix(HIDDEN_SIZE, heads * head_dim, gain=disturbance),
                "self_attn.q_norm": torch.ones(head_dim),
                "self_attn.k_norm": torch.ones(head_dim),
                "mlp.gate_proj": self.matrix(inner, HIDDEN_SIZE),
                "mlp.up_proj": self.matrix(inner, HIDDEN_SIZE),
                "mlp.down_proj": self.matrix(HIDDEN_SIZE, inner, gain=disturbance),
                "input_layernorm": torch.ones(HIDDEN_SIZE),
                "post_attention_layernorm": torch.ones(HIDDEN_SIZE),
            }
            tensors |= {f"{prefix}layers.{i}.{name}.weight": tensor for name, tensor in layer.items()}
        return tensors

    def drafter(self) -> dict[str, torch.Tensor]:
        """What all drafters share: two layers over the target's features. Embedding and head are the target's."""
        features = len(_DRAFT_LAYERS["target_layer_ids"])  # type: ignore[arg-type]
        return {
            "fc.weight": self.matrix(HIDDEN_SIZE, features * HIDDEN_SIZE),
            "hidden_norm.weight": torch.ones(HIDDEN_SIZE),
            "norm.weight": torch.ones(HIDDEN_SIZE),
            **self.decoder_layers("", 2, DRAFTER_DISTURBANCE),
        }


def _weights() -> dict[str, dict[str, torch.Tensor]]:
    """Tensors of every model, by its name in `_CONFIGS`."""
    random = _Random(seed=11)
    letters = torch.tensor(list(LETTERS))
    follows = letters[torch.randint(len(letters), (VOCAB_SIZE,), generator=random.generator)]  # [vocab]: next token
    follows[letters] = letters.roll(1)

    embedding = random.matrix(VOCAB_SIZE, HIDDEN_SIZE)
    embedding /= embedding.pow(2).mean(-1, keepdim=True).sqrt()  # RMS 1: what the final norm leaves of it
    embedding[:, 0] = 2.0  # the same for all tokens, so that the head can have constants
    # Head row of a letter: the embeddings it follows (the other letter most, everything else weakly), so that its logit
    # is high after them, and the mask token's, so that a drafter's mask slots rank the letters first.
    weight = torch.full((VOCAB_SIZE, 1), 0.1)
    weight[letters] = 1.0
    head = torch.zeros(VOCAB_SIZE, HIDDEN_SIZE).index_add_(0, follows, embedding * weight)
    head /= head.norm(dim=-1, keepdim=True).clamp_min(1e-6)
    mask = embedding[MASK_ID]
    head[letters] = LETTER_LOGIT_SCALE * head[letters] + 2.0 * mask / HIDDEN_SIZE**0.5
    head[:, 0] = 0.0
    head[torch.tensor(list(b"\t\n\v\f\r ")), 0] = WHITE_SPACE_LOGIT
    head[EOS_ID, 0] = EOS_LOGIT
    target = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": head,
        "model.norm.weight": torch.ones(HIDDEN_SIZE),
        **random.decoder_layers("model.", 4, TARGET_DISTURBANCE),
    }
    for name, tensor in target.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[0] = 0.0  # nothing disturbs the constant

    # A pair of low-rank tables in which predecessor[a] . successor[b] is large where the drafter believes b follows a.
    predecessor = random.matrix(VOCAB_SIZE, RANK)
    predecessor /= predecessor.norm(dim=-1, keepdim=True)
    believed = follows.clone()
    unknown = torch.tensor(list(UNKNOWN_TO_DRAFTERS))
    believed[unknown] = unknown
    known = torch.where(weight > 0.5, 1.0, 0.3)  # tokens beyond the letters share their successors
    successor = torch.zeros(VOCAB_SIZE, RANK).index_add_(0, believed, predecessor * known)

    dflash2 = random.drafter()
    for i in range(2):
        for convolution in ("attention_conv", "mlp_conv"):
            prefix = f"layers.{i}.{convolution}."
            identity = torch.zeros(2, 3, HIDDEN_SIZE)
            identity[:, 0] = 1.0  # [side, tap, channel]: tap 0 is the position itself
            dflash2[prefix + "base_kernel"] = identity
            dflash2[prefix + "kernel_projection.weight"] = random.matrix(
                2 * 3 * (HIDDEN_SIZE // 16), HIDDEN_SIZE, gain=DRAFTER_DISTURBANCE
            )
    dflash2["candidate_selector.predecessor_codebook"] = predecessor
    dflash2["candidate_selector.successor_codebook"] = successor
    # About constant, since the hidden state of every mask slot is about the mask token's embedding.
    dflash2["candidate_selector.hidden_projection.weight"] = (30.0 * mask / mask.dot(mask)).expand(RANK, HIDDEN_SIZE)

    dspark = random.drafter()
    dspark["markov_head.markov_w1.weight"] = predecessor
    dspark["markov_head.markov_w2.weight"] = 30.0 * successor
    dflash = _rule_by_attention(random.drafter(), embedding, head, believed)
    return {"target": target, "dflash2": dflash2, "dflash": dflash, "dspark": dspark}


def _rule_by_attention(
    tensors: dict[str, torch.Tensor], embedding: torch.Tensor, head: torch.Tensor, believed: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Plain DFlash has no table from token to token: its first layer is made to look at the anchor and apply the rule.

    Every mask slot then proposes the successor of the anchor, which is right for the first slot. Embedding and head:
    [vocab, hidden]; believed: [vocab], the token that the drafter expects next.
    """
    letters = torch.tensor(list(LETTERS))
    head_dim = int(str(_QWEN3["head_dim"]))
    still = head_dim // 2 - 1  # the dimension that rotary embedding turns least: the same for all eight slots
    # A key with one dimension is a sign, since keys are normalised: plus for letters, minus for the mask token, and zero
    # for the context, whose features are not used.
    seen = torch.cat((embedding[letters], embedding[MASK_ID][None]))
    sign = torch.ones(len(seen))
    sign[-1] = -1.0
    towards = torch.linalg.lstsq(seen, sign[:, None]).solution[:, 0]
    prefix = "layers.0.self_attn."
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        tensors[f"{prefix}{name}.weight"].zero_()
    tensors[prefix + "k_proj.weight"][still] = towards
    tensors[prefix + "q_proj.weight"][still] = -towards  # queries are mask tokens
    tensors[prefix + "q_norm.weight"].fill_(4.0)  # scores of 16, 0 and -16: all of the attention
    # The value is which letter it is, the output the head row of its successor.
    tensors[prefix + "v_proj.weight"][:head_dim] = torch.linalg.pinv(embedding[letters].T)
    tensors[prefix + "o_proj.weight"][:, :head_dim] = 8.0 * head[believed[letters]].T
    for name in ("fc", "layers.1.self_attn.o_proj", "layers.0.mlp.down_proj", "layers.1.mlp.down_proj"):
        tensors[name + ".weight"].zero_()
    return tensors
