"""The small kernels around the sm_90 backward: prepare, hull, finish.

All three are bound by memory: together they read out and grad_out once, write and read the fp32
accumulator of dQ once (`B * H * M * D * 4` bytes) and write dQ. Every program works on one tile of
BM query rows of one head, `BM * D = 8192`. Strides of 16-bit tensors count in units of 8 elements,
so that 16-byte accesses are known to be aligned without specialising on a stride's value.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)
_FAR = tl.constexpr(2147483647)


@triton.jit
def _rows_pointer(ptr, batch, head, rows, stride_b, stride_h, stride_m, D: tl.constexpr):
    base = ptr + (batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h) * 8
    return base + (rows.to(tl.int64) * stride_m * 8)[:, None] + tl.arange(0, D)[None, :]


@triton.jit(
    do_not_specialize=[
        "out_b", "out_h", "out_m", "grad_b", "grad_h", "grad_m", "lse_b", "lse_h", "lse_m",
        "intervals_b", "heads", "m_len", "n_len", "m_tiles",
    ],
    do_not_specialize_on_alignment=["lse_ptr", "intervals_ptr"],
)  # fmt: skip
def backward_prepare(
    out_ptr, grad_ptr, lse_ptr, intervals_ptr, stats_ptr, acc_ptr,
    out_b, out_h, out_m, grad_b, grad_h, grad_m, lse_b, lse_h, lse_m, intervals_b,
    heads, m_len, n_len, m_tiles,
    BM: tl.constexpr, D: tl.constexpr, INTERVALS: tl.constexpr,
):  # fmt: skip
    """Statistics of the rows, and zeros for dQ's accumulator.

    `delta = sum(out * grad_out)` over a row (FlashAttention-2, arXiv 2307.08691, section 3.1.2).
    Rows behind the last one and rows that see nothing get a log-sum-exp of +inf and a delta of 0,
    so that the main kernel gives them weights and gradients of exactly 0 without a mask.

    Args:
        out_ptr, grad_ptr: `[B, H, M, D]` and their strides in units of 8 elements.
        lse_ptr: fp32 `[B, H, M]`, natural logarithm, -inf on rows that see nothing.
        intervals_ptr: int32 `[B or 1, M, 2]`; read where INTERVALS.
        stats_ptr: fp32 `[B, H, m_tiles, STATS, BM]`: base-2 log-sum-exp, delta; with INTERVALS also
            the first and one-past-last key (clamped to the keys) as int32 bits.
        acc_ptr: fp32 `[B, H, m_tiles, BM * D]`.
    """
    STATS: tl.constexpr = 4 if INTERVALS else 2
    tile = tl.program_id(0)
    head_at = tile // m_tiles
    batch = head_at // heads
    head = head_at - batch * heads
    rows = (tile - head_at * m_tiles) * BM + tl.arange(0, BM)
    inside = rows < m_len
    out_at = _rows_pointer(out_ptr, batch, head, rows, out_b, out_h, out_m, D)
    grad_at = _rows_pointer(grad_ptr, batch, head, rows, grad_b, grad_h, grad_m, D)
    out = tl.load(out_at, mask=inside[:, None], other=0.0).to(tl.float32)
    grad = tl.load(grad_at, mask=inside[:, None], other=0.0).to(tl.float32)
    lse_at = lse_ptr + batch.to(tl.int64) * lse_b + head.to(tl.int64) * lse_h
    lse = tl.load(lse_at + rows.to(tl.int64) * lse_m, mask=inside, other=float("-inf"))
    blind = lse == float("-inf")
    stats_at = stats_ptr + tile.to(tl.int64) * (STATS * BM) + tl.arange(0, BM)
    tl.store(stats_at, tl.where(blind, float("inf"), lse * _LOG2_E))
    tl.store(stats_at + BM, tl.where(blind, 0.0, tl.sum(out * grad, 1)))
    if INTERVALS:
        pair = intervals_ptr + batch.to(tl.int64) * intervals_b + rows.to(tl.int64) * 2
        first = tl.load(pair, mask=inside, other=0)
        end = tl.minimum(tl.load(pair + 1, mask=inside, other=0), n_len)
        tl.store(stats_at + 2 * BM, first.to(tl.float32, bitcast=True))
        tl.store(stats_at + 3 * BM, end.to(tl.float32, bitcast=True))
    acc_at = acc_ptr + tile.to(tl.int64) * (BM * D) + tl.arange(0, BM * D)
    tl.store(acc_at, tl.zeros([BM * D], tl.float32))


@triton.jit(
    do_not_specialize=["intervals_b", "m_len", "n_len", "m_tiles", "n_tiles"],
    do_not_specialize_on_alignment=["intervals_ptr"],
)
def backward_hull(
    intervals_ptr, hull_ptr, tiles_ptr, intervals_b, m_len, n_len, m_tiles, n_tiles,
    BM: tl.constexpr, BN: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """Summarise intervals: one program per key tile and per query tile of a batch entry.

    Args:
        intervals_ptr: int32 `[B or 1, M, 2]`; `intervals_b` is the batch stride.
        hull_ptr: int32 `[B, n_tiles, 2]`: first and one-past-last query tile that sees the keys of
            a tile; 0, 0 where none does.
        tiles_ptr: int32 `[B, m_tiles, 2]`: latest first key and earliest end of a tile's rows; rows
            that see nothing have no say.
    """
    tile = tl.program_id(0) % (n_tiles + m_tiles)
    batch = tl.program_id(0) // (n_tiles + m_tiles)
    base = intervals_ptr + batch.to(tl.int64) * intervals_b
    if tile < n_tiles:
        n_lo = tile * BN
        n_hi = tl.minimum(n_lo + BN, n_len)
        lo = tl.full([SCAN], _FAR, tl.int32)
        hi = tl.full([SCAN], -1, tl.int32)
        for row in range(0, m_len, SCAN):
            rows = row + tl.arange(0, SCAN)
            inside = rows < m_len
            first = tl.load(base + rows * 2, mask=inside, other=0)
            end = tl.load(base + rows * 2 + 1, mask=inside, other=0)
            hit = inside & (tl.maximum(first, n_lo) < tl.minimum(end, n_hi))
            lo = tl.minimum(lo, tl.where(hit, rows, _FAR))
            hi = tl.maximum(hi, tl.where(hit, rows, -1))
        lowest = tl.min(lo, 0)
        highest = tl.max(hi, 0)
        hull_at = hull_ptr + (batch * n_tiles + tile) * 2
        tl.store(hull_at, tl.where(highest < 0, 0, lowest // BM))
        tl.store(hull_at + 1, tl.where(highest < 0, 0, highest // BM + 1))
    else:
        tile -= n_tiles
        rows = tile * BM + tl.arange(0, BM)
        inside = rows < m_len
        first = tl.load(base + rows * 2, mask=inside, other=0)
        end = tl.minimum(tl.load(base + rows * 2 + 1, mask=inside, other=0), n_len)
        seeing = end > first
        tiles_at = tiles_ptr + (batch * m_tiles + tile) * 2
        tl.store(tiles_at, tl.max(tl.where(seeing, first, 0), 0))
        tl.store(tiles_at + 1, tl.min(tl.where(seeing, end, _FAR), 0))


@triton.jit(
    do_not_specialize=["scale", "dq_b", "dq_h", "dq_m", "heads", "m_len", "m_tiles"],
)
def backward_finish(
    acc_ptr, dq_ptr, scale, dq_b, dq_h, dq_m, heads, m_len, m_tiles,
    BM: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """`dQ = scale * accumulator`, out of register order, in dQ's dtype.

    Args:
        acc_ptr: fp32 `[B, H, m_tiles, 2, 128, 32]`: what the threads of two warpgroups hold of a
            tile's halves, which are the columns' where BM is 64 and the rows' where it is 128.
        dq_ptr: `[B, H, M, D]` and its strides in units of 8 elements.
    """
    tile = tl.program_id(0)
    head_at = tile // m_tiles
    batch = head_at // heads
    head = head_at - batch * heads
    rows = (tile - head_at * m_tiles) * BM + tl.arange(0, BM)
    lines = tile.to(tl.int64) * 256 + tl.arange(0, 256)
    acc = tl.load(acc_ptr + lines[:, None] * 32 + tl.arange(0, 32)[None, :])
    acc = acc.reshape([2, 4, 8, 4, 2, 8, 2])  # half, warp, row, lane, +8 rows, part, pair
    if BM == 64:
        acc = acc.permute([1, 4, 2, 0, 5, 3, 6])
    else:
        acc = acc.permute([0, 1, 4, 2, 5, 3, 6])
    acc = acc.reshape([BM, D])
    dq_at = _rows_pointer(dq_ptr, batch, head, rows, dq_b, dq_h, dq_m, D)
    tl.store(dq_at, (acc * scale).to(dq_ptr.dtype.element_ty), mask=(rows < m_len)[:, None])
