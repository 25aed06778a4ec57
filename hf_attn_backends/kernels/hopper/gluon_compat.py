"""The names of Gluon's Hopper API that Triton 3.6.0 and 3.9.0 spell differently, spelled once.

Everything here is called from `@gluon.jit` code. Named barriers are ours: Triton itself uses the
hardware barriers 0 to 2 + partitions, so ids from 8 on are free.
"""

from __future__ import annotations

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import _core
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

__all__ = [
    "GluonASTSource",
    "TensorDescriptor",
    "bar_arrive",
    "bar_sync",
    "fence_async_shared",
    "mbarrier",
    "thread_barrier",
    "tma_load",
    "tma_reduce_add",
    "tma_store",
    "tma_store_wait",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]

_RENAMED = hasattr(tma, "async_load")  # Triton 3.9; the old names raise there

tma_load = tma.async_load if _RENAMED else tma.async_copy_global_to_shared
tma_store = tma.async_store if _RENAMED else tma.async_copy_shared_to_global
tma_store_wait = tma.store_wait
thread_barrier = gl.barrier if _RENAMED else gl.thread_barrier

if _RENAMED:
    tma_reduce_add = tma.async_atomic_add
else:

    @_core.builtin
    def tma_reduce_add(tensor_desc, coord, src, _semantic=None):
        """Add a shared tile to global memory (fp32), asynchronously; counts as a TMA store."""
        coord = _semantic._convert_to_ir_values(coord, require_i64=False)
        _semantic.builder.create_async_tma_reduce(
            ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle
        )


@gluon.jit
def bar_sync(barrier, threads: gl.constexpr):
    """Wait on hardware barrier `barrier` (8 to 15) until `threads` (a string: "256") are there."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    ids = gl.full([32 * gl.num_warps()], barrier, gl.int32, layout)
    code: gl.constexpr = "bar.sync $1, " + threads + "; mov.b32 $0, $1;"
    gl.inline_asm_elementwise(code, "=r,r", [ids], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def bar_arrive(barrier, threads: gl.constexpr):
    """Arrive at hardware barrier `barrier` without waiting; see `bar_sync`.

    Unlike `mbarrier.arrive`, before which Triton synchronises the whole partition, it costs one
    instruction.
    """
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    ids = gl.full([32 * gl.num_warps()], barrier, gl.int32, layout)
    code: gl.constexpr = "bar.arrive $1, " + threads + "; mov.b32 $0, $1;"
    gl.inline_asm_elementwise(code, "=r,r", [ids], dtype=gl.int32, is_pure=False, pack=1)
