"""A name that nobody knows: on a gated class the text says what transformers says, and ours."""

from __future__ import annotations

import re

import pytest
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

SMALL = {
    "hidden_size": 32, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 9,
}  # fmt: skip
SENTENCE = re.escape('Specified `attn_implementation="foo"` is not supported')


@pytest.mark.parametrize(
    ("model_class", "config_class"),
    [(MistralForCausalLM, MistralConfig), (LlamaForCausalLM, LlamaConfig)],
    ids=["gated", "transformers"],
)
def test_code_that_looks_for_the_sentence_of_transformers_finds_it(model_class, config_class):
    with pytest.raises(ValueError, match=SENTENCE):
        model_class._from_config(config_class(**SMALL), attn_implementation="foo")
    model = model_class(config_class(**SMALL))
    with pytest.raises(ValueError, match=SENTENCE):
        model.set_attn_implementation("foo")
    assert model.config._attn_implementation == "sdpa"


def test_the_gated_class_also_says_what_is_known_and_what_is_near():
    with pytest.raises(ValueError, match=SENTENCE) as raised:
        MistralForCausalLM._from_config(MistralConfig(**SMALL), attn_implementation="foo")
    assert "the known names are auto, eager" in str(raised.value)
    with pytest.raises(ValueError, match=r"did you mean 'triton_fa2'\?"):
        MistralForCausalLM._from_config(MistralConfig(**SMALL), attn_implementation="triton_fa3")
