"""A ring of two shared-memory stages: right, and wrong in known ways.

What a race detector says about these tells what its word on the sm_90 kernels is worth. They have
the same parts: one warp that fills a stage, by the copy engine (TMA) or by plain stores, and one
warpgroup that reads it, by plain loads or by wgmma; stages change hands by mbarriers or by hardware
barriers. A fill by TMA is always announced by an mbarrier.
"""

# Kernel code: pyright cannot type what triton compiles (as for kernels/hopper).
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from hf_attn_backends.kernels.hopper.gluon_compat import (
    bar_arrive,
    bar_sync,
    fence_async_shared,
    mbarrier,
    tma_load,
    warpgroup_mma,
    warpgroup_mma_wait,
)

ROWS = 64
FILLS = ("tma", "store")
READS = ("load", "wgmma")
HANDOVERS = ("mbarrier", "named")
FAULTS = (
    "none",
    "read",
    "free",
)  # too early: the read before the fill, the release before the read

_FREE = gl.constexpr(8)
_FULL = gl.constexpr(10)


@gluon.jit
def _fill(
    desc, in_ptr, ring, full, free, blocks, STORE: gl.constexpr, MMA: gl.constexpr,
    NAMED: gl.constexpr,
):  # fmt: skip
    """Fill stage after stage, each when it was given back."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    rows = gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
    cols = gl.arange(0, 64, gl.SliceLayout(0, layout))[None, :]
    for it in range(blocks):
        stage = it & 1
        if it > 1:
            if NAMED:
                bar_sync(_FREE + stage, "160")
            else:
                mbarrier.wait(free.index(stage), ((it >> 1) & 1) ^ 1)
        if STORE:
            ring.index(stage).store(gl.load(in_ptr + (it * 64 + rows) * 64 + cols))
            if MMA:
                fence_async_shared()
            if NAMED:
                bar_arrive(_FULL + stage, "160")
            else:
                mbarrier.arrive(full.index(stage), count=1)
        else:
            mbarrier.expect(full.index(stage), desc.block_type.nbytes)
            tma_load(desc, [it * 64, 0], full.index(stage), ring.index(stage))
    if NAMED:  # the last two arrivals, that nobody waited for
        for i in gl.static_range(2):
            bar_sync(_FREE + ((blocks - 1 - i) & 1), "160")


@gluon.jit
def _await(full, stage, phase, STORE: gl.constexpr, NAMED: gl.constexpr):
    """Wait until a stage is filled."""
    if STORE:
        if NAMED:
            bar_sync(_FULL + stage, "160")
        else:
            mbarrier.wait(full.index(stage), phase)
    else:
        mbarrier.wait(full.index(stage), phase)


@gluon.jit
def _release(free, stage, NAMED: gl.constexpr):
    """Give a stage back."""
    if NAMED:
        bar_arrive(_FREE + stage, "160")
    else:
        mbarrier.arrive(free.index(stage), count=1)


@gluon.jit
def _add(total, tile, MMA: gl.constexpr, layout: gl.constexpr):
    """Add a stage, or its product with itself transposed."""
    if MMA:
        total = warpgroup_mma(tile, tile.permute((1, 0)), total, is_async=True)
        total = warpgroup_mma_wait(0, deps=[total])
    else:
        total = total + tile.load(layout).to(gl.float32)
    return total


@gluon.jit
def _read(
    out_ptr, ring, full, free, blocks, STORE: gl.constexpr, MMA: gl.constexpr, NAMED: gl.constexpr,
    FAULT: gl.constexpr,
):  # fmt: skip
    """Reduce the stages in the order in which they are filled."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    total = gl.zeros([64, 64], gl.float32, layout)
    for it in range(blocks):
        stage = it & 1
        phase = (it >> 1) & 1
        if FAULT == 1:
            total = _add(total, ring.index(stage), MMA, layout)
            _await(full, stage, phase, STORE, NAMED)
            _release(free, stage, NAMED)
        elif FAULT == 2:
            _await(full, stage, phase, STORE, NAMED)
            _release(free, stage, NAMED)
            total = _add(total, ring.index(stage), MMA, layout)
        else:
            _await(full, stage, phase, STORE, NAMED)
            total = _add(total, ring.index(stage), MMA, layout)
            _release(free, stage, NAMED)
    rows = gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
    cols = gl.arange(0, 64, gl.SliceLayout(0, layout))[None, :]
    gl.store(out_ptr + rows * 64 + cols, total)


@gluon.jit
def ring_control(
    desc, in_ptr, out_ptr, blocks, STORE: gl.constexpr, MMA: gl.constexpr, NAMED: gl.constexpr,
    FAULT: gl.constexpr,
):  # fmt: skip
    """Reduce `[64 * blocks, 64]` bf16 to `[64, 64]` fp32 through a ring of two stages.

    Args:
        desc, in_ptr: The input: its descriptor in blocks `[64, 64]`, and its address.
        out_ptr: The result.
        blocks: How many blocks; at least 2.
        STORE: Fill by plain stores instead of the copy engine.
        MMA: Read by wgmma (sum of `X X^T`) instead of by loads (sum of `X`).
        NAMED: Hand over by hardware barriers instead of mbarriers.
        FAULT: Place in `FAULTS`.
    """
    ring = gl.allocate_shared_memory(desc.dtype, [2, 64, 64], desc.layout)
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    free = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), 1)
        mbarrier.init(free.index(i), 1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_read, (out_ptr, ring, full, free, blocks, STORE, MMA, NAMED, FAULT)),
            (_fill, (desc, in_ptr, ring, full, free, blocks, STORE, MMA, NAMED)),
        ],
        [1],
        [64],
    )


@gluon.jit
def _exchange(w: gl.constexpr, out_ptr, both, rounds, FAULT: gl.constexpr):
    """Write one half, read the other: once a round, in two buffers."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    rows = gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
    cols = gl.arange(0, 64, gl.SliceLayout(0, layout))[None, :]
    mine = (rows * 64 + cols + w * 4096).to(gl.float32)
    total = gl.zeros([64, 64], gl.float32, layout)
    for it in range(rounds):
        both.index(it & 1).slice(w * 64, 64, 0).store(mine)
        if FAULT == 0:
            bar_sync(_FREE, "256")
        total = total + both.index(it & 1).slice((1 - w) * 64, 64, 0).load(layout)
    gl.store(out_ptr + w * 4096 + rows * 64 + cols, total)


@gluon.jit
def exchange_control(out_ptr, rounds, FAULT: gl.constexpr):
    """Two warpgroups exchange halves, meeting at one hardware barrier from two places of the code.

    Args:
        out_ptr: `[128, 64]` fp32: `rounds` times the other half's places.
        FAULT: 0 none, 1 without the barrier.
    """
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    both = gl.allocate_shared_memory(gl.float32, [2, 128, 64], layout)
    gl.warp_specialize(
        [
            (_exchange, (0, out_ptr, both, rounds, FAULT)),
            (_exchange, (1, out_ptr, both, rounds, FAULT)),
        ],
        [4],
        [64],
    )
