"""run_call: what the transformers adapter calls for each layer of a model."""

from __future__ import annotations

import pytest
import torch

from hf_attn_backends import witness
from hf_attn_backends.backends import proof
from hf_attn_backends.backends.planning import forget_plans
from hf_attn_backends.dispatch import attn_backend, run_call
from hf_attn_backends.errors import CallRefusedError
from hf_attn_backends.kernels.visibility import CAUSAL
from hf_attn_backends.reference import attention_reference


@pytest.fixture(autouse=True)
def _fresh():
    witness.reset()
    proof.forget()
    forget_plans()
    yield
    witness.reset()


@pytest.fixture
def qkv():
    return [torch.randn(1, 2, 6, 16) for _ in range(3)]


def served():
    return {launch.backend: n for launch, n in witness.snapshot().items()}


def test_the_loaded_backend_serves_and_a_context_overrides_it(qkv, monkeypatch):
    monkeypatch.setenv("HF_ATTN_BACKEND", "flex_attention")  # a preference: not for a name
    run_call("eager", *qkv, CAUSAL, scale=None)
    with attn_backend("sdpa"):
        out = run_call("eager", *qkv, CAUSAL, scale=None)
    assert served() == {"eager": 1, "sdpa": 1}
    want, _ = attention_reference(*qkv, is_causal=True)
    assert torch.allclose(out.double(), want, atol=1e-5)


def test_auto_is_steered_by_environment_and_context(qkv, monkeypatch):
    run_call("auto", *qkv, CAUSAL, scale=None)
    monkeypatch.setenv("HF_ATTN_BACKEND", "eager")
    run_call("auto", *qkv, CAUSAL, scale=None)
    with attn_backend("flex_attention"):
        run_call("auto", *qkv, CAUSAL, scale=None)
        with attn_backend("auto"):
            run_call("sdpa", *qkv, CAUSAL, scale=None)  # auto goes back to the environment
    assert served() == {"sdpa": 1, "eager": 2, "flex_attention": 1}


def test_the_cache_flag_reaches_the_backend(qkv):
    with pytest.raises(CallRefusedError) as without:
        run_call("triton_decode", *qkv, CAUSAL, scale=None)
    with pytest.raises(CallRefusedError) as cached:
        run_call("triton_decode", *qkv, CAUSAL, scale=None, has_cache=True)
    assert any("KV cache" in reason for reason in without.value.reasons)
    assert not any("KV cache" in reason for reason in cached.value.reasons)


def test_a_new_shape_is_validated_again(qkv):
    run_call("sdpa", *qkv, CAUSAL, scale=None)
    with pytest.raises(ValueError, match="value must be as long as key"):
        run_call("sdpa", qkv[0], qkv[1], qkv[2][:, :, :3], CAUSAL, scale=None)
