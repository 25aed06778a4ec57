"""Host side of the sm_90 backward: what it can serve, and its launch.

Shapes: `B` batch, `H` query heads, `G` key/value heads, `M` query length, `N` key length, `D`
head dim. Three kernels (four for intervals), each compiled once for each (dtype, head dim,
visibility kind): lengths, batch, heads, window, scale and strides are run-time values. A launch
plan is kept for each set of shapes and strides.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_attn_backends.errors import CallRefusedError, compose
from hf_attn_backends.kernels.hopper.backward_first import first_launch
from hf_attn_backends.kernels.hopper.backward_plans import Plans, new_gradients
from hf_attn_backends.kernels.hopper.limits import call_refusals, layout_refusals
from hf_attn_backends.kernels.visibility import Visibility

_MAX = 2**31 - 1
_PLANS_KEPT = 1024
_PLANS: dict[tuple[object, ...], Plans] = {}


def refusals(
    q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, scale: float | None = None
) -> list[str]:
    """Why this variant cannot serve a (valid) call's backward pass; empty: it can.

    Args:
        q: `[B, H, M, D]`.
        k: `[B, G, N, D]`.
        v: `[B, G, N, E]`.
        visibility: Which keys a row sees.
        scale: Softmax scale, None for the default one.
    """
    reasons = call_refusals(q, k, v, visibility, scale)
    if torch.are_deterministic_algorithms_enabled():
        reasons.append(
            "torch.use_deterministic_algorithms is on, and this backward adds dQ in the order of "
            "arrival"
        )
    if q.shape[0] * q.shape[1] * (q.shape[2] + 128) * 4 > _MAX:
        reasons.append("batch x heads x query length must stay below 2^29")
    return reasons


def launch_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    visibility: Visibility,
    scale: float,
    *,
    need_dq: bool = True,
    need_dkdv: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of attention; all products in one pass.

    fp32 accumulation. dK and dV are deterministic; dQ is summed in the order of arrival. Beside the
    gradients it takes `B * H * M * D * 4` bytes for the fp32 sum of dQ and 8 to 16 bytes a row.

    Args:
        grad_out: `[B, H, M, D]`, any strides (one copy where 16-byte accesses cannot read it).
        query: `[B, H, M, D]`, bf16 or fp16.
        key: `[B, G, N, D]`.
        value: `[B, G, N, D]`.
        out: `[B, H, M, D]`, the forward pass's output.
        lse: fp32 `[B, H, M]`, the forward pass's, natural log, -inf on rows that see nothing.
        visibility: As in the forward pass: full, causal, window or intervals.
        scale: As in the forward pass.
        need_dq: Whether the query's gradient is wanted; else it comes back empty `[0]`.
        need_dkdv: Likewise for key and value.

    Returns:
        dQ `[B, H, M, D]`, dK and dV `[B, G, N, D]`, views of `[B, M, H, D]` memory, in the query's
        dtype. A row or key that takes part in nothing has exactly 0.

    Raises:
        CallRefusedError: See `refusals`.
    """
    given = (query, grad_out, key, value, out, lse)
    intervals = visibility.intervals
    if intervals is not None and not intervals.is_contiguous():
        intervals = intervals.contiguous()
    plans_key = _plans_key(given, intervals, visibility, scale)
    plans = _PLANS.get(plans_key)
    at = [tensor.data_ptr() for tensor in given]
    if (
        plans is None
        or (at[0] | at[1] | at[2] | at[3] | at[4]) & 15
        or torch.are_deterministic_algorithms_enabled()
        or query.device.index != torch.cuda.current_device()
    ):
        grads = _launch_with_care(given, intervals, visibility, scale)
    else:
        grads = plans.launch(query, key, at, intervals)
    if need_dq and need_dkdv:
        return grads
    nothing = query.new_empty(0)
    if need_dq:
        return grads[0], nothing, query.new_empty(0)
    return nothing, grads[1], grads[2]


def _plans_key(
    given: tuple[Tensor, ...], intervals: Tensor | None, visibility: Visibility, scale: float
) -> tuple[object, ...]:
    """What plans depend on; addresses are no part of it."""
    query, grad_out, key, value, out, lse = given
    return (
        query.shape,
        key.shape,
        query.stride(),
        grad_out.stride(),
        key.stride(),
        value.stride(),
        out.stride(),
        lse.stride(),
        query.dtype,
        query.device.index,
        visibility.kind,
        visibility.window,
        None if intervals is None else intervals.shape[0],
        scale,
    )


def _readable(tensor: Tensor) -> Tensor:
    """`[B, H, M, D]` that 16-byte accesses can read: the tensor itself, or one copy.

    Gradients come as the rest of the model made them, expanded (the gradient of a sum) for one.
    """
    if layout_refusals("tensor", tensor):
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    return tensor


def _launch_with_care(
    given: tuple[Tensor, ...], intervals: Tensor | None, visibility: Visibility, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The launch that refuses, copies, switches devices, and makes plans."""
    query, grad_out, key, value, out, lse = given
    reasons = refusals(query, key, value, visibility, scale)
    if reasons:
        asked = "the hopper variant cannot serve this backward pass"
        raise CallRefusedError(compose(asked, reasons), reasons)
    if query.numel() == 0 or key.numel() == 0:
        dq, dk, dv = new_gradients(query, key)
        return dq.zero_(), dk.zero_(), dv.zero_()
    given = (query, _readable(grad_out), key, value, _readable(out), lse)
    plans_key = _plans_key(given, intervals, visibility, scale)
    with torch.cuda.device(query.device):
        plans = _PLANS.get(plans_key)
        if plans is not None:
            return plans.launch(query, key, [tensor.data_ptr() for tensor in given], intervals)
        plans, grads = first_launch(given, intervals, visibility, scale)
    if plans is not None:
        if len(_PLANS) >= _PLANS_KEPT:
            _PLANS.clear()
        _PLANS[plans_key] = plans
    return grads
