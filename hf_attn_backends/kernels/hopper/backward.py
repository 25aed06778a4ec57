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
from hf_attn_backends.kernels.hopper.backward_plans import (
    KEYS,
    Plans,
    Tensors,
    first_launch,
    tile_rows,
)
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
    intervals = visibility.intervals
    if intervals is not None and not intervals.is_contiguous():
        intervals = intervals.contiguous()
    given = (query, grad_out, key, value, out, lse)
    plans = _PLANS.get(_plan_key(given, visibility, scale))
    misaligned = any(tensor.data_ptr() & 15 for tensor in given[:5])
    if plans is None or misaligned or torch.are_deterministic_algorithms_enabled():
        reasons = refusals(query, key, value, visibility, scale)
        if reasons:
            asked = "the hopper variant cannot serve this backward pass"
            raise CallRefusedError(compose(asked, reasons), reasons)
        given = (query, _readable(grad_out), key, value, _readable(out), lse)
    tensors = _with_results(given, intervals)
    grads = tensors.dq, tensors.dk, tensors.dv
    if query.numel() == 0 or key.numel() == 0:
        for grad in grads:
            grad.zero_()
    elif query.device.index == torch.cuda.current_device():
        _run(tensors, visibility, scale)
    else:
        with torch.cuda.device(query.device):
            _run(tensors, visibility, scale)
    nothing = query.new_empty(0)
    return (
        grads[0] if need_dq else nothing,
        grads[1] if need_dkdv else nothing,
        grads[2] if need_dkdv else query.new_empty(0),
    )


def _readable(tensor: Tensor) -> Tensor:
    """`[B, H, M, D]` that 16-byte accesses can read: the tensor itself, or one copy.

    Gradients come as the rest of the model made them, expanded (the gradient of a sum) for one.
    """
    if layout_refusals("tensor", tensor):
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    return tensor


def _plan_key(given: tuple[Tensor, ...], visibility: Visibility, scale: float) -> tuple:
    """What a plan depends on; addresses are no part of it."""
    intervals = visibility.intervals
    return (
        *[(tensor.shape, tensor.stride()) for tensor in given],
        given[0].dtype,
        given[0].device.index,
        visibility.kind,
        visibility.window,
        None if intervals is None else intervals.shape[0],
        scale,
    )


def _with_results(given: tuple[Tensor, ...], intervals: Tensor | None) -> Tensors:
    """Allocate gradients and workspaces."""
    query, _grad_out, key, _value, _out, lse = given
    batch, heads, m_len, head_dim = query.shape
    kv_heads, n_len = key.shape[1:3]
    rows = tile_rows(head_dim)
    m_tiles, n_tiles = -(-m_len // rows), -(-n_len // KEYS)
    tiles = batch * heads * m_tiles
    sums = tiles * rows * head_dim
    stats = tiles * rows * (2 if intervals is None else 4)
    room = torch.empty(sums + stats, dtype=torch.float32, device=query.device)
    hull = tile_table = lse
    if intervals is not None:
        counts = [2 * batch * n_tiles, 2 * batch * m_tiles]
        tables = torch.empty(sum(counts), dtype=torch.int32, device=query.device)
        hull, tile_table = tables.split(counts)
    return Tensors(
        *given,
        intervals=lse if intervals is None else intervals,
        stats=room[sums:].view(-1, rows),
        acc=room[:sums].view(-1, 32),
        hull=hull,
        tiles=tile_table,
        dq=query.new_empty((batch, m_len, heads, head_dim)).transpose(1, 2),
        dk=query.new_empty((batch, n_len, kv_heads, head_dim)).transpose(1, 2),
        dv=query.new_empty((batch, n_len, kv_heads, head_dim)).transpose(1, 2),
    )


def _run(tensors: Tensors, visibility: Visibility, scale: float) -> None:
    """Launch through the kept plan of these shapes and strides, or make one."""
    key = _plan_key(tensors[:6], visibility, scale)
    plans = _PLANS.get(key)
    if plans is not None:
        plans.launch(tensors)
        return
    plans = first_launch(tensors, visibility.kind, visibility.window, scale)
    if plans is not None:
        if len(_PLANS) >= _PLANS_KEPT:
            _PLANS.clear()
        _PLANS[key] = plans
