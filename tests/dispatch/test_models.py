"""A whole model under `auto` and under a context: who served, by the witness."""

from __future__ import annotations

import pytest
import torch

import hf_attn_backends
from hf_attn_backends import gate, witness
from hf_attn_backends.dispatch import attn_backend, served_reasons
from hf_attn_backends.errors import CallRefusedError

transformers = pytest.importorskip("transformers")

LAYERS = 2


@pytest.fixture(autouse=True)
def _fresh():
    hf_attn_backends.register()
    witness.reset()
    yield
    witness.reset()


def build(name, **options):
    torch.manual_seed(0)
    config = transformers.MistralConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, sliding_window=None, **options,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=name).eval()


def served():
    return {launch.backend: n for launch, n in witness.snapshot().items()}


def run(model, **options):
    ids = torch.arange(9)[None] % 64
    with torch.no_grad():
        return model(ids.to(model.device), use_cache=False, **options).logits


def test_auto_dispatches_every_call_and_says_why(monkeypatch):
    model, plain = build("auto"), run(build("eager"))
    witness.reset()
    assert torch.allclose(run(model), plain, atol=1e-5)
    assert served() == {"sdpa": LAYERS}
    monkeypatch.setenv("HF_ATTN_BACKEND", "eager")
    assert torch.allclose(run(model), plain, atol=1e-5)
    with attn_backend("flex_attention"):
        assert torch.allclose(run(model), plain, atol=1e-5)
    assert served() == {"sdpa": LAYERS, "eager": LAYERS, "flex_attention": LAYERS}
    name = "float32/d16/causal"
    assert served_reasons()["sdpa", name] == "the default order"
    assert served_reasons()["eager", name] == "preferred by HF_ATTN_BACKEND"
    assert served_reasons()["flex_attention", name] == "asked for explicitly"


def test_left_padding_under_auto_agrees_with_eager():
    mask = torch.ones(1, 9, dtype=torch.long)
    mask[:, :3] = 0
    got = run(build("auto"), attention_mask=mask)[:, 3:]
    assert torch.allclose(got, run(build("eager"), attention_mask=mask)[:, 3:], atol=1e-5)


def test_a_context_runs_sdpa_in_a_model_of_ours(home, kernel_device):
    gate.write_equivalence_gate(
        tolerances={}, shapes_covered=[], device=kernel_device, coverage=["float32/d16/causal"]
    )
    model = build("triton_fa2").to(kernel_device)
    ours = run(model)
    assert served() == {"triton_fa2": LAYERS}
    with attn_backend("sdpa"):
        theirs = run(model)
    assert served() == {"triton_fa2": LAYERS, "sdpa": LAYERS}
    assert torch.allclose(ours, theirs, atol=1e-4)
    run(model)
    assert served() == {"triton_fa2": 2 * LAYERS, "sdpa": LAYERS}


def test_a_context_that_cannot_serve_raises_out_of_the_model():
    model = build("auto").train()
    with attn_backend("flex_attention"), pytest.raises(CallRefusedError, match="backward pass on"):
        model(torch.arange(9)[None], use_cache=False)
