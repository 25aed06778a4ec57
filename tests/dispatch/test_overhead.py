"""What dispatch adds on the host to a call of scaled_dot_product_attention."""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F

from hf_attn_backends.dispatch import attention, run_call
from hf_attn_backends.kernels.visibility import CAUSAL

# The target is 10 us on an unloaded machine, printed below; shared CI machines get five times that.
CI_BOUND_US = 50.0


def best_us(function, calls=400):
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - start) / calls * 1e6


def test_dispatch_overhead():
    query, key, value = (torch.randn(1, 2, 4, 16) for _ in range(3))
    leaf = query.clone().requires_grad_()
    arms = {
        "direct": lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True),
        "explicit": lambda: attention(query, key, value, is_causal=True, backend="sdpa"),
        "default": lambda: attention(query, key, value, is_causal=True),
        "model": lambda: run_call("sdpa", query, key, value, CAUSAL, scale=None),
        "direct, grad": lambda: F.scaled_dot_product_attention(leaf, key, value, is_causal=True),
        "explicit, grad": lambda: attention(leaf, key, value, is_causal=True, backend="sdpa"),
        "model, grad": lambda: run_call("sdpa", leaf, key, value, CAUSAL, scale=None),
    }
    best = dict.fromkeys(arms, float("inf"))
    for function in arms.values():
        function()
    for _ in range(15):  # interleaved, so that a neighbour's load meets every arm
        for name, function in arms.items():
            best[name] = min(best[name], best_us(function))
    added = {
        name: us - best["direct, grad" if "grad" in name else "direct"] for name, us in best.items()
    }
    figures = {name: round(us, 1) for name, us in added.items() if not name.startswith("direct")}
    print("host overhead over F.scaled_dot_product_attention, us a call:", figures)
    assert max(added.values()) < CI_BOUND_US
