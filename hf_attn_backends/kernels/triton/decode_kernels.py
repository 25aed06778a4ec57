"""Attention of a few query rows over many keys: split keys, packed GQA group.

Algorithm: flash decoding. The rows of a key head's whole group of query heads, `group * q_len` of
them, are the M dimension of one tile, so that K and V are read once for all of them; the keys are
split among programs until the GPU is full, and a second kernel combines the splits' results by
their log-sum-exps. Online softmax as in FlashAttention-2 (arXiv 2307.08691, algorithm 1).

With 16 rows, a tile has too few of them to share among warps. `WARPS_APART` then gives each warp
keys of its own: the products are batched, `[W, 16, D] x [W, D, BN / W]`, every warp keeps its own
maximum, denominator and accumulator, and no warp waits for another until the loop is over.

Numerics: as in the portable forward kernel. Deterministic: no atomics, a fixed order of sums.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hf_attn_backends.kernels.triton.memory_kernels import tile_offsets
from hf_attn_backends.kernels.triton.visibility_kernels import row_interval

RUN_TIME = (
    "splits", "q_len", "k_len", "window", "stride_ib", "stride_im", "stride_tb",
)  # fmt: skip


@triton.jit
def load_keys(
    base, table, first, limit, stride_block, stride_n, offs_n, offs_d,
    BN: tl.constexpr, HEAD_DIM: tl.constexpr, BD: tl.constexpr, PAGE: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """The keys (or values) `[first, first + BN)` of one head; 0 from `limit` on and in padding.

    `PAGE` keys lie together in a block of the cache, and `table` says where each block is; 0: all
    of them lie together. `first` is a multiple of `BN`.
    """
    cols = first + offs_n
    inside = cols < limit
    if PAGE == 0:
        ptrs = base + tl.cast(first, tl.int64) * stride_n
        ptrs = ptrs + tile_offsets(offs_n, stride_n, WIDE) + offs_d
    elif PAGE % BN == 0:  # the tile lies in one block
        block = tl.load(table + first // PAGE).to(tl.int64)
        ptrs = base + block * stride_block + tl.cast(first % PAGE, tl.int64) * stride_n
        ptrs = ptrs + tile_offsets(offs_n, stride_n, WIDE) + offs_d
    else:
        block = tl.load(table + cols // PAGE, mask=inside, other=0).to(tl.int64)
        ptrs = base + block * stride_block + tile_offsets(cols % PAGE, stride_n, WIDE) + offs_d
    if HEAD_DIM != BD:
        inside = inside & (offs_d < HEAD_DIM)
    return tl.load(ptrs, mask=inside, other=0.0)


@triton.jit
def visible_range(start, end, rows, m_first, m_last, q_len, k_len, window, KIND: tl.constexpr):
    """The keys `[lo, hi)` that some row of the tile sees."""
    if KIND == "intervals":
        some = (end > start) & (rows < q_len)
        lo = tl.min(tl.where(some, start, k_len), 0)
        hi = tl.max(tl.where(some, end, 0), 0)
    else:
        lo = m_first * 0
        hi = lo + k_len
        if KIND == "causal" or KIND == "window":
            hi = tl.minimum(m_last + (k_len - q_len) + 1, k_len)
        if KIND == "window":
            lo = tl.maximum(m_first + (k_len - q_len) + 1 - window, 0)
    hi = tl.maximum(hi, 0)
    return tl.minimum(lo, hi), hi


@triton.jit
def sum_of_warps(tile, BM: tl.constexpr, BD: tl.constexpr, W: tl.constexpr):
    """`[BM, BD, W]` summed over its last axis; once through shared memory, unlike `tl.sum`."""
    if W == 2:
        one, other = tl.split(tile)
        total = one + other
    else:
        one, other = tl.split(tl.reshape(tile, [BM, BD, W // 2, 2]))
        total = sum_of_warps(one + other, BM, BD, W // 2)
    return total


@triton.jit(do_not_specialize=RUN_TIME)
def _attn_decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, part_ptr, part_peak_ptr, part_denom_ptr,
    lengths_ptr, intervals_ptr, table_ptr,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn, stride_ob, stride_oh, stride_om,
    stride_ib, stride_im, stride_tb,
    splits, q_len, k_len, window, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, TILES_M: tl.constexpr,
    HEAD_DIM: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    WARPS_APART: tl.constexpr, KIND: tl.constexpr, LENGTHS: tl.constexpr, PAGE: tl.constexpr,
    SPLIT: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr, QUERY_IN_LOOP: tl.constexpr,
):  # fmt: skip
    """One program: BM rows of one key head's group, one split of the keys they see.

    Row `r` of the packed rows is query row `r // GROUP` of the group's head `r % GROUP`. With
    `SPLIT`, fp32 sums go to `part_ptr` `[B * H * M, splits, D]`, with the maximum (base 2) and the
    denominator that they are relative to; otherwise the results go straight to `out` and `lse`.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    LN2: tl.constexpr = 0.6931471805599453
    W: tl.constexpr = WARPS_APART
    pid = tl.program_id(0)
    split = tl.program_id(1)
    tile = pid % TILES_M
    kv = (pid // TILES_M) % KV_HEADS
    b = pid // TILES_M // KV_HEADS
    packed = tile * BM + tl.arange(0, BM)
    rows = packed // GROUP
    heads = kv * GROUP + packed % GROUP
    valid = rows < q_len
    offs_d = tl.arange(0, BD)
    columns = (offs_d < HEAD_DIM)[None, :]
    if PDL:
        gdc_wait()  # what comes before may still be writing query, key or value
    if LENGTHS:
        k_len = tl.minimum(tl.load(lengths_ptr + b), k_len)

    start, end = row_interval(
        rows, b, q_len, k_len, window, intervals_ptr, stride_ib, stride_im, KIND
    )
    m_last = tl.minimum((tile * BM + BM - 1) // GROUP, q_len - 1)
    lo, hi = visible_range(start, end, rows, tile * BM // GROUP, m_last, q_len, k_len, window, KIND)
    first_tile = lo // BN
    tiles = tl.cdiv(hi, BN) - first_tile
    share = tiles // splits  # the first `more` splits have a tile more
    more = tiles - share * splits
    first = (first_tile + share * split + tl.minimum(split, more)) * BN
    last = tl.minimum(first + tl.where(split < more, share + 1, share) * BN, hi)

    q_rows = heads.to(tl.int64) * stride_qh + rows.to(tl.int64) * stride_qm
    q_ptrs = q_ptr + b.to(tl.int64) * stride_qb + q_rows[:, None] + offs_d[None, :]
    q_mask = valid[:, None] & columns
    if not QUERY_IN_LOOP:
        q = tl.load(q_ptrs, mask=q_mask, other=0.0)
    k_base = k_ptr + kv.to(tl.int64) * stride_kh
    v_base = v_ptr + kv.to(tl.int64) * stride_vh
    table = table_ptr + b.to(tl.int64) * stride_tb
    if PAGE == 0:
        k_base += b.to(tl.int64) * stride_kb
        v_base += b.to(tl.int64) * stride_vb

    if W > 1:
        AXIS: tl.constexpr = 2
        warp_keys = tl.arange(0, W)[:, None] * (BN // W) + tl.arange(0, BN // W)[None, :]
        offs_n = warp_keys[:, :, None]
        offs_cols = warp_keys[:, None, :]
        offs_k = offs_d[None, None, :]
        starts = start[None, :, None]
        ends = end[None, :, None]
        acc = tl.zeros([W, BM, BD], tl.float32)
        denom = tl.zeros([W, BM], tl.float32)
        peak = tl.full([W, BM], float("-inf"), tl.float32)
    else:
        AXIS: tl.constexpr = 1
        offs_n = tl.arange(0, BN)[:, None]
        offs_cols = tl.arange(0, BN)[None, :]
        offs_k = offs_d[None, :]
        starts = start[:, None]
        ends = end[:, None]
        acc = tl.zeros([BM, BD], tl.float32)
        denom = tl.zeros([BM], tl.float32)
        peak = tl.full([BM], float("-inf"), tl.float32)
    if W > 1 and QUERY_IN_LOOP:
        q_ptrs = tl.broadcast_to(q_ptrs[None, :, :], [W, BM, BD])
        q_mask = tl.broadcast_to(q_mask[None, :, :], [W, BM, BD])
    elif W > 1:
        q = tl.broadcast_to(q[None, :, :], [W, BM, BD])
    # A negative scale would make the maximum of the scores the minimum of the scaled ones.
    sign = tl.where(scale < 0.0, -1.0, 1.0)
    qk_scale = tl.abs(scale) * LOG2E

    for n0 in tl.range(first, last, BN, num_stages=STAGES):
        k = load_keys(
            k_base, table, n0, last, stride_kb, stride_kn, offs_n, offs_k,
            BN, HEAD_DIM, BD, PAGE, WIDE,
        )  # fmt: skip
        v = load_keys(
            v_base, table, n0, last, stride_vb, stride_vn, offs_n, offs_k,
            BN, HEAD_DIM, BD, PAGE, WIDE,
        )  # fmt: skip
        if QUERY_IN_LOOP:
            # The offset is 0, which the compiler does not know: it would load before the loop.
            q = tl.load(q_ptrs + tl.minimum(n0, 0), mask=q_mask, other=0.0)
        if W > 1:
            s = tl.dot(q, tl.permute(k, (0, 2, 1)), input_precision=PRECISION)
        else:
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        cols = n0 + offs_cols
        seen = (cols >= starts) & (cols < ends)
        s = s * sign
        top = tl.max(tl.where(seen, s, float("-inf")), AXIS)
        peak_new = tl.maximum(peak, tl.where(top == float("-inf"), top, top * qk_scale))
        # A row that has seen nothing yet keeps -inf: subtract 0, not -inf, from -inf.
        shift = tl.where(peak_new == float("-inf"), 0.0, peak_new)
        p = tl.where(seen, tl.math.exp2(s * qk_scale - tl.expand_dims(shift, AXIS)), 0.0)
        alpha = tl.math.exp2(peak - shift)
        denom = denom * alpha + tl.sum(p, AXIS)
        acc = acc * tl.expand_dims(alpha, AXIS)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        peak = peak_new
    if PDL:
        gdc_launch_dependents()

    if W > 1:
        top = tl.max(peak, 0)
        weight = tl.math.exp2(peak - tl.where(top == float("-inf"), 0.0, top)[None, :])
        denom = tl.sum(denom * weight, 0)
        acc = sum_of_warps(tl.permute(acc * weight[:, :, None], (1, 2, 0)), BM, BD, W)
        peak = top
    some = denom > 0.0
    row = (b.to(tl.int64) * (KV_HEADS * GROUP) + heads) * q_len + rows
    if SPLIT:
        slot = row * splits + split
        # Nothing is kept of an empty split but that it is empty.
        kept = (valid & some)[:, None] & columns
        tl.store(part_ptr + slot[:, None] * HEAD_DIM + offs_d[None, :], acc, mask=kept)
        tl.store(part_peak_ptr + slot, peak, mask=valid)
        tl.store(part_denom_ptr + slot, denom, mask=valid)
    else:
        total = tl.where(some, denom, 1.0)
        result = acc * tl.where(some, 1.0 / total, 0.0)[:, None]
        out_rows = heads.to(tl.int64) * stride_oh + rows.to(tl.int64) * stride_om
        ptrs = out_ptr + b.to(tl.int64) * stride_ob + out_rows[:, None] + offs_d[None, :]
        tl.store(ptrs, result.to(out_ptr.dtype.element_ty), mask=valid[:, None] & columns)
        lse = tl.where(some, peak * LN2 + tl.log(total), float("-inf"))
        tl.store(lse_ptr + row, lse, mask=valid)


@triton.jit(do_not_specialize=["heads", "q_len", "splits"])
def _attn_decode_combine_kernel(
    part_ptr, part_peak_ptr, part_denom_ptr, out_ptr, lse_ptr, stride_ob, stride_oh, stride_om,
    heads, q_len, splits,
    HEAD_DIM: tl.constexpr, BD: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: one row; its splits' sums, brought to the row's maximum, added.

    `SPLITS` is `splits` padded to a power of two, of which `CHUNK` are loaded at a time.
    """
    LN2: tl.constexpr = 0.6931471805599453
    row = tl.program_id(0)
    m = row % q_len
    h = (row // q_len) % heads
    b = row // q_len // heads
    slots = row.to(tl.int64) * splits
    offs_d = tl.arange(0, BD)
    offs = tl.arange(0, SPLITS)
    if PDL:
        gdc_wait()
    peak = tl.load(part_peak_ptr + slots + offs, mask=offs < splits, other=float("-inf"))
    denom = tl.load(part_denom_ptr + slots + offs, mask=offs < splits, other=0.0)
    top = tl.max(peak, 0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(denom * tl.math.exp2(peak - shift), 0)
    acc = tl.zeros([BD], tl.float32)
    for s0 in tl.static_range(0, SPLITS, CHUNK):
        parts = s0 + tl.arange(0, CHUNK)
        inside = parts < splits
        peak = tl.load(part_peak_ptr + slots + parts, mask=inside, other=float("-inf"))
        ptrs = part_ptr + (slots + parts)[:, None] * HEAD_DIM + offs_d[None, :]
        part = tl.load(ptrs, mask=inside[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)
        weight = tl.math.exp2(peak - shift)[:, None]
        # What lies in memory for an empty split is nobody's result.
        acc += tl.sum(tl.where(weight > 0.0, part, 0.0) * weight, 0)
    if PDL:
        gdc_launch_dependents()
    some = total > 0.0
    total = tl.where(some, total, 1.0)
    acc = acc * tl.where(some, 1.0 / total, 0.0)
    ptrs = out_ptr + b.to(tl.int64) * stride_ob + h.to(tl.int64) * stride_oh
    ptrs = ptrs + m.to(tl.int64) * stride_om + offs_d
    tl.store(ptrs, acc.to(out_ptr.dtype.element_ty), mask=offs_d < HEAD_DIM)
    tl.store(lse_ptr + row, tl.where(some, shift * LN2 + tl.log(total), float("-inf")))
