"""Other families under our names: masks per layer, encoders, cross attention, refusals."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from transformers import AutoConfig

from hf_attn_backends.errors import CallRefusedError

SMALL = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "max_position_embeddings": 64, "initializer_range": 0.25, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": None, "attention_dropout": 0.0,
}  # fmt: skip
EXPERTS = {
    "num_local_experts": 2, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "experts_implementation": "eager",
}  # fmt: skip
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 61,
        "initializer_range": 0.25, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
        "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}  # fmt: skip
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}

DECODERS = {
    "llama": SMALL,
    "qwen2": {**SMALL, **SLIDING, "use_sliding_window": True},
    "qwen3": {**SMALL, **SLIDING, "use_sliding_window": True},
    "qwen2_moe": {**SMALL, **EXPERTS, **SLIDING, "use_sliding_window": True},
    "mixtral": {**SMALL, **EXPERTS, "sliding_window": 4},
    "phi3": {**SMALL, "sliding_window": 4},
    "starcoder2": {**SMALL, "sliding_window": 4},
    "gemma2": {**SMALL, **SLIDING, "attn_logit_softcapping": None, "query_pre_attn_scalar": 8},
    "gemma3_text": {**SMALL, **SLIDING},
    "cohere2": {**SMALL, **SLIDING},
    "olmo2": SMALL,
    "olmoe": {**SMALL, **EXPERTS, "sliding_window": 4},  # given to attention, in no mask
    "gpt_neox": {**SMALL, "attention_dropout": 0.0, "hidden_dropout": 0.0},
    "gpt2": GPT2,
    "stablelm": SMALL,
}


def _pair(family, over, auto):
    cls = getattr(transformers, auto)
    config = AutoConfig.for_model(family, **over)
    torch.manual_seed(0)
    eager = cls.from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    tried = cls.from_config(copy.deepcopy(config), attn_implementation="triton_fa2").eval()
    tried.load_state_dict(eager.state_dict())
    return eager, tried


@pytest.mark.parametrize("family", DECODERS)
def test_a_decoder_with_and_without_padding(models, calls, family):
    eager, tried = _pair(family, DECODERS[family], "AutoModelForCausalLM")
    ids = models.ids(2, 11)
    with torch.no_grad():
        models.near(
            tried(input_ids=ids, use_cache=False).logits,
            eager(input_ids=ids, use_cache=False).logits,
        )
        for side in ("left", "right"):
            mask = models.padded((11, 6), 11, side)
            kw = {"attention_mask": mask, "position_ids": models.positions(mask)}
            got, want = tried(input_ids=ids, **kw).logits, eager(input_ids=ids, **kw).logits
            models.near(got[mask.bool()], want[mask.bool()])
        generated = [
            model.generate(ids, max_new_tokens=4, do_sample=False, attention_mask=ids * 0 + 1)
            for model in (tried, eager)
        ]
        assert torch.equal(*generated)
    assert len(calls) >= 6


ENCODERS = {
    "bert": {**SMALL, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "roberta": {**SMALL, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "modernbert": {**SMALL, "local_attention": 4, "global_attn_every_n_layers": 2},
    "distilbert": {"dim": 32, "hidden_dim": 32, "n_heads": 2, "n_layers": 2, "vocab_size": 61,
                   "dropout": 0.0, "attention_dropout": 0.0, "initializer_range": 0.25},
}  # fmt: skip


@pytest.mark.parametrize("family", ENCODERS)
def test_an_encoder_sees_both_ways(models, calls, family):
    eager, tried = _pair(family, ENCODERS[family], "AutoModel")
    ids = models.ids(2, 11)
    mask = models.padded((11, 6), 11, "right")
    with torch.no_grad():
        for kw in ({}, {"attention_mask": mask}):
            got = tried(input_ids=ids, **kw).last_hidden_state
            want = eager(input_ids=ids, **kw).last_hidden_state
            models.near(got[mask.bool()], want[mask.bool()])
    assert len(calls) == 4
    assert {call["visibility"].kind for call in calls} <= {"full", "intervals"}


def test_cross_attention_of_an_encoder_and_decoder(models, calls):
    over = {
        "vocab_size": 61, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1,
        "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32, "max_position_embeddings": 64, "init_std": 0.25, "dropout": 0.0,
        "activation_dropout": 0.0, "attention_dropout": 0.0,
    }  # fmt: skip
    eager, tried = _pair("bart", over, "AutoModel")
    ids, answer = models.ids(2, 9), models.ids(2, 5, seed=2)
    mask = models.padded((9, 6), 9, "right")
    kw = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": answer}
    with torch.no_grad():
        models.near(tried(**kw).last_hidden_state, eager(**kw).last_hidden_state)
    assert len(calls) == 3  # encoder, decoder, cross


def test_a_position_bias_is_refused(models, gated):
    over = {"vocab_size": 61, "d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 1,
            "num_heads": 2, "pad_token_id": 0, "decoder_start_token_id": 0}  # fmt: skip
    config = AutoConfig.for_model("umt5", **over)
    model = transformers.AutoModel.from_config(config, attn_implementation="triton_fa2").eval()
    ids = models.ids(1, 5)
    with pytest.raises(CallRefusedError, match="position_bias"):
        model(input_ids=ids, decoder_input_ids=ids)


def test_a_vision_language_model_part_by_part(models, calls):
    from transformers import AutoModelForImageTextToText, CLIPVisionConfig, LlavaConfig

    text = AutoConfig.for_model("llama", **SMALL)
    config = LlavaConfig(
        text_config=text,
        vision_config=CLIPVisionConfig(
            hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            image_size=16, patch_size=8, projection_dim=32, initializer_range=0.25,
        ),
        image_token_index=60, image_token_id=60, vision_feature_layer=-1, initializer_range=0.25,
    )  # fmt: skip
    build = AutoModelForImageTextToText.from_config
    torch.manual_seed(0)
    eager = build(copy.deepcopy(config), attn_implementation="eager").eval()
    whole = build(copy.deepcopy(config), attn_implementation="triton_fa2").eval()
    later = build(copy.deepcopy(config), attn_implementation="eager").eval()
    later.set_attn_implementation({"text_config": "triton_fa2", "vision_config": "eager"})
    ids = models.ids(1, 12)
    ids[ids == 60] = 5
    ids[:, 3:7] = 60  # the four patches
    pixels = torch.randn(1, 3, 16, 16)
    with torch.no_grad():
        want = eager(input_ids=ids, pixel_values=pixels).logits
        for model, expected in ((whole, 4), (later, 2)):
            model.load_state_dict(eager.state_dict())
            del calls[:]
            models.near(model(input_ids=ids, pixel_values=pixels).logits, want)
            assert len(calls) >= expected - 1  # CLIP may leave its last layer out
    assert later.model.vision_tower.config._attn_implementation == "eager"
