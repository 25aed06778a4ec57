"""The first launch of a set of shapes and strides: through Triton, which compiles if need be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hf_attn_backends.kernels.bound import BoundKernel, Map, Plan
from hf_attn_backends.kernels.hopper.backward_plans import (
    KEYS,
    Plans,
    Room,
    new_gradients,
    tile_rows,
)
from hf_attn_backends.kernels.hopper.limits import KINDS, safe_strides
from hf_attn_backends.kernels.visibility import Visibility

OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}
_LOG2_E = 1.4426950408889634
_SCAN = 1024  # rows of intervals that are read at a time


class _Call(NamedTuple):
    """One launch: the descriptors' tensors, the pointers' tensors, the scalars, the programs."""

    mapped: tuple[Tensor, ...]
    pointers: tuple[Tensor, ...]
    scalars: tuple[int | float, ...]
    programs: int


_BOUND: dict[tuple[object, ...], BoundKernel | None] = {}


def _eighths(tensor: Tensor) -> list[int]:
    """Strides of batch, head and row in units of 8 elements."""
    return [stride // 8 for stride in safe_strides(tensor)[:3]]


def _calls(
    given: Sequence[Tensor],
    bounds: Tensor,
    spaces: Sequence[Tensor],
    grads: Sequence[Tensor],
    visibility: Visibility,
    scale: float,
) -> dict[str, _Call]:
    """The launches in order; arguments as in the kernels' docstrings."""
    query, grad_out, key, value, out, lse = given
    acc, stats, hull, tiles = spaces
    dq, dk, dv = grads
    batch, heads, m_len, head_dim = query.shape
    kv_heads, n_len = key.shape[1:3]
    m_tiles, n_tiles = -(-m_len // tile_rows(head_dim)), -(-n_len // KEYS)
    kind = visibility.kind
    interval_stride = 2 * m_len if kind == "intervals" and bounds.shape[0] > 1 else 0
    scale = float(scale)
    strides = (*_eighths(out), *_eighths(grad_out), *lse.stride(), interval_stride)
    calls = {
        "prepare": _Call(
            (),
            (out, grad_out, lse, bounds, stats, acc),
            (*strides, heads, m_len, n_len, m_tiles),
            batch * heads * m_tiles,
        ),
        "hull": _Call(
            (),
            (bounds, hull, tiles),
            (interval_stride, m_len, n_len, m_tiles, n_tiles),
            batch * (m_tiles + n_tiles),
        ),
        "main": _Call(
            (query, grad_out, key, value, stats, acc, dk, dv),
            (hull, tiles),
            (
                scale * _LOG2_E,
                scale,
                batch * kv_heads,
                kv_heads,
                heads // kv_heads,
                m_len,
                n_len,
                m_tiles,
                n_tiles,
                min(visibility.window or 0, 2**30),
            ),
            n_tiles * batch * kv_heads,
        ),
        "finish": _Call(
            (),
            (acc, dq),
            (scale, *_eighths(dq), heads, m_len, m_tiles),
            batch * heads * m_tiles,
        ),
    }
    if kind != "intervals":
        del calls["hull"]
    return calls


def _descriptors(tensors: Sequence[Tensor]) -> list[object]:
    """Tensor maps of the main kernel, in the order of its arguments."""
    from triton.experimental.gluon import language as gl

    from hf_attn_backends.kernels.hopper.gluon_compat import TensorDescriptor

    def of(tensor: Tensor, block: list[int], layout: object) -> object:
        strides = safe_strides(tensor) if tensor.dim() == 4 else list(tensor.stride())
        return TensorDescriptor(tensor, list(tensor.shape), strides, block, layout)

    query, grad_out, key, value, stats, acc, dk, dv = tensors
    head_dim = query.shape[-1]
    tile, stats_rows = gl.NVMMASharedLayout(128, 16, 4), tile_rows(head_dim)
    rows, keys = [1, 1, stats_rows, head_dim], [1, 1, KEYS, head_dim]
    kinds = stats.shape[0] // (acc.shape[0] // 256)
    return [
        of(query, rows, tile),
        of(grad_out, rows, tile),
        of(key, keys, tile),
        of(value, keys, tile),
        of(stats, [kinds, stats_rows], gl.NVMMASharedLayout(0, 32, 2)),
        of(acc, [128, 32], gl.NVMMASharedLayout(128, 32, 2)),
        of(dk, keys, tile),
        of(dv, keys, tile),
    ]


def first_launch(
    given: Sequence[Tensor], intervals: Tensor | None, visibility: Visibility, scale: float
) -> tuple[Plans | None, tuple[Tensor, Tensor, Tensor]]:
    """Run the kernels through Triton, compiling what is missing, on the current device.

    Args:
        given: query, grad_out, key, value, out and lse, readable.
        intervals: int32 `[B or 1, M, 2]`, contiguous, or None.
        visibility: Which keys a row sees.
        scale: Softmax scale.

    Returns:
        The plans for further launches, None where Triton's calling convention is not the known one;
        the gradients.
    """
    from hf_attn_backends.kernels.hopper import backward_kernels, backward_passes

    query, _grad_out, key, _value, _out, lse = given
    kind, head_dim = visibility.kind, query.shape[-1]
    rows = tile_rows(head_dim)
    room = Room.of(query, key, kind)
    memory = torch.empty(sum(room), dtype=torch.float32, device=query.device)
    acc, stats, hull, tiles = memory.split(room)
    grads = new_gradients(query, key)
    spaces = [acc.view(-1, 32), stats.view(-1, rows), lse, lse]
    if intervals is not None:
        spaces[2:] = hull.view(torch.int32), tiles.view(torch.int32)
    bounds = lse if intervals is None else intervals
    calls = _calls(given, bounds, spaces, grads, visibility, scale)
    launches = {
        "prepare": (
            backward_passes.backward_prepare,
            {"BM": rows, "D": head_dim, "INTERVALS": kind == "intervals"},
        ),
        "hull": (backward_passes.backward_hull, {"BM": rows, "BN": KEYS, "SCAN": _SCAN}),
        "main": (backward_kernels.attention_backward, {"KIND": KINDS.index(kind)}),
        "finish": (backward_passes.backward_finish, {"BM": rows, "D": head_dim}),
    }
    plans: dict[str, Plan | None] = {}
    for name, call in calls.items():
        kernel, constants = launches[name]
        descriptors = _descriptors(call.mapped) if call.mapped else []
        compiled = kernel[(call.programs,)](
            *descriptors, *call.pointers, *call.scalars, **constants, **OPTIONS
        )
        kept = (name, query.dtype, head_dim, kind, query.device.index)
        if kept not in _BOUND:
            _BOUND[kept] = BoundKernel.of(compiled, len(call.pointers) + len(call.scalars))
        plans[name] = _plan(_BOUND[kept], call)
    if None in plans.values():
        return None, grads
    return Plans(**{"hull": None, **plans}, room=room), grads


def _plan(bound: BoundKernel | None, call: _Call) -> Plan | None:
    if bound is None:
        return None
    maps = [
        Map.of(tensor, safe_strides(tensor) if tensor.dim() == 4 else tensor.stride(), metadata)
        for tensor, metadata in zip(call.mapped, bound.maps, strict=True)
    ]
    slots = (*[None] * len(call.pointers), *call.scalars)
    return Plan(bound, maps, slots, call.programs)
