"""Launches of the sm_90 backward's kernels: once through Triton, then through kept plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hf_attn_backends.kernels.hopper.bound import BoundKernel, Map, Plan
from hf_attn_backends.kernels.hopper.limits import KINDS, safe_strides

KEYS = 128  # keys of a program
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}
_TILE = 8192  # elements of a tile of queries
_LOG2_E = 1.4426950408889634
_SCAN = 1024  # rows of intervals that are read at a time


def tile_rows(head_dim: int) -> int:
    """Query rows of a tile: what keeps the shared memory of all head dims alike."""
    return _TILE // head_dim


class Tensors(NamedTuple):
    """Everything that the kernels read and write.

    Attributes:
        query, grad_out, out, dq: `[B, H, M, D]`.
        key, value, dk, dv: `[B, G, N, D]`.
        lse: fp32 `[B, H, M]`.
        intervals: int32 `[B or 1, M, 2]`, contiguous; `lse` in their absence.
        stats, acc: fp32 workspaces, see `backward_passes`.
        hull, tiles: int32 workspaces, likewise; `lse` without intervals.
    """

    query: Tensor
    grad_out: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    lse: Tensor
    intervals: Tensor
    stats: Tensor
    acc: Tensor
    hull: Tensor
    tiles: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


class Plans(NamedTuple):
    """The launches of one set of shapes and strides; `hull` for intervals only."""

    prepare: Plan
    hull: Plan | None
    main: Plan
    finish: Plan

    def launch(self, tensors: Tensors) -> None:
        """Run the kernels on the current stream of the current device."""
        stream = torch._C._cuda_getCurrentRawStream(tensors.query.device.index)
        address = [tensor.data_ptr() for tensor in tensors]
        query, grad_out, key, value, out, lse, intervals, stats, acc, hull, tiles, *grads = address
        self.prepare.launch(stream, (), (out, grad_out, lse, intervals, stats, acc))
        if self.hull is not None:
            self.hull.launch(stream, (), (intervals, hull, tiles))
        mapped = (query, grad_out, key, value, stats, acc, grads[1], grads[2])
        self.main.launch(stream, mapped, (hull, tiles))
        self.finish.launch(stream, (), (acc, grads[0]))


class _Call(NamedTuple):
    """One launch: the descriptors' tensors, the pointers' tensors, the scalars, the programs."""

    mapped: tuple[Tensor, ...]
    pointers: tuple[Tensor, ...]
    scalars: tuple[int | float, ...]
    programs: int


_BOUND: dict[tuple[object, ...], tuple[BoundKernel | None, ...]] = {}


def _eighths(tensor: Tensor) -> list[int]:
    """Strides of batch, head and row in units of 8 elements."""
    return [stride // 8 for stride in safe_strides(tensor)[:3]]


def _calls(t: Tensors, kind: str, window: int | None, scale: float) -> dict[str, _Call]:
    batch, heads, m_len, head_dim = t.query.shape
    kv_heads, n_len = t.key.shape[1:3]
    m_tiles, n_tiles = -(-m_len // tile_rows(head_dim)), -(-n_len // KEYS)
    interval_stride = 2 * m_len if kind == "intervals" and t.intervals.shape[0] > 1 else 0
    scale = float(scale)
    strides = (*_eighths(t.out), *_eighths(t.grad_out), *t.lse.stride(), interval_stride)
    calls = {
        "prepare": _Call(
            (),
            (t.out, t.grad_out, t.lse, t.intervals, t.stats, t.acc),
            (*strides, heads, m_len, n_len, m_tiles),
            batch * heads * m_tiles,
        ),
        "hull": _Call(
            (),
            (t.intervals, t.hull, t.tiles),
            (interval_stride, m_len, n_len, m_tiles, n_tiles),
            batch * (m_tiles + n_tiles),
        ),
        "main": _Call(
            (t.query, t.grad_out, t.key, t.value, t.stats, t.acc, t.dk, t.dv),
            (t.hull, t.tiles),
            (
                *(scale * _LOG2_E, scale),
                *(batch * kv_heads, kv_heads, heads // kv_heads),
                *(m_len, n_len, m_tiles, n_tiles, min(window or 0, 2**30)),
            ),
            n_tiles * batch * kv_heads,
        ),
        "finish": _Call(
            (),
            (t.acc, t.dq),
            (scale, *_eighths(t.dq), heads, m_len, m_tiles),
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


def first_launch(t: Tensors, kind: str, window: int | None, scale: float) -> Plans | None:
    """Run the kernels through Triton, compiling what is missing, and answer the plans for the next.

    None where Triton's calling convention is not the known one.
    """
    from hf_attn_backends.kernels.hopper import backward_kernels, backward_passes

    head_dim = t.query.shape[-1]
    rows = tile_rows(head_dim)
    calls = _calls(t, kind, window, scale)
    launches = {
        "prepare": (
            backward_passes.backward_prepare,
            {"BM": rows, "D": head_dim, "INTERVALS": kind == "intervals"},
        ),
        "hull": (backward_passes.backward_hull, {"BM": rows, "BN": KEYS, "SCAN": _SCAN}),
        "main": (backward_kernels.attention_backward, {"KIND": KINDS.index(kind)}),
        "finish": (backward_passes.backward_finish, {"BM": rows, "D": head_dim}),
    }
    bound: dict[str, BoundKernel | None] = {}
    for name, call in calls.items():
        kernel, constants = launches[name]
        descriptors = _descriptors(call.mapped) if call.mapped else []
        compiled = kernel[(call.programs,)](
            *descriptors, *call.pointers, *call.scalars, **constants, **OPTIONS
        )
        kept = (name, t.query.dtype, head_dim, kind, t.query.device.index)
        if kept not in _BOUND:
            _BOUND[kept] = BoundKernel.of(compiled, len(call.pointers) + len(call.scalars))
        bound[name] = _BOUND[kept]
    if None in bound.values():
        return None
    plans = {}
    for name, call in calls.items():
        kernel = bound[name]
        maps = [
            Map.of(tensor, safe_strides(tensor) if tensor.dim() == 4 else tensor.stride(), meta)
            for tensor, meta in zip(call.mapped, kernel.maps, strict=True)
        ]
        slots = (*[None] * len(call.pointers), *call.scalars)
        plans[name] = Plan(kernel, maps, slots, call.programs)
    return Plans(plans["prepare"], plans.get("hull"), plans["main"], plans["finish"])
