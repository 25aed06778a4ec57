"""Device code of the sm_90 forward: one producer warp, two consumer warpgroups, persistent.

FlashAttention-3 (arXiv 2407.08608, algorithms 1 and 2) with two additions: the first scores of a
tile are computed beside the last value product of the tile before it, so that the tensor cores
are not idle between tiles; and the accumulator is rescaled only where a row's maximum has grown by
more than a factor `2 ** 8` (FlashAttention-4, arXiv 2603.05451, section 3.2). Each consumer owns 64 of a tile's 128 query rows and
keeps scores and weights in registers.

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

from hf_attn_backends.kernels.hopper.forward_producer import (
    KEY_FREE,
    QUERY_FREE,
    VALUE_FREE,
    producer,
    read_tile,
)
from hf_attn_backends.kernels.hopper.forward_tiles import (
    finish_rows,
    first_softmax,
    here,
    lane_sum,
    mask_block,
    mask_first,
    rescale,
    store_rows,
    use,
)
from hf_attn_backends.kernels.hopper.gluon_compat import (
    bar_arrive,
    bar_sync,
    fence_async_shared,
    mbarrier,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from hf_attn_backends.kernels.hopper.schedule import tile_count

_TURN = gl.constexpr(8)


@gluon.jit
def _consumer(
    w: gl.constexpr, o_desc, lse_ptr, q_s, k_s, v_s, o_s, q_full, k_full, v_full, tile_s, bounds_s,
    sizes, qk_scale, KIND: gl.constexpr, BN: gl.constexpr, D: gl.constexpr,
    TURNS: gl.constexpr, RESCALE: gl.constexpr, VLATE: gl.constexpr, FENCE: gl.constexpr,
):  # fmt: skip
    """Compute rows `64 * w` to `64 * w + 63` of every tile of this program."""
    tiles, whole, heads, m_len, n_len, window = sizes
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    row_s: gl.constexpr = gl.SliceLayout(1, s_layout)
    row_o: gl.constexpr = gl.SliceLayout(1, o_layout)
    dtype: gl.constexpr = o_desc.dtype
    shift = n_len - m_len
    if TURNS:
        if w == 1:
            bar_arrive(_TURN, "256")
    growth = 8.0 / qk_scale
    turns = tile_count(tiles, whole)
    mbarrier.wait(q_full.index(0), 0)
    batch, head, row0, hi, blocks, full_lo, full_hi = read_tile(
        tile_s.index(0), m_len, n_len, window, KIND, BN
    )
    lo_row = gl.zeros([64], gl.int32, row_s)
    hi_row = lo_row
    if KIND == 3:
        lo_row = bounds_s.index(0).slice(w * 64, 64).load(row_s)
        hi_row = bounds_s.index(0 + 1).slice(w * 64, 64).load(row_s)
    mbarrier.wait(k_full.index(0), 0)
    s0 = gl.zeros([64, BN], gl.float32, s_layout)
    k0 = k_s.index(0).reshape([BN, D]).permute((1, 0))
    q0 = q_s.index(w).reshape([64, D])
    s0 = warpgroup_mma(q0, k0, s0, use_acc=False, is_async=True)
    s0 = warpgroup_mma_wait(0, deps=[s0])
    bar_arrive(KEY_FREE, "288")
    s0 = mask_first(
        s0, w, row0, hi - BN, n_len, shift, window, full_lo, full_hi, lo_row, hi_row, KIND, s_layout
    )
    m0, p0 = first_softmax(s0, qk_scale)
    m = gl.convert_layout(m0, row_s)
    l_layout: gl.constexpr = lane_sum(gl.zeros([64, BN], gl.float32, s_layout)).type.layout
    lanes = gl.convert_layout(lane_sum(p0), l_layout)
    p16 = gl.convert_layout(p0.to(dtype), p_layout)
    if VLATE:
        mbarrier.wait(v_full.index(0), 0)
    it = 0
    for turn in range(turns):
        q = q_s.index((turn & 1) * 2 + w).reshape([64, D])
        acc = gl.zeros([64, D], gl.float32, o_layout)
        alpha = gl.full([64], 1.0, gl.float32, row_s)
        for i in range(1, blocks):
            old = it & 1
            old_phase = (it >> 1) & 1
            it += 1
            stage = it & 1
            phase = (it >> 1) & 1
            mbarrier.wait(k_full.index(stage), phase)
            if TURNS:
                bar_sync(_TURN + w, "256")
            s = gl.zeros([64, BN], gl.float32, s_layout)
            k = k_s.index(stage).reshape([BN, D]).permute((1, 0))
            s = warpgroup_mma(q, k, s, use_acc=False, is_async=True)
            if RESCALE == 0:
                acc = acc * gl.convert_layout(here(alpha), row_o)[:, None]
            if not VLATE:
                mbarrier.wait(v_full.index(old), old_phase)
            v = v_s.index(old).reshape([BN, D])
            acc = warpgroup_mma(p16, v, acc, is_async=True)
            if TURNS:
                bar_arrive(_TURN + 1 - w, "256")
            s = warpgroup_mma_wait(1, deps=[s])
            bar_arrive(KEY_FREE + stage, "288")
            if KIND != 0:
                s = mask_block(
                    s, w, row0, hi - (i + 1) * BN, shift, window, full_lo, full_hi, lo_row, hi_row,
                    KIND, s_layout,
                )  # fmt: skip
            m_new = gl.maximum(m, gl.max(s, 1))
            if RESCALE == 2:
                m_new = gl.where(m_new > m + growth, m_new, m)
            base = m_new * qk_scale
            p = gl.exp2(s * qk_scale - base[:, None])
            alpha = gl.exp2(m * qk_scale - base)
            m = m_new
            lanes = lanes * gl.convert_layout(alpha, gl.SliceLayout(1, l_layout))[:, None]
            lanes = lanes + gl.convert_layout(lane_sum(p), l_layout)
            # Waiting here for values that the next iteration needs keeps ptxas from moving the
            # wait for the value product above the exponentials.
            if VLATE:
                mbarrier.wait(v_full.index(stage), phase)
            acc = warpgroup_mma_wait(0, deps=[acc])
            bar_arrive(VALUE_FREE + old, "288")
            if RESCALE == 1:
                acc = acc * gl.convert_layout(alpha, row_o)[:, None]
            if RESCALE == 2:
                acc = rescale(acc, gl.convert_layout(alpha, row_o))
            p16 = gl.convert_layout(p.to(dtype), p_layout)
        use(blocks)
        bar_arrive(QUERY_FREE + (turn & 1), "288")
        more = turn + 1 < turns
        slot = (turn + 1) & 1
        slot_phase = ((turn + 1) >> 1) & 1
        mbarrier.wait(q_full.index(slot), slot_phase, pred=more)
        batch_n, head_n, row0_n, hi_n, blocks_n, full_lo_n, full_hi_n = read_tile(
            tile_s.index(slot), m_len, n_len, window, KIND, BN
        )
        lo_row_n = lo_row
        hi_row_n = hi_row
        if KIND == 3:
            lo_row_n = bounds_s.index(slot * 2).slice(w * 64, 64).load(row_s)
            hi_row_n = bounds_s.index(slot * 2 + 1).slice(w * 64, 64).load(row_s)
        old = it & 1
        old_phase = (it >> 1) & 1
        it += 1
        stage = it & 1
        phase = (it >> 1) & 1
        if RESCALE == 0:
            acc = acc * gl.convert_layout(alpha, row_o)[:, None]
        if not VLATE:
            mbarrier.wait(v_full.index(old), old_phase)
        mbarrier.wait(k_full.index(stage), phase, pred=more)
        if TURNS:
            bar_sync(_TURN + w, "256")
        last = warpgroup_mma(p16, v_s.index(old).reshape([BN, D]), acc, is_async=True)
        if more:
            sn = gl.zeros([64, BN], gl.float32, s_layout)
            kn = k_s.index(stage).reshape([BN, D]).permute((1, 0))
            qn = q_s.index(slot * 2 + w).reshape([64, D])
            sn = warpgroup_mma(qn, kn, sn, use_acc=False, is_async=True)
            if TURNS:
                bar_arrive(_TURN + 1 - w, "256")
            # Ready since long; the branches keep ptxas from moving the row sums in front of the
            # products, and from waiting for the products before it.
            mbarrier.wait(q_full.index(slot), slot_phase)
            factor = finish_rows(
                m, lanes, w, lse_ptr, batch, head, heads, row0, m_len, qk_scale, s_layout
            )
            if FENCE:
                mbarrier.wait(q_full.index(slot), slot_phase)
            done = warpgroup_mma_wait(1, deps=[last])
            bar_arrive(VALUE_FREE + old, "288")
            store_rows(done, factor, w, o_desc, o_s, batch, head, row0, o_layout)
            sn = warpgroup_mma_wait(0, deps=[sn])
            bar_arrive(KEY_FREE + stage, "288")
            sn = mask_first(
                sn, w, row0_n, hi_n - BN, n_len, shift, window, full_lo_n, full_hi_n, lo_row_n,
                hi_row_n, KIND, s_layout,
            )  # fmt: skip
            mn, pn = first_softmax(sn, qk_scale)
            m = gl.convert_layout(mn, row_s)
            lanes = gl.convert_layout(lane_sum(pn), l_layout)
            p16 = gl.convert_layout(pn.to(dtype), p_layout)
            if VLATE:
                mbarrier.wait(v_full.index(stage), phase)
        else:
            if TURNS:
                bar_arrive(_TURN + 1 - w, "256")
            factor = finish_rows(
                m, lanes, w, lse_ptr, batch, head, heads, row0, m_len, qk_scale, s_layout
            )
            rest = warpgroup_mma_wait(0, deps=[last])
            bar_arrive(VALUE_FREE + old, "288")
            store_rows(rest, factor, w, o_desc, o_s, batch, head, row0, o_layout)
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


@gluon.jit(do_not_specialize=["batch_heads", "heads", "m_len", "n_len", "window", "m_tiles",
                              "section", "sections", "batch_stride", "whole", "by_section",
                              "by_width", "by_last", "by_heads", "by_group"])  # fmt: skip
def attention_forward(
    q_desc, k_desc, v_desc, o_desc, lse_ptr, intervals_ptr, qk_scale,
    batch_heads, heads, m_len, n_len, window, m_tiles, section, sections, batch_stride, whole,
    by_section, by_width, by_last, by_heads, by_group,
    KIND: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, TURNS: gl.constexpr,
    RESCALE: gl.constexpr = 2, VLATE: gl.constexpr = True, FENCE: gl.constexpr = True,
):  # fmt: skip
    """Attention of `[B, H, M, D]` queries over `[B, G, N, D]` keys and values.

    Args:
        q_desc, k_desc, v_desc, o_desc: Descriptors of the four tensors, blocks `[1, 1, 64, D]` for
            queries and output, `[1, 1, BN, D]` for keys and values.
        lse_ptr: `[B, H, M]` fp32 out.
        intervals_ptr: `[B, M, 2]` int32, or null; `batch_stride` elements between batches.
        qk_scale: Softmax scale times log2(e); positive.
        batch_heads, heads: `B * H`, `H`.
        m_len, n_len, window: `M`, `N`, keys that a row sees (KIND 2).
        m_tiles, section, sections: Tiles of a head; heads that are worked on together; how many
            such sections there are.
        whole: Tiles that every program takes at least.
        by_section, by_width, by_last, by_heads, by_group: `forward.inverse` of a section's tiles,
            a section's heads, the last section's heads, `H`, and `H // G`.
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
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tile_s = gl.allocate_shared_memory(gl.int32, [2, 8], plain)
    bounds_s = tile_s
    if KIND == 3:
        bounds_s = gl.allocate_shared_memory(gl.int32, [4, 128], plain)
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), 1)
        mbarrier.init(k_full.index(i), 1)
        mbarrier.init(v_full.index(i), 1)
    fence_async_shared()
    sizes = (
        batch_heads, heads, m_len, n_len, window, m_tiles, section, sections, batch_stride, whole,
        by_section, by_width, by_last, by_heads, by_group,
    )  # fmt: skip
    scalars = (batch_heads * m_tiles, whole, heads, m_len, n_len, window)
    gl.warp_specialize([
        (_consumer, (0, o_desc, lse_ptr, q_s, k_s, v_s, o_s, q_full, k_full, v_full, tile_s,
                     bounds_s, scalars, qk_scale, KIND, BN, D, TURNS, RESCALE, VLATE, FENCE)),
        (_consumer, (1, o_desc, lse_ptr, q_s, k_s, v_s, o_s, q_full, k_full, v_full, tile_s,
                     bounds_s, scalars, qk_scale, KIND, BN, D, TURNS, RESCALE, VLATE, FENCE)),
        (producer, (q_desc, k_desc, v_desc, intervals_ptr, q_s, k_s, v_s, q_full, k_full, v_full,
                    tile_s, bounds_s, sizes, KIND, BN)),
    ], [4, 1], [240, 24])  # fmt: skip
