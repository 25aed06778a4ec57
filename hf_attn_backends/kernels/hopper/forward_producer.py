"""Device code of the sm_90 forward's producer, and how it tells the consumers about tiles.

One warp decides which tile comes next, what its keys are, and loads everything by TMA. The
consumers learn the rest from shared memory: a `tile` record of eight numbers beside each query
slot and, for interval visibility, the bounds of its rows. Both become visible with the barrier of
the query slot that they belong to.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from hf_attn_backends.kernels.hopper.gluon_compat import (
    bar_sync,
    mbarrier,
    thread_barrier,
    tma_load,
)
from hf_attn_backends.kernels.hopper.schedule import (
    ROWS,
    block_count,
    divide,
    interval_edges,
    pick_tile,
    row_bounds,
    tile_count,
    tile_edges,
    tile_rows,
)

KEY_FREE = gl.constexpr(10)
VALUE_FREE = gl.constexpr(12)
QUERY_FREE = gl.constexpr(14)


@gluon.jit
def _write_tile(tile_s, batch, head, row0, blocks, hi, full_lo, full_hi, KIND: gl.constexpr):
    """Write one tile's record."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    place = gl.arange(0, 8, layout)
    record = gl.where(place == 0, batch, head)
    record = gl.where(place == 2, row0, record)
    record = gl.where(place == 3, blocks, record)
    if KIND == 3:
        record = gl.where(place == 4, hi, record)
        record = gl.where(place == 5, full_lo, record)
        record = gl.where(place == 6, full_hi, record)
    tile_s.store(record)


@gluon.jit
def _entry(record, place: gl.constexpr):
    """One number of a record that every lane holds whole."""
    places = gl.arange(0, 8, record.type.layout)
    return gl.sum(gl.where(places == place, record, 0), 0)


@gluon.jit
def read_rows(tile_s):
    """Batch, head and first row of a tile, from its record."""
    record = tile_s.load(gl.BlockedLayout([8], [32], [gl.num_warps()], [0]))
    return _entry(record, 0), _entry(record, 1), _entry(record, 2)


@gluon.jit
def read_keys(tile_s, m_len, n_len, window, KIND: gl.constexpr, BN: gl.constexpr):
    """First row of a tile, its `hi`, number of blocks, `full_lo` and `full_hi`."""
    record = tile_s.load(gl.BlockedLayout([8], [32], [gl.num_warps()], [0]))
    row0 = _entry(record, 2)
    if KIND == 3:
        hi = _entry(record, 4)
        full_lo = _entry(record, 5)
        full_hi = _entry(record, 6)
    else:
        hi, full_lo, full_hi, _lo = tile_edges(row0, m_len, n_len, window, KIND, BN)
    return row0, hi, _entry(record, 3), full_lo, full_hi


@gluon.jit
def _load_stage(desc, batch, head, row, it, full, ring, free: gl.constexpr, FREE: gl.constexpr):
    """Wait until ring stage `it % 2` is free and start its load; at the start `FREE` stages are."""
    stage = it & 1
    if it >= FREE:
        bar_sync(free + stage, "288")
    mbarrier.expect(full.index(stage), desc.block_type.nbytes)
    tma_load(desc, [batch, head, row, 0], full.index(stage), ring.index(stage))


@gluon.jit
def begin(
    q_desc, k_desc, q_s, k_s, q_full, k_full, tile_s, sizes, KIND: gl.constexpr, BN: gl.constexpr
):
    """Start the loads of the first tile's query rows and first keys, in front of the partitions."""
    (
        batch_heads, heads, m_len, n_len, window, m_tiles, section, sections, _stride, _whole,
        by_section, by_width, by_last, by_heads, by_group,
    ) = sizes  # fmt: skip
    dividers = (by_section, by_width, by_last, by_heads)
    batch, head, row0 = tile_rows(
        pick_tile(0), batch_heads, m_tiles, section, sections, heads, dividers
    )
    hi, full_lo, full_hi, lo = tile_edges(row0, m_len, n_len, window, KIND, BN)
    mbarrier.expect(q_full.index(0), 2 * q_desc.block_type.nbytes)
    for w in gl.static_range(2):
        tma_load(q_desc, [batch, head, row0 + w * 64, 0], q_full.index(0), q_s.index(w))
    mbarrier.expect(k_full.index(0), k_desc.block_type.nbytes)
    kv_head = divide(head, by_group)
    tma_load(k_desc, [batch, kv_head, hi - BN, 0], k_full.index(0), k_s.index(0))
    blocks = block_count(hi, lo, BN)
    _write_tile(tile_s.index(0), batch, head, row0, blocks, hi, full_lo, full_hi, KIND)


@gluon.jit
def producer(
    q_desc, k_desc, v_desc, intervals_ptr, q_s, k_s, v_s, q_full, k_full, v_full, tile_s, bounds_s,
    sizes, KIND: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    """Feed the rings: per tile its record and query rows, then keys one block ahead of values.

    The second stage of the values is not free at the start: the consumers' first turn reads it.
    """
    (
        batch_heads, heads, m_len, n_len, window, m_tiles, section, sections, batch_stride, whole,
        by_section, by_width, by_last, by_heads, by_group,
    ) = sizes  # fmt: skip
    dividers = (by_section, by_width, by_last, by_heads)
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    it = 0
    turns = tile_count(batch_heads * m_tiles, whole)
    v_batch = 0
    v_head = 0
    v_row = 0
    for turn in range(turns):
        batch, head, row0 = tile_rows(
            pick_tile(turn), batch_heads, m_tiles, section, sections, heads, dividers
        )
        if KIND == 3:
            rows = row0 + gl.arange(0, ROWS, layout)
            first, last = row_bounds(rows, batch, m_len, n_len, intervals_ptr, batch_stride)
            hi, full_lo, full_hi, lo = interval_edges(first, last, rows >= m_len, n_len)
        else:
            hi, full_lo, full_hi, lo = tile_edges(row0, m_len, n_len, window, KIND, BN)
        blocks = block_count(hi, lo, BN)
        slot = turn & 1
        if turn > 1:
            bar_sync(QUERY_FREE + slot, "288")
        if (KIND == 3) | (turn > 0):  # else `begin` did it
            _write_tile(
                tile_s.index(turn & 3), batch, head, row0, blocks, hi, full_lo, full_hi, KIND
            )
            if KIND == 3:
                bounds_s.index(slot * 2).store(first)
                bounds_s.index(slot * 2 + 1).store(last)
            thread_barrier()
            mbarrier.expect(q_full.index(slot), 2 * q_desc.block_type.nbytes)
            for w in gl.static_range(2):
                tma_load(
                    q_desc,
                    [batch, head, row0 + w * 64, 0],
                    q_full.index(slot),
                    q_s.index(slot * 2 + w),
                )
        kv_head = divide(head, by_group)
        for i in range(blocks):
            row = hi - (i + 1) * BN
            if (KIND == 3) | (it > 0):
                _load_stage(k_desc, batch, kv_head, row, it, k_full, k_s, KEY_FREE, 2)
            if it > 0:
                _load_stage(v_desc, v_batch, v_head, v_row, it - 1, v_full, v_s, VALUE_FREE, 1)
            v_batch = batch
            v_head = kv_head
            v_row = row
            it += 1
    _load_stage(v_desc, v_batch, v_head, v_row, it - 1, v_full, v_s, VALUE_FREE, 1)
    # Take the arrivals that nobody waited for, so that every barrier is left at rest.
    for i in gl.static_range(2):
        if it > i:
            bar_sync(KEY_FREE + ((it - 1 - i) & 1), "288")
        bar_sync(VALUE_FREE + i, "288")
        if turns > i:
            bar_sync(QUERY_FREE + ((turns - 1 - i) & 1), "288")
