"""torch.compile with sizes that change: Dynamo makes them symbols, the choice needs constants."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig

from hf_attn_backends import gate, witness


@pytest.fixture
def covered(home):
    shapes = [{"dtype": "float32", "head_dim": d, "visibility": "intervals"} for d in (16, 32)]
    shapes += [{**shape, "visibility": "causal"} for shape in shapes]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    gate.write_equivalence_gate(tolerances={}, shapes_covered=shapes, device=device)
    torch._dynamo.reset()
    yield device
    torch._dynamo.reset()


@pytest.mark.slow
def test_lengths_and_models_of_several_sizes_compile_whole(covered):
    for heads, kv_heads, dim in ((4, 2, 16), (2, 1, 32)):
        torch.manual_seed(0)
        config = MistralConfig(
            vocab_size=97, hidden_size=heads * dim, intermediate_size=32, num_hidden_layers=1,
            num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=dim,
            sliding_window=None, initializer_range=0.2,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_config(config, attn_implementation="triton_fa2")
        model = model.to(covered)
        # from_config writes the choice into the configuration that it is given.
        own = copy.deepcopy(config)
        eager = AutoModelForCausalLM.from_config(own, attn_implementation="eager").to(covered)
        eager.load_state_dict(model.state_dict())
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        for length in (18, 13, 9):
            ids = torch.randint(3, 97, (2, length), device=covered)
            before = witness.snapshot()
            got = compiled(input_ids=ids, use_cache=False).logits
            assert sum(witness.since(before).values()) == 1
            want = eager(input_ids=ids, use_cache=False).logits
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
