"""Model dimensions, read by attributes: real configurations, plain objects, dictionaries."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hf_attn_backends.backends import ModelDims


def test_mistral_is_grouped_with_head_dim_128():
    config = pytest.importorskip("transformers").MistralConfig()
    dims = ModelDims.of(config)
    assert (dims.head_dim, dims.v_head_dim, dims.heads, dims.kv_heads) == (128, 128, 32, 8)
    assert dims.model_type == "mistral"
    assert dims.sliding_window == 4096
    assert dims.grouped
    assert dims.describe() == "mistral: head_dim 128, 32 query heads over 8 key/value heads"


def test_head_dim_is_derived_and_an_explicit_one_wins():
    plain = {"hidden_size": 96, "num_attention_heads": 4}
    assert ModelDims.of(plain).head_dim == 24
    assert ModelDims.of({**plain, "head_dim": 64}).head_dim == 64
    assert ModelDims.of(plain).kv_heads == 4
    assert not ModelDims.of(plain).grouped


def test_latent_attention_has_its_own_head_dims():
    config = SimpleNamespace(
        kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        num_attention_heads=128, num_key_value_heads=128, hidden_size=7168,
    )  # fmt: skip
    dims = ModelDims.of(config)
    assert (dims.head_dim, dims.v_head_dim, dims.kv_lora_rank) == (192, 128, 512)


def test_a_composite_configuration_is_read_through_its_text_part():
    text = SimpleNamespace(head_dim=80, num_attention_heads=2, dtype="torch.bfloat16")
    dims = ModelDims.of(SimpleNamespace(get_text_config=lambda: text, head_dim=999))
    assert dims.head_dim == 80
    assert dims.dtype == "bfloat16"


def test_a_window_that_is_switched_off_is_none():
    assert ModelDims.of({"sliding_window": 64}).sliding_window == 64
    off = {"sliding_window": 64, "use_sliding_window": False}
    assert ModelDims.of(off).sliding_window is None
