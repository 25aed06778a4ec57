"""Plans and the lengths of calls: a growing cache makes no new plan, what matters does."""

from __future__ import annotations

import pytest
import torch

from hf_attn_backends.backends import execution, proof
from hf_attn_backends.backends.base import AttentionBackend
from hf_attn_backends.backends.sdpa import SdpaBackend
from hf_attn_backends.dispatch import attention, run_call
from hf_attn_backends.errors import CallRefusedError
from hf_attn_backends.kernels.visibility import CAUSAL, FULL, Visibility

STEPS = 64


@pytest.fixture(autouse=True)
def planned(monkeypatch):
    """The calls that were planned: each is a slow one."""
    proof.forget()
    calls = []
    for name in ("explicit_plan", "preferred_plan"):
        plain = getattr(execution, name)
        monkeypatch.setattr(
            execution, name, lambda who, call, plain=plain: calls.append(call) or plain(who, call)
        )
    yield calls
    proof.forget()


def make(q_len=1, k_len=1, batch=1, heads=4, kv_heads=2, dim=16):
    shapes = [(batch, heads, q_len, dim), (batch, kv_heads, k_len, dim)]
    query, key = map(torch.randn, shapes)
    return query, key, torch.randn(shapes[1])


def decode(backend, steps=STEPS):
    for length in range(10, 10 + steps):
        run_call(backend, *make(1, length), FULL, scale=None, has_cache=True)


@pytest.mark.parametrize("backend", ["sdpa", "eager", "auto"])
def test_a_growing_cache_is_planned_once(backend, planned):
    decode(backend)
    assert len(planned) == 1


def test_so_it_is_for_single_calls_and_their_masks(planned):
    for length in range(2, 2 + STEPS):
        tensors = make(1, length)
        attention(*tensors, kv_cache=object(), backend="sdpa")
        attention(*tensors, attn_mask=torch.ones(1, 1, 1, length).bool(), backend="sdpa")
        attention(*tensors, attn_mask=torch.zeros(1, length), backend="sdpa")
    assert len(planned) == 3


def test_our_kernel_decodes_with_one_plan_and_one_variant(gated_decode, planned, kernel_device):
    from hf_attn_backends.kernels import variants

    variants._resolved.clear()
    for length in range(10, 10 + STEPS):
        query, key, value = (t.to(kernel_device) for t in make(1, length))
        run_call("triton_fa2", query, key, value, FULL, scale=None, has_cache=True)
    assert len(planned) == 1
    assert len(variants._resolved) == 1


@pytest.fixture
def gated_decode(home, kernel_device):
    from hf_attn_backends import gate

    coverage = ["float32/d16/full"]
    gate.write_equivalence_gate(
        tolerances={}, shapes_covered=[], device=kernel_device, coverage=coverage
    )


CHANGES = {
    "lengths that are equal": lambda: make(9, 9),
    "heads": lambda: make(1, 9, heads=8),
    "key heads": lambda: make(1, 9, kv_heads=1),
    "head dim": lambda: make(1, 9, dim=32),
    "dtype": lambda: [t.double() for t in make(1, 9)],
    "value head dim": lambda: [*make(1, 9)[:2], torch.randn(1, 2, 9, 24)],
    "gradients": lambda: [t.requires_grad_() for t in make(1, 9)],
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_plan_depends_on_makes_another(change, planned):
    run_call("sdpa", *make(1, 9), FULL, scale=None)
    for _ in range(2):
        run_call("sdpa", *CHANGES[change](), FULL, scale=None)
    assert len(planned) == 2


def test_so_do_visibility_cache_and_features(planned):
    tensors = make(1, 9)
    calls = [
        (FULL, {}), (CAUSAL, {}), (Visibility(causal=True, window=3), {}),
        (Visibility(dense=torch.ones(1, 1, 1, 9).bool()), {}), (FULL, {"has_cache": True}),
        (FULL, {"softcap": 2.0}), (FULL, {"sinks": torch.zeros(4)}),
    ]  # fmt: skip
    for _ in range(2):
        for visibility, options in calls:
            run_call("eager", *tensors, visibility, scale=None, **options)
    assert len(planned) == len(calls)


BAD = {
    "value must be as long as key": lambda q, k, v: (q, k, v[:, :, :-1]),
    "head_dim": lambda q, k, v: (q, k[..., :8], v),
    "batch": lambda q, k, v: (q, k.expand(2, -1, -1, -1), v.expand(2, -1, -1, -1)),
    "4 dimensions": lambda q, k, v: (q[0], k, v),
    "whole multiple": lambda q, k, v: (q[:, :3], k, v),
    "as many heads": lambda q, k, v: (q, k, v[:, :1]),
}


@pytest.mark.parametrize("says", BAD)
def test_a_bad_call_of_a_new_length_is_refused_beside_good_plans(says):
    decode("sdpa", 3)
    with pytest.raises(ValueError, match=says):
        run_call("sdpa", *BAD[says](*make(1, 77)), FULL, scale=None, has_cache=True)


def test_a_mask_of_another_shape_is_refused_though_its_kind_is_planned():
    attention(*make(1, 9), attn_mask=torch.ones(1, 9).bool(), backend="sdpa")
    with pytest.raises(ValueError, match="attn_mask must broadcast"):
        attention(*make(1, 9), attn_mask=torch.ones(1, 8).bool(), backend="sdpa")
    rows = torch.zeros(1, 1, 2, dtype=torch.int32)
    attention(*make(1, 9), attn_mask=rows, backend="sdpa")
    with pytest.raises(ValueError, match="intervals must have shape"):
        attention(*make(2, 9), attn_mask=rows, backend="sdpa")


class Short(AttentionBackend):
    """Of a third party; serves few keys."""

    name = "short"
    counts_itself = True

    def refusals(self, call):
        """Looks at a length."""
        return ["at most 11 keys"] if call.k_len > 11 else []

    def forward(self, query, key, value, call, **options):
        """Looks at it again."""
        assert call.k_len == key.shape[2]
        return query


class ShortSdpa(SdpaBackend):
    """A subclass of ours, which says nothing about lengths."""

    name = "short_sdpa"
    refusals = Short.refusals


@pytest.mark.parametrize("backend", [Short(), ShortSdpa()])
def test_a_backend_that_may_look_at_lengths_is_asked_for_each(backend, planned):
    for length in (10, 11, 10, 11):
        attention(*make(1, length), backend=backend)
    assert [call.k_len for call in planned] == [10, 11]
    with pytest.raises(CallRefusedError, match="at most 11 keys"):
        attention(*make(1, 12), backend=backend)


def test_a_preference_that_looks_at_lengths_is_asked_for_each(monkeypatch, planned):
    from hf_attn_backends.backends.factory import AttentionBackendFactory

    AttentionBackendFactory.register("short", Short)
    try:
        monkeypatch.setenv("HF_ATTN_BACKEND", "short")
        for length in (10, 12, 10, 12, 13):
            attention(*make(1, length))
    finally:
        AttentionBackendFactory.unregister("short")
    assert [call.k_len for call in planned] == [10, 12, 13]


def test_forgetting_plans_them_anew(planned):
    decode("sdpa", 2)
    proof.forget()
    decode("sdpa", 2)
    assert len(planned) == 2
