"""Backward pass of FlashAttention-2 in Triton: two kernels, no atomics, deterministic.

Algorithm: Dao, "FlashAttention-2" (arXiv 2307.08691), algorithm 2, split in two so that every
gradient is written once by one program: `_attn_bwd_dkdv_kernel` owns a tile of keys and walks over
the query tiles of all heads of its group; `_attn_bwd_dq_kernel` owns a tile of queries and walks
over keys. With P = exp(S - lse), dP = dO V^T and delta = rowsum(dO * O):

    dV = P^T dO        dS = P * (dP - delta)        dK = scale * dS^T Q        dQ = scale * dS K

The transposed scores are formed as K Q^T, never by transposing a product: Triton 3.4 to 3.7.0
miscompiles a dot of a transposed 16-bit product on Hopper.

Numerics: as in the forward pass; P and dS are rounded to the input dtype before their products.
A row that saw nothing (lse = -inf) is given lse = +inf, so that its P, and every gradient, is 0.
"""

import triton
import triton.language as tl

from hf_attn_backends.kernels.triton.forward_kernels import tile_offsets
from hf_attn_backends.kernels.triton.visibility_kernels import (
    key_range,
    query_range,
    row_interval,
)


@triton.jit
def load_rows(base, offs, rows, limit, stride, HEAD_DIM: tl.constexpr, BD: tl.constexpr,
              GUARD: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """A tile `[rows, BD]`; rows beyond `limit` and padding columns read as 0."""
    offs_d = tl.arange(0, BD)
    ptrs = base + tile_offsets(offs[:, None], stride, WIDE) + offs_d[None, :]
    if GUARD:
        if HEAD_DIM == BD:
            return tl.load(ptrs, mask=(rows < limit)[:, None], other=0.0)
        return tl.load(ptrs, mask=(rows < limit)[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)
    if HEAD_DIM == BD:
        return tl.load(ptrs)
    return tl.load(ptrs, mask=(offs_d < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def store_rows(base, offs, rows, limit, stride, value, HEAD_DIM: tl.constexpr, BD: tl.constexpr,
               WIDE: tl.constexpr):  # fmt: skip
    """Write a tile `[rows, BD]` in the pointer's dtype, without its padding."""
    offs_d = tl.arange(0, BD)
    ptrs = base + tile_offsets(offs[:, None], stride, WIDE) + offs_d[None, :]
    keep = (rows < limit)[:, None]
    if HEAD_DIM != BD:
        keep = keep & (offs_d < HEAD_DIM)[None, :]
    tl.store(ptrs, value.to(base.dtype.element_ty), mask=keep)


@triton.jit
def row_lse2(lse_base, rows, q_len):
    """The rows' log-sum-exp in base 2; +inf for rows that saw nothing, so that P = 0 there."""
    LOG2E: tl.constexpr = 1.4426950408889634
    lse = tl.load(lse_base + rows, mask=rows < q_len, other=0.0) * LOG2E
    return tl.where(lse == float("-inf"), float("inf"), lse)


@triton.jit(do_not_specialize=["q_len"])
def _attn_bwd_delta_kernel(
    out_ptr, grad_ptr, delta_ptr, stride_ob, stride_oh, stride_om,
    stride_gb, stride_gh, stride_gm, heads, q_len,
    HEAD_DIM: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """delta `[B, H, M]` fp32: the row sums of dO * O."""
    tiles_m = tl.cdiv(q_len, BM)
    bh = tl.program_id(0) // tiles_m
    m0 = tl.program_id(0) % tiles_m * BM
    b = (bh // heads).to(tl.int64)
    h = (bh % heads).to(tl.int64)
    offs = tl.arange(0, BM)
    rows = m0 + offs
    m64 = m0.to(tl.int64)
    out = load_rows(out_ptr + b * stride_ob + h * stride_oh + m64 * stride_om, offs, rows, q_len,
                    stride_om, HEAD_DIM, BD, True, WIDE)  # fmt: skip
    grad = load_rows(grad_ptr + b * stride_gb + h * stride_gh + m64 * stride_gm, offs, rows, q_len,
                     stride_gm, HEAD_DIM, BD, True, WIDE)  # fmt: skip
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    tl.store(delta_ptr + bh.to(tl.int64) * q_len + rows, delta, mask=rows < q_len)


@triton.jit
def accumulate_dkdv(
    dk, dv, k, v, q_base, grad_base, lse_base, delta_base, stride_qm, stride_gm, lo, hi,
    n0, b, q_len, k_len, window, intervals_ptr, stride_ib, stride_im,
    mask_base, stride_mm, stride_mn, qk_scale,
    HEAD_DIM: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    KIND: tl.constexpr, MASKED: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Add the query rows `[lo, hi)` of one head to the key tile's gradients."""
    offs_m = tl.arange(0, BM)
    cols = n0 + tl.arange(0, BN)
    for m0 in tl.range(lo, hi, BM, num_stages=STAGES):
        rows = m0 + offs_m
        m64 = tl.cast(m0, tl.int64)
        q = load_rows(q_base + m64 * stride_qm, offs_m, rows, q_len, stride_qm,
                      HEAD_DIM, BD, MASKED, WIDE)  # fmt: skip
        st = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        pt = tl.math.exp2(st * qk_scale - row_lse2(lse_base, rows, q_len)[None, :])
        if MASKED:
            start, end = row_interval(
                rows, b, q_len, k_len, window, intervals_ptr, stride_ib, stride_im, KIND
            )
            visible = (cols[:, None] >= start[None, :]) & (cols[:, None] < end[None, :])
            if KIND == "dense":
                seen = tl.load(
                    mask_base
                    + rows[None, :].to(tl.int64) * stride_mm
                    + cols[:, None].to(tl.int64) * stride_mn,
                    mask=visible,
                    other=0,
                )
                visible = visible & (seen != 0)
            pt = tl.where(visible, pt, 0.0)
        grad = load_rows(grad_base + m64 * stride_gm, offs_m, rows, q_len, stride_gm,
                         HEAD_DIM, BD, MASKED, WIDE)  # fmt: skip
        dv = tl.dot(pt.to(grad.dtype), grad, dv, input_precision=PRECISION)
        dpt = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
        delta = tl.load(delta_base + rows, mask=rows < q_len, other=0.0)
        dst = pt * (dpt - delta[None, :])
        dk = tl.dot(dst.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["tiles_n", "batch_kv_heads", "q_len", "k_len", "window"])
def _attn_bwd_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, intervals_ptr, mask_ptr,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn, stride_gb, stride_gh, stride_gm,
    stride_dkb, stride_dkh, stride_dkn, stride_dvb, stride_dvh, stride_dvn,
    stride_ib, stride_im, stride_mb, stride_mh, stride_mm, stride_mn,
    heads, kv_heads, tiles_n, batch_kv_heads, q_len, k_len, window, scale,
    HEAD_DIM: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    KIND: tl.constexpr, WIDE: tl.constexpr, SCAN: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program: BN keys of one key head; the whole group of query heads is summed in here."""
    LOG2E: tl.constexpr = 1.4426950408889634
    pid = tl.program_id(0)
    # Causal: the first key tiles have the most rows to visit, so they start first.
    tile = pid // batch_kv_heads
    bh = pid % batch_kv_heads
    b = bh // kv_heads
    kv = bh % kv_heads
    group = heads // kv_heads
    b64 = b.to(tl.int64)
    kv64 = kv.to(tl.int64)
    n0 = tile * BN
    n64 = n0.to(tl.int64)
    offs_n = tl.arange(0, BN)
    cols = n0 + offs_n
    k = load_rows(k_ptr + b64 * stride_kb + kv64 * stride_kh + n64 * stride_kn, offs_n, cols, k_len,
                  stride_kn, HEAD_DIM, BD, True, WIDE)  # fmt: skip
    v = load_rows(v_ptr + b64 * stride_vb + kv64 * stride_vh + n64 * stride_vn, offs_n, cols, k_len,
                  stride_vn, HEAD_DIM, BD, True, WIDE)  # fmt: skip
    dk = tl.zeros([BN, BD], tl.float32)
    dv = tl.zeros([BN, BD], tl.float32)
    qk_scale = scale * LOG2E
    lo, full_lo, full_hi, hi = query_range(
        n0, b, q_len, k_len, window, intervals_ptr, stride_ib, stride_im, BM, BN, KIND, SCAN
    )
    for g in range(0, group):
        h = kv * group + g
        h64 = h.to(tl.int64)
        q_base = q_ptr + b64 * stride_qb + h64 * stride_qh
        grad_base = grad_ptr + b64 * stride_gb + h64 * stride_gh
        row = (b64 * heads + h64) * q_len
        mask_base = mask_ptr + b64 * stride_mb + h64 * stride_mh
        if KIND != "full" and KIND != "dense":
            dk, dv = accumulate_dkdv(
                dk, dv, k, v, q_base, grad_base, lse_ptr + row, delta_ptr + row,
                stride_qm, stride_gm, lo, full_lo, n0, b, q_len, k_len, window,
                intervals_ptr, stride_ib, stride_im, mask_base, stride_mm, stride_mn, qk_scale,
                HEAD_DIM, BD, BM, BN, KIND, True, WIDE, PRECISION, STAGES,
            )  # fmt: skip
        if KIND != "dense" and KIND != "intervals":
            dk, dv = accumulate_dkdv(
                dk, dv, k, v, q_base, grad_base, lse_ptr + row, delta_ptr + row,
                stride_qm, stride_gm, full_lo, full_hi, n0, b, q_len, k_len, window,
                intervals_ptr, stride_ib, stride_im, mask_base, stride_mm, stride_mn, qk_scale,
                HEAD_DIM, BD, BM, BN, KIND, False, WIDE, PRECISION, STAGES,
            )  # fmt: skip
        if KIND != "intervals":
            dk, dv = accumulate_dkdv(
                dk, dv, k, v, q_base, grad_base, lse_ptr + row, delta_ptr + row,
                stride_qm, stride_gm, tl.maximum(full_lo, full_hi), hi, n0, b, q_len, k_len, window,
                intervals_ptr, stride_ib, stride_im, mask_base, stride_mm, stride_mn, qk_scale,
                HEAD_DIM, BD, BM, BN, KIND, True, WIDE, PRECISION, STAGES,
            )  # fmt: skip
    dk = dk * scale
    store_rows(dk_ptr + b64 * stride_dkb + kv64 * stride_dkh + n64 * stride_dkn, offs_n, cols,
               k_len, stride_dkn, dk, HEAD_DIM, BD, WIDE)  # fmt: skip
    store_rows(dv_ptr + b64 * stride_dvb + kv64 * stride_dvh + n64 * stride_dvn, offs_n, cols,
               k_len, stride_dvn, dv, HEAD_DIM, BD, WIDE)  # fmt: skip


@triton.jit
def accumulate_dq(
    dq, q, grad, lse2, delta, k_base, v_base, stride_kn, stride_vn, lo, hi, k_len, start, end,
    mask_base, mask_rows, stride_mn, qk_scale,
    HEAD_DIM: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr,
    DENSE: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add the keys `[lo, hi)` to the query tile's gradient."""
    offs_n = tl.arange(0, BN)
    for n0 in tl.range(lo, hi, BN, num_stages=STAGES):
        cols = n0 + offs_n
        n64 = tl.cast(n0, tl.int64)
        k = load_rows(k_base + n64 * stride_kn, offs_n, cols, k_len, stride_kn,
                      HEAD_DIM, BD, MASKED, WIDE)  # fmt: skip
        v = load_rows(v_base + n64 * stride_vn, offs_n, cols, k_len, stride_vn,
                      HEAD_DIM, BD, MASKED, WIDE)  # fmt: skip
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        p = tl.math.exp2(s * qk_scale - lse2[:, None])
        if MASKED:
            visible = (cols[None, :] >= start[:, None]) & (cols[None, :] < end[:, None])
            if DENSE:
                seen = tl.load(
                    mask_base + mask_rows[:, None] + cols[None, :].to(tl.int64) * stride_mn,
                    mask=visible,
                    other=0,
                )
                visible = visible & (seen != 0)
            p = tl.where(visible, p, 0.0)
        dp = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=["tiles_m", "batch_heads", "q_len", "k_len", "window"])
def _attn_bwd_dq_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, delta_ptr, dq_ptr, intervals_ptr, mask_ptr,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn, stride_gb, stride_gh, stride_gm,
    stride_dqb, stride_dqh, stride_dqm,
    stride_ib, stride_im, stride_mb, stride_mh, stride_mm, stride_mn,
    heads, group, tiles_m, batch_heads, q_len, k_len, window, scale,
    HEAD_DIM: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    KIND: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program: BM query rows of one head."""
    LOG2E: tl.constexpr = 1.4426950408889634
    pid = tl.program_id(0)
    tile = tiles_m - 1 - pid // batch_heads
    bh = pid % batch_heads
    b = bh // heads
    h = bh % heads
    b64 = b.to(tl.int64)
    h64 = h.to(tl.int64)
    kv64 = (h // group).to(tl.int64)
    m0 = tile * BM
    m64 = m0.to(tl.int64)
    offs_m = tl.arange(0, BM)
    rows = m0 + offs_m
    q = load_rows(q_ptr + b64 * stride_qb + h64 * stride_qh + m64 * stride_qm, offs_m, rows, q_len,
                  stride_qm, HEAD_DIM, BD, True, WIDE)  # fmt: skip
    grad = load_rows(grad_ptr + b64 * stride_gb + h64 * stride_gh + m64 * stride_gm, offs_m, rows,
                     q_len, stride_gm, HEAD_DIM, BD, True, WIDE)  # fmt: skip
    row = bh.to(tl.int64) * q_len
    lse2 = row_lse2(lse_ptr + row, rows, q_len)
    delta = tl.load(delta_ptr + row + rows, mask=rows < q_len, other=0.0)
    k_base = k_ptr + b64 * stride_kb + kv64 * stride_kh
    v_base = v_ptr + b64 * stride_vb + kv64 * stride_vh
    mask_base = mask_ptr + b64 * stride_mb + h64 * stride_mh
    mask_rows = rows.to(tl.int64) * stride_mm
    start, end = row_interval(
        rows, b, q_len, k_len, window, intervals_ptr, stride_ib, stride_im, KIND
    )
    lo, full_lo, full_hi, hi = key_range(start, end, rows, m0, q_len, k_len, window, BM, BN, KIND)
    qk_scale = scale * LOG2E
    dq = tl.zeros([BM, BD], tl.float32)
    if KIND == "window" or KIND == "intervals":
        dq = accumulate_dq(
            dq, q, grad, lse2, delta, k_base, v_base, stride_kn, stride_vn, lo, full_lo, k_len,
            start, end, mask_base, mask_rows, stride_mn, qk_scale,
            HEAD_DIM, BD, BN, True, False, WIDE, PRECISION, STAGES,
        )  # fmt: skip
    if KIND != "dense":
        dq = accumulate_dq(
            dq, q, grad, lse2, delta, k_base, v_base, stride_kn, stride_vn, full_lo, full_hi, k_len,
            start, end, mask_base, mask_rows, stride_mn, qk_scale,
            HEAD_DIM, BD, BN, False, False, WIDE, PRECISION, STAGES,
        )  # fmt: skip
    dq = accumulate_dq(
        dq, q, grad, lse2, delta, k_base, v_base, stride_kn, stride_vn,
        tl.maximum(full_lo, full_hi), hi, k_len,
        start, end, mask_base, mask_rows, stride_mn, qk_scale,
        HEAD_DIM, BD, BN, True, KIND == "dense", WIDE, PRECISION, STAGES,
    )  # fmt: skip
    dq = dq * scale
    store_rows(dq_ptr + b64 * stride_dqb + h64 * stride_dqh + m64 * stride_dqm, offs_m, rows, q_len,
               stride_dqm, dq, HEAD_DIM, BD, WIDE)  # fmt: skip
