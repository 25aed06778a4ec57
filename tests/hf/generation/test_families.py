"""Families with windows, chunks, softcap, sinks and experts: every cache, past every boundary."""

from __future__ import annotations

import pytest

from tests.hf.generation import conftest

_EXPERTS = {
    "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "intermediate_size_mlp": 48,
}  # fmt: skip
_MIXED = {
    "num_hidden_layers": 2, "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip

FAMILIES = {
    "llama4_text": {
        "attention_chunk_size": 8, "num_hidden_layers": 2, "no_rope_layers": [1, 0],
        "interleave_moe_layer_step": 1, "layer_types": ["chunked_attention", "full_attention"],
        **_EXPERTS,
    },
    "gpt_oss": {**_MIXED, **_EXPERTS},
    "gemma2": {**_MIXED, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0},
    "qwen2": {**_MIXED, "use_sliding_window": True, "max_window_layers": 1},
    "qwen2_moe": {**_MIXED, "use_sliding_window": True, "max_window_layers": 0, **_EXPERTS},
    "ministral": _MIXED,
    "olmo3": _MIXED,
    "mixtral": {"sliding_window": 7, **_EXPERTS},
    "phimoe": {"sliding_window": 7, **_EXPERTS},
    "phi3": {"sliding_window": 7, "original_max_position_embeddings": 256},
    "starcoder2": {"sliding_window": 7},
    "gpt2": {"n_embd": 32, "n_head": 2, "n_layer": 1, "n_positions": 256, "attn_pdrop": 0.0},
    "smollm3": {},
    "olmo2": {},
    "granite": {},
}  # fmt: skip
WAYS = {
    "growing": {},
    "static": {"cache_implementation": "static"},
    "in chunks": {"prefill_chunk_size": 8},
    "candidates": {"prompt_lookup_num_tokens": 3, "output_logits": False},
}
QUICK = ("llama4_text", "gpt_oss", "gemma2")


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FAMILIES],
)
def test_every_cache(pair, monkeypatch, family):
    monkeypatch.setitem(conftest.FAMILIES, family, FAMILIES[family])
    made = pair(family)
    for way, options in WAYS.items():
        lengths = (19,) if way == "candidates" else (19, 6)
        prompt = made.prompt(*lengths)
        if _transformers_cannot(made, prompt, options):
            continue
        made.run(prompt, steps=14, **options)
        assert made.variants()


def _transformers_cannot(made, prompt, options):
    """5.17 has no static cache for chunked layers: a mask function takes no such argument."""
    try:
        made.generate(made.eager, prompt, {"max_new_tokens": 1, "disable_compile": True, **options})
    except TypeError as error:
        return "create_chunked_causal_mask" in str(error)
    return False
