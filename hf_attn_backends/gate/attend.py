"""Functions under test, and the conditions that they run under.

Shapes: `B` batch, `H` query heads, `G` key/value heads, `M` query length, `N` key length, `D`
head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from hf_attn_backends.gate.inputs import Inputs

WITNESS_NAME = "gate"
"""The backend name that the operator's launches are counted under while the gate measures."""


class Attended(NamedTuple):
    """What a function under test returns: `[B, H, M, E]`, `[B, H, M]`, and the gradients."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks: Tensor | None = None


Attend = Callable[[Inputs], Attended]


def operator(variant: str = "auto") -> Attend:
    """The package's own operator under autograd, as models call it."""

    def attend(inputs: Inputs) -> Attended:
        from hf_attn_backends.kernels.ops import triton_attention_with_lse

        leaves = [x.detach().requires_grad_() for x in inputs[:3]]
        options = inputs.kernel_options()
        if inputs.sinks is not None:
            options["sinks"] = inputs.sinks.detach().requires_grad_()
            leaves.append(options["sinks"])
        with torch.enable_grad():
            query, key, value = leaves[:3]
            out, lse = triton_attention_with_lse(
                query, key, value, inputs.visibility, scale=inputs.scale, backend=WITNESS_NAME,
                variant=variant, **options,
            )  # fmt: skip
            grads = torch.autograd.grad(out, leaves, inputs.grad_out)
        return Attended(out.detach(), lse.detach(), *grads)

    return attend


def from_launches(
    launch_forward: Callable[..., tuple[Tensor, Tensor]],
    launch_backward: Callable[..., tuple[Tensor, ...]],
) -> Attend:
    """A pair of launch functions, without the operator around them."""

    def attend(inputs: Inputs) -> Attended:
        query, key, value, grad_out, visibility, scale = inputs[:6]
        options = inputs.kernel_options()
        out, lse = launch_forward(query, key, value, visibility, scale, **options)
        grads = launch_backward(grad_out, query, key, value, out, lse, visibility, scale, **options)
        return Attended(out, lse, *grads)

    return attend


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill every new uninitialised floating-point tensor with NaN while the block runs."""

    def fill(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def poison(*args: object, **kwargs: object) -> Tensor:
            tensor = make(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.dtype.is_floating_point else tensor

        return poison

    functions = {name: getattr(torch, name) for name in ("empty", "empty_like", "empty_strided")}
    methods = {name: getattr(torch.Tensor, name) for name in ("new_empty", "new_empty_strided")}
    try:
        for name, make in functions.items():
            setattr(torch, name, fill(make))
        for name, make in methods.items():
            setattr(torch.Tensor, name, fill(make))
        yield
    finally:
        for name, make in functions.items():
            setattr(torch, name, make)
        for name in methods:  # they are inherited from torch's C base class
            delattr(torch.Tensor, name)


@contextmanager
def ieee_products() -> Iterator[None]:
    """Keep the yardstick's fp32 products out of TF32, whatever the process has set."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
