"""Tiny decoders whose every token is compared with eager's, and who made the tokens."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch

from hf_attn_backends import witness

STEPS = 64
MARGIN = 1e-4  # of the spread of the logits; rounding in fp32 is a hundred times smaller

SIZE = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "max_position_embeddings": 256, "attention_dropout": 0.0, "initializer_range": 0.4,
    "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip

FAMILIES = {
    "mistral": {"sliding_window": None},
    "mistral_window": {"sliding_window": 7},
    "llama": {},
    "qwen3": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "num_key_value_heads": 2},
    "gemma3_text": {
        "sliding_window": 7,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 16,
    },
}


def config_of(family, **over):
    """The configuration of a tiny decoder."""
    from transformers import AutoConfig

    return AutoConfig.for_model(
        family.removesuffix("_window"), **{**SIZE, **FAMILIES[family], **over}
    )


def build(config, attn, weights=None, dtype=torch.float32, device="cpu"):
    """A model that ends at no token of its own accord."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        copy.deepcopy(config), dtype=dtype, attn_implementation=attn
    )
    assert model.config._attn_implementation == attn
    if weights is not None:
        model.load_state_dict(weights)
    model.generation_config.eos_token_id = None
    return model.to(device).eval()


class Pair:
    """An eager model and the one under test, of the same weights."""

    def __init__(self, family, attn="triton_fa2", device="cpu", dtype=torch.float32, **over):
        config = config_of(family, **over)
        self.attn = attn
        self.layers = config.num_hidden_layers
        self.device = device
        self.eager = build(config, "eager", dtype=dtype, device=device)
        self.tried = build(config, attn, self.eager.state_dict(), dtype, device)
        self.launches: Counter = Counter()

    def prompt(self, *lengths, seed=3):
        """Ids of unequal lengths, padded on the left, and their mask."""
        generator = torch.Generator().manual_seed(seed)
        total = max(lengths)
        ids = torch.randint(3, SIZE["vocab_size"], (len(lengths), total), generator=generator)
        mask = torch.stack([torch.arange(total) >= total - n for n in lengths]).long()
        made = {"input_ids": torch.where(mask.bool(), ids, 0), "attention_mask": mask}
        return {name: value.to(self.device) for name, value in made.items()}

    def run(self, prompt, steps=STEPS, compiled=False, against=None, **options):
        """Tokens of the model under test; they must be eager's, and no draw of eager's a tie.

        Eager gets the same options, or those that `against` says.
        """
        common = {
            "max_new_tokens": steps, "min_new_tokens": steps, "do_sample": False, "num_beams": 1,
            "return_dict_in_generate": True, "output_logits": True,
        }  # fmt: skip
        same = options if against is None else against
        want = self.generate(self.eager, prompt, {**common, "disable_compile": True, **same})
        before = witness.snapshot()
        got = self.generate(
            self.tried, prompt, {**common, "disable_compile": not compiled, **options}
        )
        self.launches = Counter(witness.since(before))
        assert want.sequences.shape[1] >= prompt["input_ids"].shape[1] + steps
        assert_separated(want)
        assert torch.equal(got.sequences, want.sequences)
        return got

    @staticmethod
    def generate(model, prompt, options):
        """With fresh copies: `generate` writes to what it is given."""
        options = {k: v(model) if callable(v) else copy.deepcopy(v) for k, v in options.items()}
        torch.manual_seed(11)
        with torch.no_grad():
            return model.generate(**{k: v.clone() for k, v in prompt.items()}, **options)

    def variants(self):
        """The launches of the last run by variant; all of them ours, and forward."""
        found: Counter = Counter()
        for launch, count in self.launches.items():
            assert (launch.backend, launch.phase) == (self.attn, "forward"), launch
            found[launch.variant] += count
        return dict(found)

    def assert_made_by(self, **a_layer):
        """The launches of the last run, by variant, for each layer."""
        assert self.variants() == {name: n * self.layers for name, n in a_layer.items() if n}


def assert_separated(generated):
    """No step of a greedy run is decided by less than rounding can change."""
    for logits in generated.logits or ():
        best = logits.float().topk(2, dim=-1).values
        spread = logits.float().std(-1)
        assert bool(((best[:, 0] - best[:, 1]) > MARGIN * spread).all())


@pytest.fixture
def pair(gated):
    """Builder of pairs, where the gate vouches for the kernel."""
    return Pair
