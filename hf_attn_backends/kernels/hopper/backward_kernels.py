"""Device code of the sm_90 backward: all five products in one pass over the keys.

A program owns 128 keys of one key/value head and walks the tiles of query rows that see them (64
rows for head dim 128, 128 rows for 64), of every query head of the group, so that dK and dV are
accumulated in registers and written once (FlashAttention-2, arXiv 2307.08691, algorithm 2;
FlashAttention-3's order of the products, arXiv 2407.08608, section 3.3). Per tile, with scores
transposed so that weights and score gradients are register operands of the products that follow:

    S^T = K Q^T,  dP^T = V dO^T,  P^T = exp2(c S^T - lse),  dS^T = P^T * (dP^T - delta)
    dV += P^T dO,  dQ = dS K,  dK += dS^T Q

Five partitions: two consumer warpgroups (64 keys each; of dQ, half of a tile each, for which they
exchange dS through shared memory), a producer warp that fills the rings, and for each consumer a
warp that adds its dQ to global memory by the copy engine, in fp32. That addition is in arrival
order, so dQ is not deterministic; dK and dV are.

dQ leaves in register order: row `t` of a `[128, 32]` block is what thread `t` of the warpgroup
holds, which makes the stores to shared memory 16 bytes wide and free of bank conflicts. The finish
pass knows the order (`backward_passes.py`). The row statistics are prepared there too: rows behind
the last query and rows that see nothing have a log-sum-exp of +inf and so weights of exactly 0.

Registers: of a consumer's 240, 128 hold dK and dV (64 for head dim 64) and 64 the scores and dP
(128 for head dim 64). No accumulator is spilled as long as statistics come late out of shared
memory and masks compare one value per thread with constants (`backward_masks.py`). Between the wait
for S^T and the wait for dP^T lie the exponentials; dQ's way to shared memory lies under dK's
product.

Synchronisation: TMA fills and consumer releases signal mbarriers; the exchange of dS is hardware
barrier 8 (double buffered, so once an iteration), 9 and 10 order the epilogue.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from hf_attn_backends.kernels.hopper.backward_masks import (
    BN,
    CAUSAL,
    INTERVALS,
    WINDOW,
    masked,
)
from hf_attn_backends.kernels.hopper.gluon_compat import (
    bar_sync,
    fence_async_shared,
    mbarrier,
    tma_load,
    tma_reduce_add,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)

_STAGES = gl.constexpr(2)
_EXCHANGE = gl.constexpr(8)
_KEYS_READ = gl.constexpr(9)
_GRADS_WRITTEN = gl.constexpr(10)


@gluon.jit
def _next_tile(m, head, m_lo, m_hi):
    """The query tile after tile `m` of `head`: heads one after the other."""
    m += 1
    if m == m_hi:
        m = m_lo
        head += 1
    return m, head


@gluon.jit
def _producer(descs, place, rings, bars, STATS: gl.constexpr):
    """Load keys and values once, then queries, their statistics and output gradients."""
    q_desc, do_desc, k_desc, v_desc, stats_desc = descs
    batch, kv_head, group, heads, n0, m_lo, m_hi, m_tiles, total = place
    q_s, do_s, k_s, v_s, stats_s = rings
    kv_full, q_full, do_full, q_free, do_free = bars
    BM: gl.constexpr = q_s.shape[1]
    D: gl.constexpr = k_s.shape[1]
    mbarrier.expect(kv_full, 2 * k_desc.block_type.nbytes)
    tma_load(k_desc, [batch, kv_head, n0, 0], kv_full, k_s.reshape([1, 1, BN, D]))
    tma_load(v_desc, [batch, kv_head, n0, 0], kv_full, v_s.reshape([1, 1, BN, D]))
    m = m_lo
    head = kv_head * group
    for it in range(total):
        stage = it % _STAGES
        phase = it // _STAGES & 1
        row = m * BM
        tile = (batch * heads + head) * m_tiles + m
        mbarrier.wait(q_free.index(stage), phase ^ 1)
        mbarrier.expect(q_full.index(stage), q_desc.block_type.nbytes + STATS * BM * 4)
        full = q_full.index(stage)
        tma_load(q_desc, [batch, head, row, 0], full, q_s.index(stage).reshape([1, 1, BM, D]))
        tma_load(stats_desc, [tile * STATS, 0], full, stats_s.index(stage))
        mbarrier.wait(do_free.index(stage), phase ^ 1)
        full = do_full.index(stage)
        mbarrier.expect(full, do_desc.block_type.nbytes)
        tma_load(do_desc, [batch, head, row, 0], full, do_s.index(stage).reshape([1, 1, BM, D]))
        m, head = _next_tile(m, head, m_lo, m_hi)


@gluon.jit
def _adder(w: gl.constexpr, dq_desc, dq_s, dq_full, dq_free, place):
    """Add the dQ tiles of consumer `w` to global memory."""
    batch, kv_head, group, heads, _n0, m_lo, m_hi, m_tiles, total = place
    m = m_lo
    head = kv_head * group
    for it in range(total):
        tile = (batch * heads + head) * m_tiles + m
        mbarrier.wait(dq_full.index(w), it & 1)
        tma_reduce_add(dq_desc, [(tile * 2 + w) * 128, 0], dq_s.index(w))
        tma_store_wait(0)
        mbarrier.arrive(dq_free.index(w), count=1)
        m, head = _next_tile(m, head, m_lo, m_hi)


@gluon.jit
def _store_in_register_order(dq, target):
    """Write `[64, 64]` as `[128, 32]`: row `t` is what thread `t` holds."""
    x = dq.reshape([4, 2, 8, 8, 4, 2])  # warp, +8 rows, row, part, lane, pair
    target.store(x.permute([0, 2, 4, 1, 3, 5]).reshape([128, 32]))


@gluon.jit
def _consumer(
    w: gl.constexpr, outs, place, rings, work, bars, seen, scale_log2, scale,
    KIND: gl.constexpr,
):  # fmt: skip
    """Gradients of keys and values `n0 + 64 w ...`, and of each dQ tile half `w`.

    The halves are columns for head dim 128, rows for head dim 64.
    """
    dk_desc, dv_desc = outs
    batch, kv_head, _group, _heads, n0, m_lo, m_hi, _m_tiles, total = place
    q_s, do_s, k_s, v_s, stats_s = rings
    ds_s, dq_s, dq_full, dq_free = work
    kv_full, q_full, do_full, q_free, do_free = bars
    tiles_ptr, n_len, shift, window = seen
    BM: gl.constexpr = q_s.shape[1]
    D: gl.constexpr = k_s.shape[1]
    KEYS: gl.constexpr = BN // 2
    dtype: gl.constexpr = k_s.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    dk_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, dk_layout, 2)

    k_own = k_s.slice(w * KEYS, KEYS, 0)
    v_own = v_s.slice(w * KEYS, KEYS, 0)
    dk = gl.zeros([KEYS, D], gl.float32, dk_layout)
    dv = gl.zeros([KEYS, D], gl.float32, dk_layout)
    mbarrier.wait(kv_full, 0)
    m = m_lo
    for it in range(total):
        stage = it % _STAGES
        phase = it // _STAGES & 1
        turn = it & 1
        stats = stats_s.index(stage)
        ragged = False
        if KIND == INTERVALS:
            latest = gl.load(tiles_ptr + 2 * m)
            earliest = gl.load(tiles_ptr + 2 * m + 1)
            ragged = (latest > n0) | (earliest < n0 + BN)
        mbarrier.wait(q_full.index(stage), phase)
        q_t = q_s.index(stage).permute((1, 0))
        st = gl.zeros([KEYS, BM], gl.float32, s_layout)
        st = warpgroup_mma(k_own, q_t, st, use_acc=False, is_async=True)
        lse = stats.slice(0, 1, 0).load(s_layout)
        mbarrier.wait(do_full.index(stage), phase)
        do_t = do_s.index(stage).permute((1, 0))
        if BM == 64:
            dpt = gl.zeros([KEYS, BM], gl.float32, s_layout)
            dpt = warpgroup_mma(v_own, do_t, dpt, use_acc=False, is_async=True)
        else:
            # The sum begins at -delta, which keeps 32 registers free between here and dS.
            negative = 0.0 - stats.slice(1, 1, 0).load(s_layout)
            dpt, _x = gl.broadcast(negative, gl.zeros([KEYS, 1], gl.float32, s_layout))
            dpt = warpgroup_mma(v_own, do_t, dpt, is_async=True)
        st = warpgroup_mma_wait(1, deps=[st])
        p = gl.exp2(st * scale_log2 - lse)
        key = n0 + w * KEYS
        p = masked(p, stats, ragged, m * BM, key, n0 + BN - 1, n_len, shift, window, KIND)
        p_operand = gl.convert_layout(p.to(dtype), operand)
        if BM == 64:
            delta = stats.slice(1, 1, 0).load(s_layout)
            dpt = warpgroup_mma_wait(0, deps=[dpt])
            ds = (p * (dpt - delta)).to(dtype)
        else:
            dpt = warpgroup_mma_wait(0, deps=[dpt])
            ds = (p * dpt).to(dtype)
        ds_s.index(turn).slice(w * KEYS, KEYS, 0).store(ds)
        dv = warpgroup_mma(p_operand, do_s.index(stage), dv, is_async=True)
        fence_async_shared()
        bar_sync(_EXCHANGE, "256")
        dq = gl.zeros([64, 64], gl.float32, dq_layout)
        if BM == 64:
            ds_t = ds_s.index(turn).permute((1, 0))
            dq = warpgroup_mma(ds_t, k_s.slice(w * 64, 64, 1), dq, use_acc=False, is_async=True)
        else:
            ds_t = ds_s.index(turn).slice(w * 64, 64, 1).permute((1, 0))
            dq = warpgroup_mma(ds_t, k_s, dq, use_acc=False, is_async=True)
        ds_operand = gl.convert_layout(ds, operand)
        dk = warpgroup_mma(ds_operand, q_s.index(stage), dk, is_async=True)
        dv = warpgroup_mma_wait(2, deps=[dv])
        mbarrier.arrive(do_free.index(stage), count=1)
        mbarrier.wait(dq_free.index(w), turn ^ 1)
        dq = warpgroup_mma_wait(1, deps=[dq])
        _store_in_register_order(dq, dq_s.index(w))
        fence_async_shared()
        mbarrier.arrive(dq_full.index(w), count=1)
        dk = warpgroup_mma_wait(0, deps=[dk])
        mbarrier.arrive(q_free.index(stage), count=1)
        m += 1
        if m == m_hi:
            m = m_lo

    # Both gradients leave through the shared memory of K and V; the other consumer has read K.
    v_own.store(dv.to(dtype))
    bar_sync(_KEYS_READ, "256")
    k_own.store((dk * scale).to(dtype))
    fence_async_shared()
    bar_sync(_GRADS_WRITTEN, "256")
    if w == 0:
        tma_store(dv_desc, [batch, kv_head, n0, 0], v_s.reshape([1, 1, BN, D]))
    else:
        tma_store(dk_desc, [batch, kv_head, n0, 0], k_s.reshape([1, 1, BN, D]))
    tma_store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "batch_kv", "kv_heads", "group", "m_len", "n_len", "m_tiles", "n_tiles", "window",
    ],
    do_not_specialize_on_alignment=["hull_ptr", "tiles_ptr"],
)  # fmt: skip
def attention_backward(
    q_desc, do_desc, k_desc, v_desc, stats_desc, dq_desc, dk_desc, dv_desc,
    hull_ptr, tiles_ptr, scale_log2, scale,
    batch_kv, kv_heads, group, m_len, n_len, m_tiles, n_tiles, window,
    KIND: gl.constexpr,
):  # fmt: skip
    """One program per 128 keys of a key/value head; under causality the longest walks come first.

    Args:
        q_desc, do_desc: `[B, H, M, D]` in blocks of BM rows.
        k_desc, v_desc, dk_desc, dv_desc: `[B, G, N, D]` in blocks of BN keys.
        stats_desc: fp32 `[B * H * m_tiles * STATS, BM]`: log-sum-exp (base 2), delta and, for
            intervals, the first and one-past-last key as int32 bits.
        dq_desc: fp32 `[B * H * m_tiles * 256, 32]`, zeroed; dQ / scale in register order.
        hull_ptr: int32 `[B, n_tiles, 2]`, for intervals: the query tiles that see a program's keys.
        tiles_ptr: int32 `[B, m_tiles, 2]`, for intervals: latest first key and earliest end of a
            tile's rows.
        scale_log2, scale: Softmax scale times log2(e), and the scale itself.
        batch_kv, kv_heads, group: `B * G`, `G`, `H / G`.
        m_len, n_len, m_tiles, n_tiles: `M`, `N` and their tiles.
        window: Keys a row sees, its own included.
    """
    STATS: gl.constexpr = 4 if KIND == INTERVALS else 2
    BM: gl.constexpr = q_desc.block_type.shape[2]
    D: gl.constexpr = q_desc.block_type.shape[3]
    dtype: gl.constexpr = q_desc.dtype
    n_tile = gl.program_id(0) // batch_kv
    pair = gl.program_id(0) - n_tile * batch_kv
    batch = pair // kv_heads
    kv_head = pair - batch * kv_heads
    n0 = n_tile * BN
    shift = n_len - m_len
    m_lo = 0
    m_hi = m_tiles
    if KIND == CAUSAL or KIND == WINDOW:
        m_lo = gl.minimum(gl.maximum(n0 - shift, 0) // BM, m_tiles)
    if KIND == WINDOW:
        m_hi = gl.minimum(gl.maximum(n0 + BN - 2 - shift + window, 0) // BM + 1, m_tiles)
    if KIND == INTERVALS:
        m_lo = gl.load(hull_ptr + 2 * (batch * n_tiles + n_tile))
        m_hi = gl.load(hull_ptr + 2 * (batch * n_tiles + n_tile) + 1)
    total = gl.maximum(m_hi - m_lo, 0) * group
    place = (batch, kv_head, group, kv_heads * group, n0, m_lo, m_hi, m_tiles, total)

    tile: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_s = gl.allocate_shared_memory(dtype, [_STAGES, BM, D], tile)
    do_s = gl.allocate_shared_memory(dtype, [_STAGES, BM, D], tile)
    k_s = gl.allocate_shared_memory(dtype, [BN, D], tile)
    v_s = gl.allocate_shared_memory(dtype, [BN, D], tile)
    ds_s = gl.allocate_shared_memory(dtype, [2, BN, BM], tile)
    dq_s = gl.allocate_shared_memory(gl.float32, [2, 128, 32], dq_desc.layout)
    stats_s = gl.allocate_shared_memory(gl.float32, [_STAGES, STATS, BM], stats_desc.layout)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    kv_full = gl.allocate_shared_memory(gl.int64, [1], barrier)
    q_full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], barrier)
    do_full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], barrier)
    q_free = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], barrier)
    do_free = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], barrier)
    dq_full = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    dq_free = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    mbarrier.init(kv_full, 1)
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), 1)
        mbarrier.init(do_full.index(i), 1)
        mbarrier.init(q_free.index(i), 2)
        mbarrier.init(do_free.index(i), 2)
        mbarrier.init(dq_full.index(i), 1)
        mbarrier.init(dq_free.index(i), 1)
    fence_async_shared()
    rings = (q_s, do_s, k_s, v_s, stats_s)
    bars = (kv_full, q_full, do_full, q_free, do_free)
    descs = (q_desc, do_desc, k_desc, v_desc, stats_desc)
    outs = (dk_desc, dv_desc)
    work = (ds_s, dq_s, dq_full, dq_free)
    seen = (tiles_ptr + 2 * batch * m_tiles, n_len, shift, window)
    gl.warp_specialize(
        [
            (_consumer, (0, outs, place, rings, work, bars, seen, scale_log2, scale, KIND)),
            (_consumer, (1, outs, place, rings, work, bars, seen, scale_log2, scale, KIND)),
            (_producer, (descs, place, rings, bars, STATS)),
            (_adder, (0, dq_desc, dq_s, dq_full, dq_free, place)),
            (_adder, (1, dq_desc, dq_s, dq_full, dq_free, place)),
        ],
        [4, 1, 1, 1],
        [240, 24, 24, 24],
    )
