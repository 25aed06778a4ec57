"""Argument > context > environment > default; explicit serves or raises, preferences fall back."""

from __future__ import annotations

import logging

import pytest
import torch

from hf_attn_backends import witness
from hf_attn_backends.backends import EagerBackend, backend_of, proof
from hf_attn_backends.backends.planning import forget_plans
from hf_attn_backends.dispatch import (
    ATTN_BACKEND,
    attention,
    attn_backend,
    get_backend,
    run_call,
    served_reasons,
)
from hf_attn_backends.errors import CallRefusedError, UnknownBackendError
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


def test_argument_beats_context_beats_environment_beats_default(qkv, monkeypatch):
    attention(*qkv)
    assert served() == {"sdpa": 1}
    monkeypatch.setenv("HF_ATTN_BACKEND", "flex_attention")
    attention(*qkv)
    with attn_backend("eager"):
        attention(*qkv)
        attention(*qkv, backend="sdpa")
    assert served() == {"sdpa": 2, "flex_attention": 1, "eager": 1}
    assert witness.substitutions() == {}


@pytest.mark.parametrize(
    "given", ["eager", "EAGER", ATTN_BACKEND.EAGER, EagerBackend, EagerBackend()]
)
def test_enum_name_class_and_instance_are_all_taken(given, qkv):
    attention(*qkv, backend=given)
    with attn_backend(given):
        assert get_backend() == "eager"
        assert get_backend(use_default=False) == ATTN_BACKEND.EAGER
        attention(*qkv)
    assert served() == {"eager": 2}


def test_what_is_no_backend_at_all_is_a_value_error(qkv):
    with pytest.raises(ValueError, match="backend must be a name"):
        attention(*qkv, backend=3)
    with pytest.raises(ValueError, match="backend must be a name"):
        attn_backend(int)


@pytest.mark.parametrize("origin", ["argument", "context", "environment"])
def test_a_typo_raises_from_every_origin(origin, qkv, monkeypatch):
    if origin == "environment":
        monkeypatch.setenv("HF_ATTN_BACKEND", "spda")
    ask = {
        "argument": lambda: attention(*qkv, backend="spda"),
        "context": lambda: attn_backend("spda"),
        "environment": lambda: attention(*qkv),
    }[origin]
    with pytest.raises(UnknownBackendError, match=rf"unknown backend 'spda' \(from the {origin}"):
        ask()
    if origin == "environment":
        with pytest.raises(RuntimeError, match="did you mean 'sdpa'"):
            get_backend()


@pytest.mark.parametrize("how", ["argument", "context", "model"])
def test_explicit_serves_or_raises_with_every_reason(how, qkv):
    options = {"softcap": 2.0, "sinks": torch.zeros(2)}
    expected = "Explicitly-set backend 'sdpa' cannot serve this call:"
    ask = {
        "argument": lambda: attention(*qkv, backend="sdpa", **options),
        "context": lambda: attn_backend("sdpa")(attention)(*qkv, **options),
        "model": lambda: run_call("sdpa", *qkv, CAUSAL, scale=None, **options),
    }[how]
    with pytest.raises(CallRefusedError, match=expected) as caught:
        ask()
    assert len(caught.value.reasons) == 2
    assert "softcap" in caught.value.reasons[0]
    assert "sinks" in caught.value.reasons[1]
    assert "what would work: backend='eager'" in str(caught.value)
    assert isinstance(caught.value, RuntimeError)
    assert isinstance(caught.value, ValueError)
    assert served() == {}


def test_an_explicit_backend_that_is_not_installed_is_refused(qkv):
    with pytest.raises(CallRefusedError, match="needs the package flash_attn, which") as caught:
        attention(*qkv, backend="flash_attention_2")
    assert any("on cpu" in reason for reason in caught.value.reasons)
    assert any("float32" in reason for reason in caught.value.reasons)


def test_flashmla_is_refused_with_head_dim_whatever_the_call(qkv):
    with pytest.raises(CallRefusedError, match="value head_dim 512"):
        attention(*qkv, backend="flashmla")


def test_a_preference_falls_back_logged_once_and_counted(qkv, monkeypatch, caplog):
    monkeypatch.setenv("HF_ATTN_BACKEND", "flex_attention")
    grad = [t.clone().requires_grad_() for t in qkv]
    with caplog.at_level(logging.WARNING, "hf_attn_backends.dispatch"):
        for _ in range(3):
            attention(*grad, is_causal=True)
    assert served() == {"sdpa": 3}
    name = "float32/d16/causal"
    assert witness.substitutions() == {("flex_attention", "sdpa", name): 3}
    assert len(caplog.records) == 1
    assert "in place of flex_attention" in caplog.text
    assert "backward pass on cuda only" in caplog.text
    assert served_reasons()["sdpa", name].startswith("in place of flex_attention: ")
    with caplog.at_level(logging.WARNING, "hf_attn_backends.dispatch"):
        attention(*grad)  # another class: said again
    assert len(caplog.records) == 2


def test_the_default_falls_back_to_eager_for_softcap(qkv):
    out = attention(*qkv, is_causal=True, softcap=2.0)
    want, _ = attention_reference(*qkv, is_causal=True, softcap=2.0)
    assert torch.allclose(out.double(), want, atol=1e-5)
    assert served() == {"eager": 1}
    assert witness.substitutions() == {("sdpa", "eager", "float32/d16/causal+softcap"): 1}


def test_nobody_serves_is_an_error_with_everybodys_reasons(qkv, monkeypatch):
    for name in ("sdpa", "eager"):
        monkeypatch.setattr(
            type(backend_of(name)), "refusals", lambda self, call: [f"{self.name} is on strike"]
        )
    with pytest.raises(CallRefusedError, match="no backend can serve") as caught:
        attention(*qkv)
    assert {"sdpa is on strike", "eager is on strike"} <= set(caught.value.reasons)


@pytest.mark.parametrize("cached", [True, False])
def test_a_training_call_never_lands_on_the_cache_only_kernel(cached, qkv, monkeypatch):
    monkeypatch.setenv("HF_ATTN_BACKEND", "triton_decode")
    grad = [t.clone().requires_grad_() for t in qkv]
    attention(*grad, is_causal=True, kv_cache=object() if cached else None)
    assert served() == {"sdpa": 1}
    assert len(witness.substitutions()) == 1
    with pytest.raises(CallRefusedError) as caught:
        attention(*grad, is_causal=True, backend="triton_decode")
    reasons = " ".join(caught.value.reasons)
    assert "gradients" in reasons
    assert "KV cache" in reasons


def test_the_environment_can_say_auto_or_nothing(qkv, monkeypatch):
    for value in ("", "auto"):
        monkeypatch.setenv("HF_ATTN_BACKEND", value)
        attention(*qkv)
        assert get_backend(use_default=False) is None
    assert served() == {"sdpa": 2}
    assert witness.substitutions() == {}


def test_get_backend_without_anything():
    assert get_backend(use_default=False) is None
    assert get_backend().name in ("sdpa", "flash_attention_2")  # the latter where installed


def test_forward_only_takes_no_gradient(qkv):
    grad = [t.clone().requires_grad_() for t in qkv]
    assert attention(*grad, fwd=True).requires_grad is False
    assert attention(*grad, fwd=True, backend="flex_attention").requires_grad is False
    assert attention(*grad).requires_grad is True
