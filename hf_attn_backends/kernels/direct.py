"""Calls that need no dispatcher: eager ones, on plain tensors.

Passing an operator through PyTorch's dispatcher costs 5 to 20 microseconds of host time: its
arguments are boxed and unboxed, and its results too. Where nothing would look at the call on the
way (no tracing, no mode, no transform, no subclass, no profiler), it is launched from here.

Shapes: `B` batch, `H` query heads, `G` key/value heads, `M` query length, `N` key length, `D` head
dim, `E` the value's head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.autograd.function import once_differentiable

from hf_attn_backends.kernels import counted
from hf_attn_backends.kernels.counted import Options
from hf_attn_backends.kernels.visibility import FULL, Visibility

_C: Any = torch._C
_dispatch_modes = _C._len_torch_dispatch_stack
_function_modes = _C._len_torch_function_stack
_transforms = _C._are_functorch_transforms_active
_traced = _C._is_tracing
_batched = _C._functorch.is_legacy_batchedtensor


def possible(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether a call may pass the dispatcher by. Not for code that Dynamo traces."""
    return (
        type(query) is type(key) is type(value) is Tensor
        and (query.is_cuda or query.is_cpu)
        and not _dispatch_modes()  # fake tensors, functional ones, counters, selective checkpoints
        and not _function_modes()
        and not _transforms()
        and not _traced()
        and not profiler._is_profiler_enabled  # it shows operators by name
        # negated lazily: memory is not values
        and not (query.is_neg() or key.is_neg() or value.is_neg())
        # batched by `is_grads_batched`: no memory at all
        and not (_batched(query) or _batched(key) or _batched(value))
    )


class DirectAttention(torch.autograd.Function):
    """Autograd over the launches; the traced way is `ops.TritonAttention`."""

    @staticmethod
    def forward(ctx, query, key, value, sinks, options):
        """Launch, and keep what the backward pass needs."""
        out, lse = counted.forward(query, key, value, options)
        visibility = options.visibility
        intervals, dense, seed = visibility.intervals, visibility.dense, options.seed
        if intervals is None and dense is None and sinks is None and seed is None:
            ctx.save_for_backward(query, key, value, out, lse)
            ctx.options = options
        else:
            # Every tensor is saved, so that writing to one is noticed and hooks on saved tensors
            # (offloading to the CPU) get them all: what is kept beside them holds none.
            ctx.save_for_backward(query, key, value, out, lse, intervals, dense, sinks, seed)
            bare = FULL if visibility.kind in ("intervals", "dense") else visibility
            ctx.options = options._replace(visibility=bare, sinks=None, seed=None)
        return out

    @staticmethod
    def backward(ctx, grad_out):  # pyright: ignore[reportIncompatibleMethodOverride]
        """Launch for the gradients that are wanted; a second derivative is refused."""
        if torch.is_grad_enabled():  # create_graph=True
            return _refusing_gradients(ctx, grad_out)
        return _gradients(ctx, grad_out)


def _gradients(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, out, lse, *rest = ctx.saved_tensors
    wants_q, wants_k, wants_v, wants_sinks, _ = ctx.needs_input_grad
    options, sinks = ctx.options, None
    if rest:
        intervals, dense, sinks, seed = rest
        visibility = options.visibility
        if intervals is not None or dense is not None:
            visibility = Visibility(intervals=intervals, dense=dense)
        options = options._replace(visibility=visibility, sinks=sinks, seed=seed)
    # Compiled autograd traces this, too.
    direct = not torch.compiler.is_compiling() and possible(grad_out, query, key)
    run = counted.backward if direct else through_operator
    grads = run(
        grad_out, query, key, value, out, lse, options, wants_q, wants_k or wants_v
    )  # fmt: skip
    return (
        grads[0] if wants_q else None,
        grads[1] if wants_k else None,
        grads[2] if wants_v else None,
        grads[3].to(sinks.dtype) if wants_sinks and sinks is not None else None,
        None,
    )


def through_operator(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor,
    options: Options, need_dq: bool, need_dkdv: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """`counted.backward` by way of the dispatcher."""
    visibility = options.visibility
    return torch.ops.hf_attn_backends.attention_backward.default(
        grad_out, query, key, value, out, lse, visibility.intervals, visibility.dense,
        options.scale, visibility.causal, visibility.window or 0, options.backend, options.variant,
        need_dq, need_dkdv, options.sinks, options.seed, options.softcap, options.dropout_p,
    )  # fmt: skip


_refusing_gradients = once_differentiable(_gradients)

# `Function.apply` looks for transforms and their dead wrappers first, 2 us; `possible` did.
_base: Any = super(torch.autograd.Function, DirectAttention)
attend: Any = _base.apply
