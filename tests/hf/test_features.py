"""Families whose attention has softcap, sinks, dropout or a value head dim of its own.

Through the real kernel, which on a CPU is interpreted; eager attention in fp32 says what is right.
"""

from __future__ import annotations

import copy

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_attn_backends import witness

SMALL = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "max_position_embeddings": 64, "initializer_range": 0.25, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": None, "attention_dropout": 0.0,
    "experts_implementation": "eager",
}  # fmt: skip
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}


def equal_to_eager(models, family, **over):
    """Logits with and without padding, loss and gradients; returns (phase, class) of what ran."""
    config = AutoConfig.for_model(family, **{**SMALL, **over})
    torch.manual_seed(0)
    eager, tried = (
        AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=name)
        for name in ("eager", "triton_fa2")
    )
    eager, tried = (model.to(models.device).eval() for model in (eager, tried))
    with torch.no_grad():
        for name, parameter in eager.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_()
    tried.load_state_dict(eager.state_dict())
    ids, before = models.ids(2, 11), witness.snapshot()
    mask = models.padded((11, 7), 11, "left")
    kw = {"attention_mask": mask, "position_ids": models.positions(mask)}
    with torch.no_grad():
        got, want = tried(input_ids=ids, **kw).logits, eager(input_ids=ids, **kw).logits
        models.near(got[mask.bool()], want[mask.bool()])
        tokens = [m.generate(ids, max_new_tokens=4, do_sample=False, **{"attention_mask": mask})
                  for m in (tried, eager)]  # fmt: skip
        assert torch.equal(*tokens)
    losses = [m(input_ids=ids, labels=ids, use_cache=False).loss for m in (tried, eager)]
    models.near(*losses)
    for loss in losses:
        loss.backward()
    models.near_grads(tried, eager)
    return {(launch.phase, launch.call_class) for launch in witness.since(before)}


def test_gemma2_with_its_softcap(kernel_models, gated):
    ran = equal_to_eager(
        kernel_models, "gemma2", **SLIDING, attn_logit_softcapping=2.0,
        final_logit_softcapping=None, query_pre_attn_scalar=8,
    )  # fmt: skip
    assert {one for phase, one in ran if phase == "backward"} == {
        "float32/d16/causal+softcap", "float32/d16/window+softcap",
    }  # fmt: skip
    assert all(one.endswith("+softcap") for _, one in ran)


def test_gpt_oss_with_its_sinks_and_their_gradients(kernel_models, gated):
    ran = equal_to_eager(
        kernel_models, "gpt_oss", **SLIDING, num_local_experts=2, num_experts_per_tok=1
    )
    assert {one for phase, one in ran if phase == "backward"} == {
        "float32/d16/causal+sinks", "float32/d16/window+sinks",
    }  # fmt: skip
    assert all(one.endswith("+sinks") for _, one in ran)


def test_latent_attention_with_a_value_head_dim_of_its_own(kernel_models, gated):
    ran = equal_to_eager(
        kernel_models, "deepseek_v3", num_key_value_heads=2, kv_lora_rank=16, q_lora_rank=16,
        qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16, n_routed_experts=4, n_group=1,
        topk_group=1, num_experts_per_tok=2, first_k_dense_replace=4,
    )  # fmt: skip
    assert all(one.endswith("+value_dim") for _, one in ran)
    assert ("backward", "float32/d32/causal+value_dim") in ran


def test_attention_dropout_in_training_alone_by_torchs_seed(kernel_models, gated):
    models = kernel_models
    clean, tried = models.pair(num_hidden_layers=1)
    dropping = models.build(
        models.config(num_hidden_layers=1, attention_dropout=0.5), "triton_fa2",
        weights=clean.state_dict(),
    )  # fmt: skip
    ids = models.ids(2, 9)
    with torch.no_grad():
        models.near(dropping(input_ids=ids).logits, tried(input_ids=ids).logits)

    def step(seed, checkpointing=False):
        dropping.train()
        dropping.zero_grad()
        if checkpointing:
            dropping.gradient_checkpointing_enable()
        torch.manual_seed(seed)
        loss = dropping(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss.detach(), [p.grad.clone() for p in dropping.parameters()]

    before = witness.snapshot()
    loss, grads = step(1)
    assert {k.call_class for k in witness.since(before)} == {"float32/d16/causal+dropout"}
    assert torch.equal(step(1)[0], loss)
    assert not torch.equal(step(2)[0], loss)
    again, checkpointed = step(1, checkpointing=True)
    assert torch.equal(again, loss)
    for one, two in zip(grads, checkpointed, strict=True):
        torch.testing.assert_close(one, two)
