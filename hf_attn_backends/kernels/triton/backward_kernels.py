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

With a softcap, S = c * tanh(T / c), dT = dS * (1 - tanh^2). With dropout, Z the kept weights over
1 - p: dV = (P * Z)^T dO and dP = (dO V^T) * Z; delta is still rowsum(dO * O). A sink is in lse; its
own gradient is -sum(exp(sink - lse) * delta), which the launch forms of lse and delta.
"""

import triton
import triton.language as tl

from hf_attn_backends.kernels.triton.memory_kernels import head_base, load_rows, store_rows
from hf_attn_backends.kernels.triton.score_kernels import kept, tanh
from hf_attn_backends.kernels.triton.visibility_kernels import (
    RUN_TIME,
    RUN_TIME_KEYS,
    key_range,
    query_range,
    row_interval,
    visible_tile,
)


@triton.jit
def row_lse2(lse_base, rows, q_len):
    """The rows' log-sum-exp in base 2; +inf for rows that saw nothing, so that P = 0 there."""
    LOG2E: tl.constexpr = 1.4426950408889634
    lse = tl.load(lse_base + rows, mask=rows < q_len, other=0.0) * LOG2E
    return tl.where(lse == float("-inf"), float("inf"), lse)


@triton.jit(do_not_specialize=["heads", "q_len"])
def _attn_bwd_delta_kernel(
    out_ptr, grad_ptr, delta_ptr, stride_ob, stride_oh, stride_om,
    stride_gb, stride_gh, stride_gm, heads, q_len,
    HEAD_DIM: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Delta `[B, H, M]` fp32: the row sums of dO * O."""
    tiles_m = tl.cdiv(q_len, BM)
    bh = tl.program_id(0) // tiles_m
    m0 = tl.program_id(0) % tiles_m * BM
    b = bh // heads
    h = bh % heads
    rows = m0 + tl.arange(0, BM)
    out_base = head_base(out_ptr, b, h, stride_ob, stride_oh, False)
    out = load_rows(out_base, b, h, m0, q_len, stride_om, BM, HEAD_DIM, BD, True, WIDE, False)
    grad_base = head_base(grad_ptr, b, h, stride_gb, stride_gh, False)
    grad = load_rows(grad_base, b, h, m0, q_len, stride_gm, BM, HEAD_DIM, BD, True, WIDE, False)
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    tl.store(delta_ptr + bh.to(tl.int64) * q_len + rows, delta, mask=rows < q_len)


@triton.jit
def accumulate_dkdv(
    dk, dv, k, v, q_base, grad_base, b, h, lse_base, delta_base, stride_qm, stride_gm, lo, hi,
    n0, q_len, k_len, window, intervals_ptr, stride_ib, stride_im,
    mask_base, stride_mm, stride_mn, qk_scale, cap_scale, seed_ptr, bh, dropout_p,
    BM: tl.constexpr, BN: tl.constexpr, HEAD_DIM: tl.constexpr, BD: tl.constexpr,
    VALUE_DIM: tl.constexpr, BV: tl.constexpr,
    KIND: tl.constexpr, MASKED: tl.constexpr, WIDE: tl.constexpr, TMA: tl.constexpr,
    SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add the query rows `[lo, hi)` of one head to the key tile's gradients.

    Rows beyond `q_len` are read as 0 and add 0, so they need no mask.
    """
    for m0 in tl.range(lo, hi, BM, num_stages=STAGES):
        rows = m0 + tl.arange(0, BM)
        q = load_rows(q_base, b, h, m0, q_len, stride_qm, BM, HEAD_DIM, BD, True, WIDE, TMA)
        st = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        if SOFTCAP:
            st = tanh(st * cap_scale, PRECISION == "ieee")
        pt = tl.math.exp2(st * qk_scale - row_lse2(lse_base, rows, q_len)[None, :])
        if MASKED:
            start, end = row_interval(
                rows, b, q_len, k_len, window, intervals_ptr, stride_ib, stride_im, KIND
            )
            offs_m = tl.arange(0, BM)[None, :]
            offs_n = tl.arange(0, BN)[:, None]
            seen = visible_tile(
                start[None, :], end[None, :], n0 + offs_n, mask_base, m0, n0, offs_m, offs_n,
                stride_mm, stride_mn, KIND == "dense",
            )  # fmt: skip
            pt = tl.where(seen, pt, 0.0)
        grad = load_rows(grad_base, b, h, m0, q_len, stride_gm, BM, VALUE_DIM, BV, True, WIDE, TMA)
        if DROPOUT:
            drawn_n = n0 + tl.arange(0, BN)[:, None]
            keep = kept(seed_ptr, bh, rows[None, :], drawn_n, dropout_p)
            weights = tl.where(keep, pt, 0.0)
        else:
            weights = pt
        dv = tl.dot(weights.to(grad.dtype), grad, dv, input_precision=PRECISION)
        dpt = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
        if DROPOUT:
            dpt = tl.where(keep, dpt * (1.0 / (1.0 - dropout_p)), 0.0)
        delta = tl.load(delta_base + rows, mask=rows < q_len, other=0.0)
        dst = pt * (dpt - delta[None, :])
        if SOFTCAP:
            dst = dst * (1.0 - st * st)
        dk = tl.dot(dst.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=RUN_TIME_KEYS)
def _attn_bwd_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, intervals_ptr, mask_ptr,
    seed_ptr,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn, stride_gb, stride_gh, stride_gm,
    stride_dkb, stride_dkh, stride_dkn, stride_dvb, stride_dvh, stride_dvn,
    stride_ib, stride_im, stride_mb, stride_mh, stride_mm, stride_mn,
    heads, kv_heads, tiles_n, batch_kv_heads, q_len, k_len, window, scale,
    softcap, dropout_p,
    HEAD_DIM: tl.constexpr, BD: tl.constexpr, VALUE_DIM: tl.constexpr, BV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
    KIND: tl.constexpr, WIDE: tl.constexpr, TMA: tl.constexpr, SCAN: tl.constexpr,
    SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program: BN keys of one key head; the whole group of query heads is summed in here.

    `q_ptr` and `grad_ptr` are tensor descriptors where `TMA` says so.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    pid = tl.program_id(0)
    # Causal: the first key tiles have the most rows to visit, so they start first.
    n0 = pid // batch_kv_heads * BN
    bh = pid % batch_kv_heads
    b = bh // kv_heads
    kv = bh % kv_heads
    group = heads // kv_heads
    k_base = head_base(k_ptr, b, kv, stride_kb, stride_kh, False)
    k = load_rows(k_base, b, kv, n0, k_len, stride_kn, BN, HEAD_DIM, BD, True, WIDE, False)
    v_base = head_base(v_ptr, b, kv, stride_vb, stride_vh, False)
    v = load_rows(v_base, b, kv, n0, k_len, stride_vn, BN, VALUE_DIM, BV, True, WIDE, False)
    dk = tl.zeros([BN, BD], tl.float32)
    dv = tl.zeros([BN, BV], tl.float32)
    qk_scale = scale * LOG2E
    cap_scale = scale
    if SOFTCAP:
        cap_scale = scale / softcap
        qk_scale = softcap * LOG2E
    lo, full_lo, full_hi, hi = query_range(
        n0, b, q_len, k_len, window, intervals_ptr, stride_ib, stride_im, BM, BN, KIND, SCAN
    )
    for g in range(0, group):
        h = kv * group + g
        q_base = head_base(q_ptr, b, h, stride_qb, stride_qh, TMA)
        grad_base = head_base(grad_ptr, b, h, stride_gb, stride_gh, TMA)
        mask_base = head_base(mask_ptr, b, h, stride_mb, stride_mh, False)
        row = (b.to(tl.int64) * heads + h) * q_len
        if KIND != "full" and KIND != "dense":
            dk, dv = accumulate_dkdv(
                dk, dv, k, v, q_base, grad_base, b, h, lse_ptr + row, delta_ptr + row,
                stride_qm, stride_gm, lo, full_lo, n0, q_len, k_len, window,
                intervals_ptr, stride_ib, stride_im, mask_base, stride_mm, stride_mn, qk_scale,
                cap_scale, seed_ptr, b * heads + h, dropout_p, BM, BN, HEAD_DIM, BD, VALUE_DIM, BV,
                KIND, True, WIDE, TMA, SOFTCAP, DROPOUT, PRECISION, STAGES,
            )  # fmt: skip
        if KIND != "dense" and KIND != "intervals":
            dk, dv = accumulate_dkdv(
                dk, dv, k, v, q_base, grad_base, b, h, lse_ptr + row, delta_ptr + row,
                stride_qm, stride_gm, full_lo, full_hi, n0, q_len, k_len, window,
                intervals_ptr, stride_ib, stride_im, mask_base, stride_mm, stride_mn, qk_scale,
                cap_scale, seed_ptr, b * heads + h, dropout_p, BM, BN, HEAD_DIM, BD, VALUE_DIM, BV,
                KIND, False, WIDE, TMA, SOFTCAP, DROPOUT, PRECISION, STAGES,
            )  # fmt: skip
        if KIND == "window" or KIND == "dense":
            dk, dv = accumulate_dkdv(
                dk, dv, k, v, q_base, grad_base, b, h, lse_ptr + row, delta_ptr + row,
                stride_qm, stride_gm, full_hi, hi, n0, q_len, k_len, window,
                intervals_ptr, stride_ib, stride_im, mask_base, stride_mm, stride_mn, qk_scale,
                cap_scale, seed_ptr, b * heads + h, dropout_p, BM, BN, HEAD_DIM, BD, VALUE_DIM, BV,
                KIND, True, WIDE, TMA, SOFTCAP, DROPOUT, PRECISION, STAGES,
            )  # fmt: skip
    dk_base = head_base(dk_ptr, b, kv, stride_dkb, stride_dkh, False)
    store_rows(dk_base, n0, k_len, stride_dkn, dk * scale, BN, HEAD_DIM, BD, WIDE)
    dv_base = head_base(dv_ptr, b, kv, stride_dvb, stride_dvh, False)
    if DROPOUT:
        dv = dv * (1.0 / (1.0 - dropout_p))
    store_rows(dv_base, n0, k_len, stride_dvn, dv, BN, VALUE_DIM, BV, WIDE)


@triton.jit
def accumulate_dq(
    dq, q, grad, lse2, delta, k_base, v_base, b, kv, stride_kn, stride_vn, lo, hi, k_len,
    start, end, mask_base, m0, stride_mm, stride_mn, qk_scale, cap_scale, seed_ptr, bh, dropout_p,
    BM: tl.constexpr, BN: tl.constexpr, HEAD_DIM: tl.constexpr, BD: tl.constexpr,
    VALUE_DIM: tl.constexpr, BV: tl.constexpr,
    MASKED: tl.constexpr, DENSE: tl.constexpr, WIDE: tl.constexpr, TMA: tl.constexpr,
    SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add the keys `[lo, hi)` to the query tile's gradient."""
    for n0 in tl.range(lo, hi, BN, num_stages=STAGES):
        k = load_rows(k_base, b, kv, n0, k_len, stride_kn, BN, HEAD_DIM, BD, MASKED, WIDE, TMA)
        v = load_rows(v_base, b, kv, n0, k_len, stride_vn, BN, VALUE_DIM, BV, MASKED, WIDE, TMA)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if SOFTCAP:
            s = tanh(s * cap_scale, PRECISION == "ieee")
        p = tl.math.exp2(s * qk_scale - lse2[:, None])
        if MASKED:
            offs_m = tl.arange(0, BM)[:, None]
            offs_n = tl.arange(0, BN)[None, :]
            seen = visible_tile(
                start[:, None], end[:, None], n0 + offs_n, mask_base, m0, n0, offs_m, offs_n,
                stride_mm, stride_mn, DENSE,
            )  # fmt: skip
            p = tl.where(seen, p, 0.0)
        dp = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
        if DROPOUT:
            drawn_m = m0 + tl.arange(0, BM)[:, None]
            drawn_n = n0 + tl.arange(0, BN)[None, :]
            keep = kept(seed_ptr, bh, drawn_m, drawn_n, dropout_p)
            dp = tl.where(keep, dp * (1.0 / (1.0 - dropout_p)), 0.0)
        ds = p * (dp - delta[:, None])
        if SOFTCAP:
            ds = ds * (1.0 - s * s)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=RUN_TIME)
def _attn_bwd_dq_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, delta_ptr, dq_ptr, intervals_ptr, mask_ptr,
    seed_ptr,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn, stride_gb, stride_gh, stride_gm,
    stride_dqb, stride_dqh, stride_dqm,
    stride_ib, stride_im, stride_mb, stride_mh, stride_mm, stride_mn,
    heads, group, tiles_m, batch_heads, q_len, k_len, window, scale,
    softcap, dropout_p,
    HEAD_DIM: tl.constexpr, BD: tl.constexpr, VALUE_DIM: tl.constexpr, BV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
    KIND: tl.constexpr, WIDE: tl.constexpr, TMA: tl.constexpr,
    SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program: BM query rows of one head.

    `k_ptr` and `v_ptr` are tensor descriptors where `TMA` says so.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    pid = tl.program_id(0)
    m0 = (tiles_m - 1 - pid // batch_heads) * BM
    bh = pid % batch_heads
    b = bh // heads
    h = bh % heads
    kv = h // group
    rows = m0 + tl.arange(0, BM)
    q_base = head_base(q_ptr, b, h, stride_qb, stride_qh, False)
    q = load_rows(q_base, b, h, m0, q_len, stride_qm, BM, HEAD_DIM, BD, True, WIDE, False)
    grad_base = head_base(grad_ptr, b, h, stride_gb, stride_gh, False)
    grad = load_rows(grad_base, b, h, m0, q_len, stride_gm, BM, VALUE_DIM, BV, True, WIDE, False)
    row = bh.to(tl.int64) * q_len
    lse2 = row_lse2(lse_ptr + row, rows, q_len)
    delta = tl.load(delta_ptr + row + rows, mask=rows < q_len, other=0.0)
    k_base = head_base(k_ptr, b, kv, stride_kb, stride_kh, TMA)
    v_base = head_base(v_ptr, b, kv, stride_vb, stride_vh, TMA)
    mask_base = head_base(mask_ptr, b, h, stride_mb, stride_mh, False)
    start, end = row_interval(
        rows, b, q_len, k_len, window, intervals_ptr, stride_ib, stride_im, KIND
    )
    lo, full_lo, full_hi, hi = key_range(start, end, rows, m0, q_len, k_len, window, BM, BN, KIND)
    qk_scale = scale * LOG2E
    cap_scale = scale
    if SOFTCAP:
        cap_scale = scale / softcap
        qk_scale = softcap * LOG2E
    dq = tl.zeros([BM, BD], tl.float32)
    if KIND == "window" or KIND == "intervals":
        dq = accumulate_dq(
            dq, q, grad, lse2, delta, k_base, v_base, b, kv, stride_kn, stride_vn, lo, full_lo,
            k_len, start, end, mask_base, m0, stride_mm, stride_mn, qk_scale,
            cap_scale, seed_ptr, bh, dropout_p, BM, BN, HEAD_DIM, BD, VALUE_DIM, BV,
            True, False, WIDE, TMA, SOFTCAP, DROPOUT, PRECISION, STAGES,
        )  # fmt: skip
    if KIND != "dense":
        dq = accumulate_dq(
            dq, q, grad, lse2, delta, k_base, v_base, b, kv, stride_kn, stride_vn,
            full_lo, full_hi, k_len, start, end, mask_base, m0, stride_mm, stride_mn, qk_scale,
            cap_scale, seed_ptr, bh, dropout_p, BM, BN, HEAD_DIM, BD, VALUE_DIM, BV,
            False, False, WIDE, TMA, SOFTCAP, DROPOUT, PRECISION, STAGES,
        )  # fmt: skip
    dq = accumulate_dq(
        dq, q, grad, lse2, delta, k_base, v_base, b, kv, stride_kn, stride_vn,
        tl.maximum(full_lo, full_hi), hi, k_len, start, end, mask_base, m0,
        stride_mm, stride_mn, qk_scale, cap_scale, seed_ptr, bh, dropout_p,
        BM, BN, HEAD_DIM, BD, VALUE_DIM, BV,
        True, KIND == "dense", WIDE, TMA, SOFTCAP, DROPOUT, PRECISION, STAGES,
    )  # fmt: skip
    dq_base = head_base(dq_ptr, b, h, stride_dqb, stride_dqh, False)
    store_rows(dq_base, m0, q_len, stride_dqm, dq * scale, BM, HEAD_DIM, BD, WIDE)
