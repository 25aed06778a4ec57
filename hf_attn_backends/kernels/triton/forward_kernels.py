"""Forward pass of FlashAttention-2 in Triton.

Algorithm: Dao, "FlashAttention-2" (arXiv 2307.08691), algorithm 1. A program owns a tile of BM
query rows of one head and walks over the key tiles that the tile sees: first those that need a
mask on the left (window, intervals), then the unmasked ones, then the diagonal or ragged ones.

Numerics: scores, softmax and accumulators in fp32; the scale is folded with log2(e) so that each
weight costs one FMA and one exp2; the weights are rounded to the input dtype for the second
product, as in SDPA's FLASH. fp32 inputs use IEEE products, not TF32. Kept for the backward pass:
the log-sum-exp of each row, natural log, -inf for a row that sees nothing (whose output is 0).
"""

import triton
import triton.language as tl

from hf_attn_backends.kernels.triton.visibility_kernels import key_range, row_interval


@triton.jit
def tile_offsets(indices, stride, WIDE: tl.constexpr):
    """Element offsets inside a tile; int64 only where a tile spans more than 2^31 elements."""
    if WIDE:
        return indices.to(tl.int64) * stride
    return indices * stride


@triton.jit
def online_softmax(
    acc, l, m, q, k_base, v_base, stride_kn, stride_vn, stride_kd, stride_vd,
    lo, hi, k_len, start, end, mask_base, mask_rows, stride_mn, qk_scale,
    BN: tl.constexpr, BD: tl.constexpr, HEAD_DIM: tl.constexpr, MASKED: tl.constexpr,
    DENSE: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Fold the keys `[lo, hi)` into the running output, denominator and maximum (eq. 3-5)."""
    offs_n = tl.arange(0, BN)
    offs_d = tl.arange(0, BD)
    k_ptrs = k_base + tile_offsets(offs_n[None, :], stride_kn, WIDE) + offs_d[:, None] * stride_kd
    v_ptrs = v_base + tile_offsets(offs_n[:, None], stride_vn, WIDE) + offs_d[None, :] * stride_vd
    k_ptrs += tl.cast(lo, tl.int64) * stride_kn
    v_ptrs += tl.cast(lo, tl.int64) * stride_vn
    for n0 in tl.range(lo, hi, BN, num_stages=STAGES):
        cols = n0 + offs_n
        if MASKED:
            inside = cols < k_len
            if HEAD_DIM == BD:
                k = tl.load(k_ptrs, mask=inside[None, :], other=0.0)
            else:
                k = tl.load(k_ptrs, mask=inside[None, :] & (offs_d < HEAD_DIM)[:, None], other=0.0)
        elif HEAD_DIM == BD:
            k = tl.load(k_ptrs)
        else:
            k = tl.load(k_ptrs, mask=(offs_d < HEAD_DIM)[:, None], other=0.0)
        s = tl.dot(q, k, input_precision=PRECISION)
        if MASKED:
            visible = (cols[None, :] >= start[:, None]) & (cols[None, :] < end[:, None])
            if DENSE:
                seen = tl.load(
                    mask_base + mask_rows[:, None] + cols[None, :].to(tl.int64) * stride_mn,
                    mask=visible,
                    other=0,
                )
                visible = visible & (seen != 0)
            s = tl.where(visible, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * qk_scale)
        if MASKED:
            # A row that has seen nothing yet keeps m = -inf: subtract 0, not -inf, from -inf.
            m_used = tl.where(m_new == float("-inf"), 0.0, m_new)
        else:
            m_used = m_new
        p = tl.math.exp2(s * qk_scale - m_used[:, None])
        alpha = tl.math.exp2(m - m_used)
        l = l * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        if MASKED:
            if HEAD_DIM == BD:
                v = tl.load(v_ptrs, mask=inside[:, None], other=0.0)
            else:
                v = tl.load(v_ptrs, mask=inside[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)
        elif HEAD_DIM == BD:
            v = tl.load(v_ptrs)
        else:
            v = tl.load(v_ptrs, mask=(offs_d < HEAD_DIM)[None, :], other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        m = m_new
        k_ptrs += BN * stride_kn
        v_ptrs += BN * stride_vn
    return acc, l, m


@triton.jit(do_not_specialize=["tiles_m", "batch_heads", "q_len", "k_len", "window"])
def _attn_fwd_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, intervals_ptr, mask_ptr,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn, stride_ob, stride_oh, stride_om,
    stride_ib, stride_im, stride_mb, stride_mh, stride_mm, stride_mn,
    heads, group, tiles_m, batch_heads, q_len, k_len, window, scale,
    HEAD_DIM: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    KIND: tl.constexpr, WIDE: tl.constexpr, HEAD_MAJOR: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program: BM query rows of one head. `out` and `lse` are written once, no atomics."""
    LOG2E: tl.constexpr = 1.4426950408889634
    LN2: tl.constexpr = 0.6931471805599453
    pid = tl.program_id(0)
    if HEAD_MAJOR:
        tile = tiles_m - 1 - pid % tiles_m
        bh = pid // tiles_m
    else:
        # The longest tiles first, all heads of one tile beside each other: they share K and V.
        tile = tiles_m - 1 - pid // batch_heads
        bh = pid % batch_heads
    b = bh // heads
    h = bh % heads
    b64 = b.to(tl.int64)
    h64 = h.to(tl.int64)
    kv64 = (h // group).to(tl.int64)
    m0 = tile * BM
    offs_m = tl.arange(0, BM)
    offs_d = tl.arange(0, BD)
    rows = m0 + offs_m
    m64 = m0.to(tl.int64)

    q_base = q_ptr + b64 * stride_qb + h64 * stride_qh + m64 * stride_qm
    q_ptrs = q_base + tile_offsets(offs_m[:, None], stride_qm, WIDE) + offs_d[None, :]
    if HEAD_DIM == BD:
        q = tl.load(q_ptrs, mask=(rows < q_len)[:, None], other=0.0)
    else:
        q = tl.load(q_ptrs, mask=(rows < q_len)[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)
    k_base = k_ptr + b64 * stride_kb + kv64 * stride_kh
    v_base = v_ptr + b64 * stride_vb + kv64 * stride_vh
    mask_base = mask_ptr + b64 * stride_mb + h64 * stride_mh
    mask_rows = rows.to(tl.int64) * stride_mm

    start, end = row_interval(
        rows, b, q_len, k_len, window, intervals_ptr, stride_ib, stride_im, KIND
    )
    lo, full_lo, full_hi, hi = key_range(start, end, rows, m0, q_len, k_len, window, BM, BN, KIND)
    acc = tl.zeros([BM, BD], tl.float32)
    l = tl.zeros([BM], tl.float32)
    m = tl.full([BM], float("-inf"), tl.float32)
    qk_scale = scale * LOG2E
    if KIND == "window" or KIND == "intervals":
        acc, l, m = online_softmax(
            acc, l, m, q, k_base, v_base, stride_kn, stride_vn, 1, 1, lo, full_lo, k_len,
            start, end, mask_base, mask_rows, stride_mn, qk_scale,
            BN, BD, HEAD_DIM, True, False, WIDE, PRECISION, STAGES,
        )  # fmt: skip
    if KIND != "dense":
        acc, l, m = online_softmax(
            acc, l, m, q, k_base, v_base, stride_kn, stride_vn, 1, 1, full_lo, full_hi, k_len,
            start, end, mask_base, mask_rows, stride_mn, qk_scale,
            BN, BD, HEAD_DIM, False, False, WIDE, PRECISION, STAGES,
        )  # fmt: skip
    acc, l, m = online_softmax(
        acc, l, m, q, k_base, v_base, stride_kn, stride_vn, 1, 1,
        tl.maximum(full_lo, full_hi), hi, k_len,
        start, end, mask_base, mask_rows, stride_mn, qk_scale,
        BN, BD, HEAD_DIM, True, KIND == "dense", WIDE, PRECISION, STAGES,
    )  # fmt: skip

    seen = l > 0.0
    out = acc * tl.where(seen, 1.0 / tl.where(seen, l, 1.0), 0.0)[:, None]
    lse = tl.where(seen, m * LN2 + tl.log(tl.where(seen, l, 1.0)), float("-inf"))
    out_base = out_ptr + b64 * stride_ob + h64 * stride_oh + m64 * stride_om
    out_ptrs = out_base + tile_offsets(offs_m[:, None], stride_om, WIDE) + offs_d[None, :]
    keep = (rows < q_len)[:, None]
    if HEAD_DIM != BD:
        keep = keep & (offs_d < HEAD_DIM)[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=keep)
    tl.store(lse_ptr + bh.to(tl.int64) * q_len + rows, lse, mask=rows < q_len)
