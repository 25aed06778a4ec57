"""A ring of two shared-memory stages, filled by the copy engine: right, and wrong in known ways.

What a race detector says about these tells what its word on the sm_90 kernels is worth. They have
the same parts: one warp that loads (TMA, completion by mbarrier), one warpgroup that reads, by
plain loads or by wgmma, and gives the stage back, by mbarrier or by a hardware barrier.
"""

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
READS = ("load", "wgmma")
RELEASES = ("mbarrier", "named")
FAULTS = ("none", "full", "free")  # which wait is left out


@gluon.jit
def _fill(desc, ring, full, free, blocks, NAMED: gl.constexpr, FAULT: gl.constexpr):
    """Load block after block, each into a stage that was given back."""
    for it in range(blocks):
        stage = it & 1
        if FAULT != 2:
            again = it > 1
            if again:
                if NAMED:
                    bar_sync(8 + stage, "160")
                else:
                    mbarrier.wait(free.index(stage), ((it >> 1) & 1) ^ 1)
        mbarrier.expect(full.index(stage), desc.block_type.nbytes)
        tma_load(desc, [it * 64, 0], full.index(stage), ring.index(stage))
    if NAMED and FAULT != 2:  # the last two arrivals, that nobody waited for
        for i in gl.static_range(2):
            bar_sync(8 + ((blocks - 1 - i) & 1), "160")


@gluon.jit
def _read(
    out_ptr, ring, full, free, blocks, MMA: gl.constexpr, NAMED: gl.constexpr, FAULT: gl.constexpr
):
    """Add up the blocks, or each block's product with itself transposed."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    total = gl.zeros([64, 64], gl.float32, layout)
    for it in range(blocks):
        stage = it & 1
        if FAULT != 1:
            mbarrier.wait(full.index(stage), (it >> 1) & 1)
        tile = ring.index(stage)
        if MMA:
            total = warpgroup_mma(tile, tile.permute((1, 0)), total, is_async=True)
            total = warpgroup_mma_wait(0, deps=[total])
        else:
            total = total + tile.load(layout).to(gl.float32)
        if NAMED:
            if FAULT != 2:
                bar_arrive(8 + stage, "160")
        else:
            mbarrier.arrive(free.index(stage), count=1)
    rows = gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
    cols = gl.arange(0, 64, gl.SliceLayout(0, layout))[None, :]
    gl.store(out_ptr + rows * 64 + cols, total)


@gluon.jit
def ring_control(
    desc, out_ptr, blocks, MMA: gl.constexpr, NAMED: gl.constexpr, FAULT: gl.constexpr
):
    """Reduce `[64 * blocks, 64]` bf16 to `[64, 64]` fp32 through a ring of two stages.

    Args:
        desc: Descriptor of the input, blocks `[64, 64]`.
        out_ptr: The result.
        blocks: How many blocks; at least 2.
        MMA: Read by wgmma (sum of `X X^T`) instead of by loads (sum of `X`).
        NAMED: Give stages back by a hardware barrier instead of an mbarrier.
        FAULT: 0 none, 1 the reader does not wait for the load, 2 the loader does not wait for the
            reader.
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
            (_read, (out_ptr, ring, full, free, blocks, MMA, NAMED, FAULT)),
            (_fill, (desc, ring, full, free, blocks, NAMED, FAULT)),
        ],
        [1],
        [24],
    )
