"""Every way to generate, token for token equal to eager's."""

from __future__ import annotations

import pytest
import torch

from hf_attn_backends.errors import CallRefusedError
from tests.hf.generation.conftest import Pair, build, config_of

STEPS = 64


@pytest.mark.parametrize("family", ["mistral", "mistral_window", "gemma3_text"])
def test_left_padded_batch(pair, family):
    made = pair(family)
    made.run(made.prompt(9, 4, 1))
    made.assert_made_by(triton=1, decode=STEPS - 1)


def test_a_row_alone_makes_the_tokens_that_it_makes_in_a_batch(pair):
    made = pair("mistral")
    prompt = made.prompt(9, 4)
    both = made.run(prompt, steps=16).sequences
    for row, length in enumerate((9, 4)):
        alone = {"input_ids": prompt["input_ids"][row : row + 1, -length:]}
        alone["attention_mask"] = torch.ones_like(alone["input_ids"])
        assert torch.equal(made.run(alone, steps=16).sequences[0, -16:], both[row, -16:])


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("family", ["mistral", "mistral_window"])
def test_beam_search(pair, family, cache):
    made = pair(family)
    steps = 24 if cache else STEPS
    options = {"num_beams": 3, "num_return_sequences": 2, "output_logits": False}
    made.run(made.prompt(7, 3), steps=steps, cache_implementation=cache, **options)
    assert sum(made.launches.values()) == steps


def test_sampling_of_a_seed(pair):
    made = pair("mistral")
    made.run(made.prompt(9, 5), do_sample=True, temperature=0.7, top_k=20, output_logits=False)
    made.assert_made_by(triton=1, decode=STEPS - 1)


@pytest.mark.parametrize("family", ["mistral", "mistral_window"])
def test_prompt_lookup(pair, family):
    """Candidates come out of the prompt: a few rows a step, and the cache is cropped after it."""
    made = pair(family)
    ids = made.prompt(6)["input_ids"].repeat(1, 3)
    made.run(
        {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        prompt_lookup_num_tokens=3, output_logits=False,
    )  # fmt: skip
    variants = made.variants()
    assert set(variants) == {"triton", "decode"}
    assert variants["decode"] < STEPS  # some candidates were taken


@pytest.mark.parametrize("assistant", ["itself", "another"])
def test_assisted_decoding(pair, assistant):
    made = pair("mistral")
    helper = config_of("mistral", num_key_value_heads=2)
    helpers = {}
    for attn, model in (("eager", made.eager), ("triton_fa2", made.tried)):
        own = assistant == "itself"
        helpers[id(model)] = build(model.config if own else helper, attn)
        if own:
            helpers[id(model)].load_state_dict(model.state_dict())
    made.run(made.prompt(9), output_logits=False, assistant_model=lambda model: helpers[id(model)])
    assert set(made.variants()) == {"triton", "decode"}


def test_contrastive_search_is_code_of_others(pair):
    """transformers moved it to the hub, and says so whatever the attention is."""
    made = pair("mistral")
    for model in (made.eager, made.tried):
        with pytest.raises(ValueError, match="trust_remote_code"):
            made.generate(model, made.prompt(9), {"penalty_alpha": 0.6, "top_k": 4})


def test_without_a_cache(pair):
    made = pair("mistral_window")
    made.run(made.prompt(9, 5), steps=12, use_cache=False)
    made.assert_made_by(triton=12)


@pytest.mark.parametrize("family", ["mistral", "llama"])
def test_after_the_implementation_was_set(pair, family):
    made = Pair(family, attn="eager")
    made.attn = "triton_fa2"
    made.tried.set_attn_implementation("triton_fa2")
    made.run(made.prompt(9), steps=16)
    made.assert_made_by(triton=1, decode=15)
    made.tried.set_attn_implementation("sdpa")
    made.run(made.prompt(9), steps=4)
    assert made.launches == {}  # SDPA under its own name is none of ours
    made.tried.set_attn_implementation("triton_fa2")
    made.run(made.prompt(9), steps=4)
    made.assert_made_by(triton=1, decode=3)


@pytest.mark.parametrize("family", ["mistral", "opt"])
def test_a_whole_generation_by_the_decoding_backend(pair, family):
    """It serves calls with a cache alone; the prompt's call shows none where a family is silent."""
    made = pair(family, attn="triton_decode")
    made.run(made.prompt(9, 4), steps=8)
    made.assert_made_by(triton=1, decode=7)
    ids = made.prompt(9)["input_ids"]
    with pytest.raises(CallRefusedError, match="KV cache only"):
        made.tried(input_ids=ids, use_cache=False)  # with gradients: a training step


def test_a_context_takes_the_steps_over(pair):
    """`attn_backend` steers a loaded model, step by step."""
    from hf_attn_backends import attn_backend

    made = pair("mistral")
    with attn_backend("triton_decode"):
        made.run(made.prompt(9), steps=16)
    assert {launch.backend for launch in made.launches} == {"triton_decode"}


@pytest.mark.parametrize("wrong", ["first key", "last key", "window"])
def test_other_keys_make_other_tokens(pair, monkeypatch, wrong):
    """What the tests above could not see would not be tested by them."""
    from hf_attn_backends.hf import adapter
    from hf_attn_backends.kernels.visibility import Visibility, intervals_of

    def shifted(default, query, key, value, visibility, **options):
        rows = intervals_of(visibility, query.shape[2], key.shape[2], query.device).clone()
        rows = rows.expand(query.shape[0], -1, -1).contiguous()
        if wrong == "last key":
            rows[..., 1] -= (rows[..., 1] - rows[..., 0] > 1).int()
        else:
            rows[..., 0] += (rows[..., 1] - rows[..., 0] > 1).int()
        return run_call(default, query, key, value, Visibility(intervals=rows), **options)

    made = pair("mistral_window" if wrong == "window" else "mistral")
    run_call = adapter.run_call
    made.run(made.prompt(9), steps=32)
    monkeypatch.setattr(adapter, "run_call", shifted)
    with pytest.raises(AssertionError):
        made.run(made.prompt(9), steps=32)
