"""Host cost of a warm call beside the operator: adapter, dispatch, coverage check, witness."""

from __future__ import annotations

import time

import pytest
import torch
from transformers.masking_utils import causal_mask_function

from hf_attn_backends import witness
from hf_attn_backends.backends import triton_fa2
from hf_attn_backends.hf.adapter import attention_function
from hf_attn_backends.hf.masks import visibility_mask

CALLS, ROUNDS = 300, 15


def _microseconds(function) -> float:
    function()
    best = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(CALLS):
            function()
        best.append((time.perf_counter() - start) / CALLS * 1e6)
    return min(best)


class _Module(torch.nn.Module):
    is_causal = True
    config = None


@pytest.mark.parametrize("kind", ["causal", "window", "intervals", "dense", "packed"])
def test_adapter_coverage_and_witness(gated, kernel_device, monkeypatch, kind):
    result = torch.empty(2, 8, 4, 16, device=kernel_device).transpose(1, 2)

    def operator(query, key, value, visibility, *, scale, backend, **features):
        return result

    monkeypatch.setattr(triton_fa2, "_attend", operator)
    query = torch.randn(2, 8, 4, 16, device=kernel_device).transpose(1, 2)
    key = value = torch.randn(2, 8, 2, 16, device=kernel_device).transpose(1, 2)
    mask, ids = None, torch.arange(8, device=kernel_device)[None]
    if kind == "intervals":
        keep = torch.ones(2, 8, dtype=torch.bool, device=kernel_device)
        keep[0, :3] = False
        config = type("Config", (), {"model_type": "mistral"})()
        mask = visibility_mask(
            2,
            8,
            8,
            mask_function=causal_mask_function,
            attention_mask=keep,
            config=config,
            device=kernel_device,
        )
    elif kind == "dense":
        mask = torch.rand(2, 1, 8, 8, device=kernel_device) > 0.5
    elif kind == "packed":
        ids = torch.arange(8, device=kernel_device)[None] % 4
    attend, module = attention_function("triton_fa2"), _Module()
    window = 4 if kind == "window" else None

    def call():
        attend(
            module, query, key, value, mask, dropout=0.0, scaling=0.25, sliding_window=window,
            position_ids=ids, use_cache=False,
        )  # fmt: skip

    def counted():
        witness.count("test", "triton", "forward", "float32/d16/causal")

    bare = _microseconds(lambda: operator(query, key, value, None, scale=1.0, backend=""))
    cost = _microseconds(call) - bare + _microseconds(counted)
    print(f"{kind}: {cost:.1f} us a call beside the operator")
    assert cost <= 60  # the goal is 10 on an idle machine; this one may be shared
    witness.reset()
