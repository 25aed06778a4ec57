"""Fields of a tiny configuration of each family, for a size.

Shapes: `M` tokens, `D` head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

VOCABULARY = 61
IMAGE_TOKEN = 60
HEADS = 4  # over two key/value heads, so that their order tells


@dataclass(frozen=True, slots=True)
class Size:
    """How large the tiny models are, and what goes through them.

    Attributes:
        head_dim: `D`.
        length: `M` of the longer row, odd; beyond every window and chunk.
        short: Real tokens of the padded row.
        window: Keys that a sliding layer sees.
        chunk: Keys of one chunk.
        spread: Standard deviation of the weights: attention is far from uniform, and what one
            rounding becomes on its way through the model is still small.
    """

    head_dim: int
    length: int
    short: int
    window: int
    chunk: int
    spread: float


CPU = Size(head_dim=16, length=37, short=26, window=7, chunk=10, spread=0.25)
GPU = Size(head_dim=64, length=333, short=210, window=100, chunk=90, spread=0.0625)


def small(size: Size, **over: Any) -> dict[str, Any]:
    """Fields of a decoder with two layers; weights so large that attention is far from uniform."""
    return {
        "vocab_size": VOCABULARY, "hidden_size": HEADS * size.head_dim, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": HEADS, "num_key_value_heads": HEADS // 2,
        "head_dim": size.head_dim, "max_position_embeddings": 512, "initializer_range": size.spread,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "attention_dropout": 0.0,
        "tie_word_embeddings": False, **over,
    }  # fmt: skip


def sliding(size: Size, **over: Any) -> dict[str, Any]:
    """Likewise, the first layer with a window and the second without."""
    kinds = ["sliding_attention", "full_attention"]
    return small(size, sliding_window=size.window, layer_types=kinds, **over)


def windowed(size: Size, **over: Any) -> dict[str, Any]:
    """Likewise, both layers with a window."""
    return small(size, sliding_window=size.window, **over)


# Every expert is chosen: a token that changes its expert by a rounding would tell of the router.
EXPERTS = {
    "num_local_experts": 2, "num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "experts_implementation": "eager",
}  # fmt: skip


def latent(size: Size, **over: Any) -> dict[str, Any]:
    """Latent attention: query and key twice as wide as the value."""
    return small(
        size, num_key_value_heads=HEADS, kv_lora_rank=16, q_lora_rank=24, head_dim=size.head_dim,
        qk_rope_head_dim=size.head_dim, qk_nope_head_dim=size.head_dim, v_head_dim=size.head_dim,
        n_routed_experts=2, n_shared_experts=1, n_group=1, topk_group=1, num_experts_per_tok=2,
        moe_intermediate_size=24, first_k_dense_replace=1, experts_implementation="eager", **over,
    )  # fmt: skip


def llama4(size: Size) -> dict[str, Any]:
    over = {"intermediate_size_mlp": 48, "moe_layers": [], "attention_chunk_size": size.chunk}
    kinds = ["chunked_attention", "full_attention"]
    return small(size, layer_types=kinds, no_rope_layers=[1, 0], **over)


def gemma2(size: Size, **over: Any) -> dict[str, Any]:
    caps = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}
    return sliding(size, query_pre_attn_scalar=24, **caps, **over)


def gemma3_vision(size: Size) -> dict[str, Any]:
    width = 2 * size.head_dim  # two heads
    vision = {
        "hidden_size": width, "intermediate_size": 48, "num_hidden_layers": 1, "patch_size": 4,
        "num_attention_heads": 2, "image_size": 24, "attention_dropout": 0.0,
        "vision_use_head": False,
    }  # fmt: skip
    return {
        "text_config": {**sliding(size, query_pre_attn_scalar=24), "model_type": "gemma3_text"},
        "vision_config": vision, "mm_tokens_per_image": 9, "image_token_index": IMAGE_TOKEN,
        "boi_token_index": 58, "eoi_token_index": 59, "initializer_range": size.spread,
    }  # fmt: skip


def modernbert(size: Size) -> dict[str, Any]:
    kinds = ["full_attention", "sliding_attention"]
    return small(
        size, layer_types=kinds, local_attention=2 * (size.window // 2), mlp_dropout=0.0,
        embedding_dropout=0.0, cls_token_id=1, sep_token_id=2, initializer_cutoff_factor=3.0,
    )  # fmt: skip


def t5gemma(size: Size) -> dict[str, Any]:
    return {
        "encoder": gemma2(size), "decoder": gemma2(size), "dropout_rate": 0.0,
        "attention_dropout": 0.0, "vocab_size": VOCABULARY, "initializer_range": size.spread,
        "tie_word_embeddings": False, "pad_token_id": 0,
    }  # fmt: skip


def bart(size: Size) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY, "d_model": 2 * size.head_dim, "encoder_layers": 1,
        "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
        "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 512,
        "init_std": size.spread,
        "dropout": 0.0, "activation_dropout": 0.0, "attention_dropout": 0.0,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
        "forced_eos_token_id": None,
    }  # fmt: skip
