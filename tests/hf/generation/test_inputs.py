"""Prompts of other kinds: embeddings, holes behind them, learned prefixes, an encoder's states."""

from __future__ import annotations

import copy

import pytest
import torch

from hf_attn_backends import witness

STEPS = 16


def test_embeddings(pair):
    made = pair("mistral_window")
    embed = made.eager.get_input_embeddings()
    with torch.no_grad():
        states = embed(made.prompt(9)["input_ids"])
    tokens = [
        model.generate(inputs_embeds=states, max_new_tokens=STEPS, do_sample=False)
        for model in (made.eager, made.tried)
    ]
    assert torch.equal(*tokens)


@pytest.mark.parametrize("cache", [None, "static"])
def test_padding_behind_a_prompt_stays_a_hole(pair, cache):
    """Right-padded prompts: every later token sees around the padding, by a dense mask."""
    made = pair("mistral")
    prompt = {name: value.flip(1) for name, value in made.prompt(9, 4).items()}
    made.run(prompt, steps=STEPS, cache_implementation=cache)
    kinds = {launch.call_class.rpartition("/")[2] for launch in made.launches}
    assert "dense" in kinds


@pytest.mark.parametrize("cache", [None, "static"])
def test_in_inference_mode(pair, cache):
    made = pair("mistral_window")
    with torch.inference_mode():
        made.run(made.prompt(9, 4), steps=STEPS, cache_implementation=cache)
    assert sum(made.launches.values()) == STEPS


@pytest.mark.parametrize("kind", ["PrefixTuningConfig", "PromptTuningConfig"])
def test_a_learned_prefix(pair, kind):
    """Keys that no prompt has: PEFT puts them into the cache, or before the embeddings."""
    peft = pytest.importorskip("peft")
    made = pair("mistral")
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=5)
    eager, tried = (peft.get_peft_model(model, config) for model in (made.eager, made.tried))
    tried.load_state_dict(eager.state_dict())
    options = {"max_new_tokens": STEPS, "do_sample": False}
    tokens = [model.eval().generate(**made.prompt(9, 4), **options) for model in (eager, tried)]
    assert torch.equal(*tokens)


BART = {
    "vocab_size": 61, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32, "max_position_embeddings": 128, "init_std": 0.4, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "dropout": 0.0,
}  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}, {"num_beams": 3}])
@pytest.mark.parametrize("attn", ["triton_fa2", "triton_decode"])
def test_an_encoder_s_states(gated, attn, options):
    """The keys of cross attention are cached at the first step, and padded in the encoder."""
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    config, models = AutoConfig.for_model("bart", **BART), []
    for name in ("eager", attn):
        torch.manual_seed(0)
        model = AutoModelForSeq2SeqLM.from_config(copy.deepcopy(config), attn_implementation=name)
        model.generation_config.eos_token_id = None
        model.generation_config.forced_eos_token_id = None
        models.append(model.eval())
    models[1].load_state_dict(models[0].state_dict())
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    ids = torch.randint(3, 61, (2, 9), generator=torch.Generator().manual_seed(3))
    before = witness.snapshot()
    tokens = [
        model.generate(
            ids, attention_mask=mask, max_new_tokens=STEPS, do_sample=False, disable_compile=True,
            **options,
        )
        for model in models
    ]  # fmt: skip
    assert torch.equal(*tokens)
    launches = witness.since(before)
    assert {launch.backend for launch in launches} == {attn}
    # the encoder once, then self and cross attention of every step
    assert sum(launches.values()) == 1 + 2 * STEPS
