"""The calls whose host cost `host_cost.py` measures; making them needs a GPU."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hf_attn_backends import witness
from hf_attn_backends.backends import triton_fa2
from hf_attn_backends.kernels.ops import triton_attention
from hf_attn_backends.kernels.visibility import CAUSAL

SCALE = 128**-0.5
LENGTH, CACHE = 128, 4096

Call = Callable[[], object]


def draw(heads: int, length: int, grad: bool = False) -> Tensor:
    """A bfloat16 tensor `[1, heads, length, 128]` over rows-first memory."""
    rows = torch.randn(1, length, heads, 128, device="cuda", dtype=torch.bfloat16)
    return rows.transpose(1, 2).requires_grad_(grad)


def forward_calls(attend: Callable[..., Any], module: torch.nn.Module) -> dict[str, Call]:
    """Calls without gradients; run them under `no_grad`."""
    q, k, v = draw(32, LENGTH), draw(8, LENGTH), draw(8, LENGTH)
    mask = torch.rand(1, 1, LENGTH, LENGTH, device="cuda") > 0.5
    ids = torch.arange(LENGTH, device="cuda")[None]
    one, lengths = draw(32, 1), count()
    memory = torch.randn(8 * 2 * CACHE * 128, device="cuda", dtype=torch.bfloat16)

    def cache(length: int) -> Tensor:
        """Contiguous `[1, 8, N, D]`: what `torch.cat` of a growing cache gives, for free."""
        return memory[: 8 * length * 128].view(1, 8, length, 128)

    fixed = cache(CACHE)

    def step() -> object:
        grown = cache(CACHE + 1 + next(lengths) % (CACHE // 2))
        return attend(module, one, grown, grown, None, scaling=SCALE)

    calls: dict[str, Call] = {
        f"operator, {variant}": lambda variant=variant: triton_attention(
            q, k, v, CAUSAL, variant=variant
        )
        for variant in ("hopper", "auto", "triton")
    }
    return {
        **calls,
        "adapter to launch": lambda: attend(module, q, k, v, None, scaling=SCALE),
        "adapter to launch, with positions": lambda: attend(
            module, q, k, v, None, scaling=SCALE, position_ids=ids
        ),
        "adapter to launch, dense mask": lambda: attend(module, q, k, v, mask, scaling=SCALE),
        "sdpa": lambda: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        "operator, decode": lambda: triton_attention(one, fixed, fixed, CAUSAL),
        "decode step, same length": lambda: attend(module, one, fixed, fixed, None, scaling=SCALE),
        "decode step, a new length each": step,
        "a view of the cache": lambda: cache(CACHE + 1 + next(lengths) % (CACHE // 2)),
        "sdpa, decode": lambda: scaled_dot_product_attention(one, fixed, fixed, enable_gqa=True),
    }


def stand_in_calls(attend: Callable[..., Any], module: torch.nn.Module) -> dict[str, Call]:
    """The adapter with a stand-in for the operator; the caller puts it in place."""
    q, k, v = draw(32, LENGTH), draw(8, LENGTH), draw(8, LENGTH)
    mask = torch.rand(1, 1, LENGTH, LENGTH, device="cuda") > 0.5
    ids = torch.arange(LENGTH, device="cuda")[None]
    options = {"scaling": SCALE, "position_ids": ids, "use_cache": False}
    result = draw(32, LENGTH)

    def operator(query: Tensor, key: Tensor, value: Tensor, visibility: object, **_: Any) -> Tensor:
        return result

    triton_fa2._attend = operator
    return {
        "adapter over a stand-in, causal": lambda: attend(module, q, k, v, None, **options),
        "adapter over a stand-in, dense mask": lambda: attend(module, q, k, v, mask, **options),
        "stand-in": lambda: operator(q, k, v, CAUSAL, scale=SCALE, backend="triton_fa2"),
        "witness": lambda: witness.count("host_cost", "none", "forward", "bfloat16/d128/causal"),
    }


def training_calls(attend: Callable[..., Any], module: torch.nn.Module) -> dict[str, Call]:
    """Forward passes with gradients wanted, and backward passes."""
    q, k, v = leaves = draw(32, LENGTH, True), draw(8, LENGTH, True), draw(8, LENGTH, True)
    forwards: dict[str, Callable[[], Tensor]] = {
        "auto": lambda: attend(module, q, k, v, None, scaling=SCALE)[0],
        "triton": lambda: triton_attention(q, k, v, CAUSAL, variant="triton"),
        "sdpa": lambda: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
    }
    calls: dict[str, Call] = {}
    for name, forward in forwards.items():
        out = forward()
        grad = torch.randn_like(out)
        calls[f"forward with gradients, {name}"] = forward
        calls[f"backward, {name}"] = lambda out=out, grad=grad: torch.autograd.grad(
            out, leaves, grad, retain_graph=True
        )
    return calls
