"""Device code of the sm_90 forward: one producer warp, two consumer warpgroups, persistent.

FlashAttention-3 (arXiv 2407.08608, algorithms 1 and 2) with one addition: the first scores of a
tile are computed beside the last value product of the tile before it, so that the tensor cores
are not idle between tiles. Each consumer owns 64 of a tile's 128 query rows and keeps scores and
weights in registers.

A tile's keys are walked from the last visible one towards the first, in blocks of `BN`. For causal
visibility the blocks are anchored at the diagonal (coordinates before the first key and behind the
last one read zeros), so the diagonal block has one constant mask.

Synchronisation: TMA fills signal mbarriers; everything else uses hardware barriers (`bar_arrive`
by those who are done, `bar_sync` by the one who waits): 8 and 9 whose turn it is on the tensor
cores, 10 and 11 key stages free, 12 and 13 value stages free, 14 and 15 query slots free.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from hf_attn_backends.kernels.hopper.forward_tiles import (
    finish,
    first_softmax,
    here,
    lane_sum,
    mask_first,
    mask_left,
    use,
)
from hf_attn_backends.kernels.hopper.gluon_compat import (
    bar_arrive,
    bar_sync,
    fence_async_shared,
    mbarrier,
    tma_load,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from hf_attn_backends.kernels.hopper.schedule import (
    pick_tile,
    row_bounds,
    tile_count,
    tile_rows,
    tile_span,
)

_TURN = gl.constexpr(8)
_KEY_FREE = gl.constexpr(10)
_VALUE_FREE = gl.constexpr(12)
_QUERY_FREE = gl.constexpr(14)


@gluon.jit
def _load_stage(desc, batch, head, row, it, full, ring, free: gl.constexpr):
    """Wait until ring stage `it % 2` is free and start its load."""
    stage = it & 1
    if it > 1:
        bar_sync(free + stage, "288")
    mbarrier.expect(full.index(stage), desc.block_type.nbytes)
    tma_load(desc, [batch, head, row, 0], full.index(stage), ring.index(stage))


@gluon.jit
def _producer(
    q_desc, k_desc, v_desc, intervals_ptr, q_s, k_s, v_s, q_full, k_full, v_full, sizes,
    KIND: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    """Feed the rings: per tile its query rows, then keys one block ahead of values."""
    (
        batch_heads, heads, group, m_len, n_len, window, m_tiles, section, sections, batch_stride,
    ) = sizes  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    it = 0
    turns = tile_count(batch_heads * m_tiles)
    v_batch = 0
    v_head = 0
    v_row = 0
    for turn in range(turns):
        batch, head, row0 = tile_rows(
            pick_tile(turn), batch_heads, m_tiles, section, sections, heads
        )
        hi, blocks, _lo, _hi = tile_span(
            row0, batch, m_len, n_len, window, intervals_ptr, batch_stride, KIND, BN, layout
        )
        slot = turn & 1
        if turn > 1:
            bar_sync(_QUERY_FREE + slot, "288")
        mbarrier.expect(q_full.index(slot), 2 * q_desc.block_type.nbytes)
        for w in gl.static_range(2):
            tma_load(
                q_desc, [batch, head, row0 + w * 64, 0], q_full.index(slot), q_s.index(slot * 2 + w)
            )
        kv_head = head // group
        for i in range(blocks):
            row = hi - (i + 1) * BN
            _load_stage(k_desc, batch, kv_head, row, it, k_full, k_s, _KEY_FREE)
            if it > 0:
                _load_stage(v_desc, v_batch, v_head, v_row, it - 1, v_full, v_s, _VALUE_FREE)
            v_batch = batch
            v_head = kv_head
            v_row = row
            it += 1
    _load_stage(v_desc, v_batch, v_head, v_row, it - 1, v_full, v_s, _VALUE_FREE)
    # Take the arrivals that nobody waited for, so that every barrier is left at rest.
    for i in gl.static_range(2):
        if it > i:
            bar_sync(_KEY_FREE + ((it - 1 - i) & 1), "288")
            bar_sync(_VALUE_FREE + ((it - 1 - i) & 1), "288")
        if turns > i:
            bar_sync(_QUERY_FREE + ((turns - 1 - i) & 1), "288")


@gluon.jit
def _consumer(
    w: gl.constexpr, o_desc, lse_ptr, intervals_ptr, q_s, k_s, v_s, o_s, q_full, k_full, v_full,
    sizes, qk_scale, KIND: gl.constexpr, BN: gl.constexpr, D: gl.constexpr,
    TURNS: gl.constexpr,
):  # fmt: skip
    """Compute rows `64 * w` to `64 * w + 63` of every tile of this program."""
    (
        batch_heads, heads, _group, m_len, n_len, window, m_tiles, section, sections, batch_stride,
    ) = sizes  # fmt: skip
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    row_s: gl.constexpr = gl.SliceLayout(1, s_layout)
    row_o: gl.constexpr = gl.SliceLayout(1, o_layout)
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    dtype: gl.constexpr = o_desc.dtype
    shift = n_len - m_len
    if TURNS:
        if w == 1:
            bar_arrive(_TURN, "256")
    turns = tile_count(batch_heads * m_tiles)
    batch, head, row0 = tile_rows(pick_tile(0), batch_heads, m_tiles, section, sections, heads)
    hi, blocks, full_lo, full_hi = tile_span(
        row0, batch, m_len, n_len, window, intervals_ptr, batch_stride, KIND, BN, flat
    )
    lo_row = gl.zeros([64], gl.int32, row_s)
    hi_row = lo_row
    if KIND == 3:
        rows = row0 + w * 64 + gl.arange(0, 64, row_s)
        lo_row, hi_row = row_bounds(rows, batch, m_len, n_len, intervals_ptr, batch_stride)
    mbarrier.wait(q_full.index(0), 0)
    mbarrier.wait(k_full.index(0), 0)
    s0 = gl.zeros([64, BN], gl.float32, s_layout)
    k0 = k_s.index(0).reshape([BN, D]).permute((1, 0))
    q0 = q_s.index(w).reshape([64, D])
    s0 = warpgroup_mma(q0, k0, s0, use_acc=False, is_async=True)
    s0 = warpgroup_mma_wait(0, deps=[s0])
    bar_arrive(_KEY_FREE, "288")
    s0 = mask_first(
        s0, w, row0, hi - BN, n_len, shift, window, full_lo, full_hi, lo_row, hi_row, KIND, s_layout
    )
    m0, p0 = first_softmax(s0, qk_scale, KIND)
    m = gl.convert_layout(m0, row_s)
    l_layout: gl.constexpr = lane_sum(gl.zeros([64, BN], gl.float32, s_layout)).type.layout
    lanes = gl.convert_layout(lane_sum(p0), l_layout)
    p16 = gl.convert_layout(p0.to(dtype), p_layout)
    mbarrier.wait(v_full.index(0), 0)
    it = 0
    for turn in range(turns):
        q = q_s.index((turn & 1) * 2 + w).reshape([64, D])
        acc = gl.zeros([64, D], gl.float32, o_layout)
        alpha = gl.full([64], 1.0, gl.float32, row_s)
        for i in range(1, blocks):
            old = it & 1
            it += 1
            stage = it & 1
            phase = (it >> 1) & 1
            mbarrier.wait(k_full.index(stage), phase)
            if TURNS:
                bar_sync(_TURN + w, "256")
            s = gl.zeros([64, BN], gl.float32, s_layout)
            k = k_s.index(stage).reshape([BN, D]).permute((1, 0))
            s = warpgroup_mma(q, k, s, use_acc=False, is_async=True)
            acc = acc * gl.convert_layout(here(alpha), row_o)[:, None]
            v = v_s.index(old).reshape([BN, D])
            acc = warpgroup_mma(p16, v, acc, is_async=True)
            if TURNS:
                bar_arrive(_TURN + 1 - w, "256")
            s = warpgroup_mma_wait(1, deps=[s])
            bar_arrive(_KEY_FREE + stage, "288")
            if KIND != 0:
                start = hi - (i + 1) * BN
                if KIND == 3:
                    if (start < full_lo) | (start + BN > full_hi):
                        cols = gl.arange(0, BN, gl.SliceLayout(0, s_layout))
                        s = gl.where(cols[None, :] >= (lo_row - start)[:, None], s, float("-inf"))
                        s = gl.where(cols[None, :] < (hi_row - start)[:, None], s, float("-inf"))
                else:
                    if start < full_lo:
                        s = mask_left(s, w, row0, start, shift, window, KIND, s_layout)
            m_new = gl.maximum(m, gl.max(s, 1))
            base = m_new * qk_scale
            if KIND != 0:
                base = gl.where(m_new == float("-inf"), 0.0, base)
            p = gl.exp2(s * qk_scale - base[:, None])
            alpha = gl.exp2(m * qk_scale - base)
            m = m_new
            lanes = lanes * gl.convert_layout(alpha, gl.SliceLayout(1, l_layout))[:, None]
            lanes = lanes + gl.convert_layout(lane_sum(p), l_layout)
            # Waiting here for values that the next iteration needs keeps ptxas from moving the
            # wait for the value product above the exponentials.
            mbarrier.wait(v_full.index(stage), phase)
            acc = warpgroup_mma_wait(0, deps=[acc])
            bar_arrive(_VALUE_FREE + old, "288")
            p16 = gl.convert_layout(p.to(dtype), p_layout)
        use(blocks)
        bar_arrive(_QUERY_FREE + (turn & 1), "288")
        more = turn + 1 < turns
        old = it & 1
        it += 1
        stage = it & 1
        phase = (it >> 1) & 1
        slot = (turn + 1) & 1
        acc = acc * gl.convert_layout(alpha, row_o)[:, None]
        mbarrier.wait(q_full.index(slot), ((turn + 1) >> 1) & 1, pred=more)
        mbarrier.wait(k_full.index(stage), phase, pred=more)
        if TURNS:
            bar_sync(_TURN + w, "256")
        # In front of the branch: where both sides use one descriptor of the values, ptxas 12.8
        # forgets to compute it on one of them.
        last = warpgroup_mma(p16, v_s.index(old).reshape([BN, D]), acc, is_async=True)
        turn_n = gl.minimum(turn + 1, turns - 1)
        batch_n, head_n, row0_n = tile_rows(
            pick_tile(turn_n), batch_heads, m_tiles, section, sections, heads
        )
        hi_n, blocks_n, full_lo_n, full_hi_n = tile_span(
            row0_n, batch_n, m_len, n_len, window, intervals_ptr, batch_stride, KIND, BN, flat
        )
        lo_row_n = lo_row
        hi_row_n = hi_row
        if KIND == 3:
            rows_n = row0_n + w * 64 + gl.arange(0, 64, row_s)
            lo_row_n, hi_row_n = row_bounds(
                rows_n, batch_n, m_len, n_len, intervals_ptr, batch_stride
            )
        if more:
            sn = gl.zeros([64, BN], gl.float32, s_layout)
            kn = k_s.index(stage).reshape([BN, D]).permute((1, 0))
            qn = q_s.index(slot * 2 + w).reshape([64, D])
            sn = warpgroup_mma(qn, kn, sn, use_acc=False, is_async=True)
            if TURNS:
                bar_arrive(_TURN + 1 - w, "256")
            done = warpgroup_mma_wait(1, deps=[last])
            bar_arrive(_VALUE_FREE + old, "288")
            finish(
                done, m, lanes, w, o_desc, lse_ptr, o_s, batch, head, heads, row0, m_len, qk_scale,
                s_layout, o_layout,
            )  # fmt: skip
            sn = warpgroup_mma_wait(0, deps=[sn])
            bar_arrive(_KEY_FREE + stage, "288")
            sn = mask_first(
                sn, w, row0_n, hi_n - BN, n_len, shift, window, full_lo_n, full_hi_n, lo_row_n,
                hi_row_n, KIND, s_layout,
            )  # fmt: skip
            mn, pn = first_softmax(sn, qk_scale, KIND)
            m = gl.convert_layout(mn, row_s)
            lanes = gl.convert_layout(lane_sum(pn), l_layout)
            p16 = gl.convert_layout(pn.to(dtype), p_layout)
            mbarrier.wait(v_full.index(stage), phase)
        else:
            if TURNS:
                bar_arrive(_TURN + 1 - w, "256")
            rest = warpgroup_mma_wait(0, deps=[last])
            bar_arrive(_VALUE_FREE + old, "288")
            finish(
                rest, m, lanes, w, o_desc, lse_ptr, o_s, batch, head, heads, row0, m_len, qk_scale,
                s_layout, o_layout,
            )  # fmt: skip
        batch = batch_n
        head = head_n
        row0 = row0_n
        hi = hi_n
        blocks = blocks_n
        full_lo = full_lo_n
        full_hi = full_hi_n
        lo_row = lo_row_n
        hi_row = hi_row_n
    tma_store_wait(0)
    if TURNS:
        if w == 0:
            bar_sync(_TURN, "256")


@gluon.jit(do_not_specialize=["batch_heads", "heads", "group", "m_len", "n_len", "window",
                              "m_tiles", "section", "sections", "batch_stride"])  # fmt: skip
def attention_forward(
    q_desc, k_desc, v_desc, o_desc, lse_ptr, intervals_ptr, qk_scale,
    batch_heads, heads, group, m_len, n_len, window, m_tiles, section, sections, batch_stride,
    KIND: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """Attention of `[B, H, M, D]` queries over `[B, G, N, D]` keys and values.

    Args:
        q_desc, k_desc, v_desc, o_desc: Descriptors of the four tensors, blocks `[1, 1, 64, D]` for
            queries and output, `[1, 1, BN, D]` for keys and values.
        lse_ptr: `[B, H, M]` fp32 out.
        intervals_ptr: `[B, M, 2]` int32, or null; `batch_stride` elements between batches.
        qk_scale: Softmax scale times log2(e); positive.
        batch_heads, heads, group: `B * H`, `H`, `H // G`.
        m_len, n_len, window: `M`, `N`, keys that a row sees (KIND 2).
        m_tiles, section, sections: Tiles of a head; heads that are worked on together; how many
            such sections there are.
        KIND: 0 full, 1 causal, 2 causal with a window, 3 intervals.
        TURNS: Consumers take turns on the tensor cores.
    """
    dtype: gl.constexpr = q_desc.dtype
    q_s = gl.allocate_shared_memory(dtype, [4, 1, 1, 64, D], q_desc.layout)
    k_s = gl.allocate_shared_memory(dtype, [2, 1, 1, BN, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(dtype, [2, 1, 1, BN, D], v_desc.layout)
    o_s = gl.allocate_shared_memory(dtype, [2, 1, 1, 64, D], o_desc.layout)
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    k_full = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    v_full = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), 1)
        mbarrier.init(k_full.index(i), 1)
        mbarrier.init(v_full.index(i), 1)
    fence_async_shared()
    sizes = (
        batch_heads,
        heads,
        group,
        m_len,
        n_len,
        window,
        m_tiles,
        section,
        sections,
        batch_stride,
    )
    gl.warp_specialize([
        (_consumer, (0, o_desc, lse_ptr, intervals_ptr, q_s, k_s, v_s, o_s, q_full, k_full, v_full,
                     sizes, qk_scale, KIND, BN, D, TURNS)),
        (_consumer, (1, o_desc, lse_ptr, intervals_ptr, q_s, k_s, v_s, o_s, q_full, k_full, v_full,
                     sizes, qk_scale, KIND, BN, D, TURNS)),
        (_producer, (q_desc, k_desc, v_desc, intervals_ptr, q_s, k_s, v_s, q_full, k_full, v_full,
                     sizes, KIND, BN)),
    ], [4, 1], [240, 24])  # fmt: skip
