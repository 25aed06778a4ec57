"""Device code of the sm_90 forward: one producer warp, two consumer warpgroups, persistent.

FlashAttention-3 (arXiv 2407.08608, algorithms 1 and 2) with two additions. The first scores of a
tile are computed beside the last value product of the tile before it, so that the tensor cores
are not idle between tiles. And the accumulator is rescaled only where a row's maximum has grown
by more than a factor `2 ** 8`, as FlashAttention-4 does on sm_100 (Dao-AILab/flash-attention
`flash_attn/cute/softmax.py`): what a row's weights are relative to need not be its maximum.
Each consumer owns 64 of a tile's 128 query rows and keeps scores and weights in registers.

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
    begin,
    producer,
    read_keys,
)
from hf_attn_backends.kernels.hopper.forward_tiles import (
    finish_rows,
    first_softmax,
    halves,
    joined,
    lane_sum,
    mask_block,
    mask_first,
    rescale,
    store_rows,
    weights,
)
from hf_attn_backends.kernels.hopper.gluon_compat import (
    bar_arrive,
    bar_sync,
    fence_async_shared,
    mbarrier,
    thread_barrier,
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
    TURNS: gl.constexpr, LAZY: gl.constexpr,
):  # fmt: skip
    """Compute rows `64 * w` to `64 * w + 63` of every tile of this program.

    Each turn begins a tile while it finishes the one before: the first turn finishes what is not
    there, the last one begins what is not there, and both throw it away. So there is one copy of
    the code, which a cold instruction cache is thankful for.
    """
    tiles, whole, heads, m_len, n_len, window = sizes
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    row_s: gl.constexpr = gl.SliceLayout(1, s_layout)
    row_o: gl.constexpr = gl.SliceLayout(1, o_layout)
    l_layout: gl.constexpr = lane_sum(gl.zeros([64, BN], gl.float32, s_layout)).type.layout
    dtype: gl.constexpr = o_desc.dtype
    shift = n_len - m_len
    if TURNS:
        if w == 1:
            bar_arrive(_TURN, "256")
    growth = 8.0 / qk_scale  # weights stay below 2 ** 8
    turns = tile_count(tiles, whole)
    m = gl.zeros([64], gl.float32, row_s)
    lanes = gl.zeros([64, 4], gl.float32, l_layout)
    p16 = gl.zeros([64, BN], dtype, p_layout)
    acc = gl.zeros([64, D], gl.float32, o_layout)
    lo_row = gl.zeros([64], gl.int32, row_s)
    hi_row = lo_row
    it = -1
    for turn in range(turns + 1):
        more = turn < turns
        slot = turn & 1
        mbarrier.wait(q_full.index(slot), (turn >> 1) & 1, pred=more)
        row0, hi, blocks, full_lo, full_hi = read_keys(
            tile_s.index(turn & 3), m_len, n_len, window, KIND, BN
        )
        if KIND == 3:
            lo_row = bounds_s.index(slot * 2).slice(w * 64, 64).load(row_s)
            hi_row = bounds_s.index(slot * 2 + 1).slice(w * 64, 64).load(row_s)
        old = it & 1
        it += 1
        stage = it & 1
        phase = (it >> 1) & 1
        mbarrier.wait(k_full.index(stage), phase, pred=more)
        if TURNS:
            bar_sync(_TURN + w, "256")
        sn = gl.zeros([64, BN], gl.float32, s_layout)
        kn = k_s.index(stage).reshape([BN, D]).permute((1, 0))
        q = q_s.index(slot * 2 + w).reshape([64, D])
        sn = warpgroup_mma(q, kn, sn, use_acc=False, is_async=True)
        last = warpgroup_mma(p16, v_s.index(old).reshape([BN, D]), acc, is_async=True)
        if TURNS:
            bar_arrive(_TURN + 1 - w, "256")
        lse, factor = finish_rows(m, lanes, qk_scale, s_layout)
        p = warpgroup_mma_wait(1, deps=[sn])
        if more:
            bar_arrive(KEY_FREE + stage, "288")
            p = mask_first(
                p, w, row0, hi - BN, n_len, shift, window, full_lo, full_hi, lo_row, hi_row,
                KIND, s_layout,
            )  # fmt: skip
            m, p = first_softmax(p, qk_scale)
            m = gl.convert_layout(m, row_s)
            lanes = gl.convert_layout(lane_sum(p), l_layout)
        mbarrier.wait(v_full.index(stage), phase, pred=more)
        done = warpgroup_mma_wait(0, deps=[last])
        bar_arrive(VALUE_FREE + old, "288")
        if turn > 0:
            store_rows(
                done, factor, lse, w, o_desc, o_s, lse_ptr, tile_s.index((turn - 1) & 3), heads,
                m_len, o_layout,
            )  # fmt: skip
        p16 = gl.convert_layout(p.to(dtype), p_layout)
        acc = gl.zeros([64, D], gl.float32, o_layout)
        for i in range(1, gl.where(more, blocks, 0)):
            old = it & 1
            it += 1
            stage = it & 1
            phase = (it >> 1) & 1
            # Triton wants one between two waits for one barrier; here all are about to meet anyway.
            thread_barrier()
            mbarrier.wait(k_full.index(stage), phase)
            if TURNS:
                bar_sync(_TURN + w, "256")
            s = gl.zeros([64, BN], gl.float32, s_layout)
            k = k_s.index(stage).reshape([BN, D]).permute((1, 0))
            s = warpgroup_mma(q, k, s, use_acc=False, is_async=True)
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
            if LAZY:
                m_new = gl.where(m_new > m + growth, m_new, m)
            base = m_new * qk_scale
            alpha = gl.exp2((m - m_new) * qk_scale)
            m = m_new
            lanes = lanes * gl.convert_layout(alpha, gl.SliceLayout(1, l_layout))[:, None]
            left, right = halves(s)
            p_left = weights(left, base, qk_scale)
            # Waiting here for values that the next iteration needs keeps ptxas from moving the
            # wait for the value product above the exponentials; what comes behind it (rescaling,
            # sums, casts) fills the gaps between the other half of them.
            mbarrier.wait(v_full.index(stage), phase)
            acc = warpgroup_mma_wait(0, deps=[acc])
            bar_arrive(VALUE_FREE + old, "288")
            if LAZY:
                acc = rescale(acc, gl.convert_layout(alpha, row_o))
            else:
                acc = acc * gl.convert_layout(alpha, row_o)[:, None]
            p_right = weights(right, base, qk_scale)
            lanes = lanes + gl.convert_layout(lane_sum(p_left), l_layout)
            lanes = lanes + gl.convert_layout(lane_sum(p_right), l_layout)
            p16 = gl.convert_layout(joined(p_left.to(dtype), p_right.to(dtype)), p_layout)
        if more:
            bar_arrive(QUERY_FREE + slot, "288")
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
    LAZY: gl.constexpr,
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
        LAZY: Rescale the accumulator only where a row's maximum has grown by more than `2 ** 8`.
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
    tile_s = gl.allocate_shared_memory(gl.int32, [4, 8], plain)
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
    if KIND != 3:
        begin(q_desc, k_desc, q_s, k_s, q_full, k_full, tile_s, sizes, KIND, BN)
    gl.warp_specialize([
        (_consumer, (0, o_desc, lse_ptr, q_s, k_s, v_s, o_s, q_full, k_full, v_full, tile_s,
                     bounds_s, scalars, qk_scale, KIND, BN, D, TURNS, LAZY)),
        (_consumer, (1, o_desc, lse_ptr, q_s, k_s, v_s, o_s, q_full, k_full, v_full, tile_s,
                     bounds_s, scalars, qk_scale, KIND, BN, D, TURNS, LAZY)),
        (producer, (q_desc, k_desc, v_desc, intervals_ptr, q_s, k_s, v_s, q_full, k_full, v_full,
                    tile_s, bounds_s, sizes, KIND, BN)),
    ], [4, 1], [240, 24])  # fmt: skip
