"""Forward pass of FlashAttention-2 in Triton.

Algorithm: Dao, "FlashAttention-2" (arXiv 2307.08691), algorithm 1. A program owns a tile of BM
query rows of one head and walks over the key tiles that the tile sees: first those that need a
mask on the left (window, intervals), then the unmasked ones, then the diagonal or ragged ones.

Numerics: scores, softmax and accumulators in fp32; the scale is folded with log2(e) so that each
weight costs one FMA and one exp2; the weights are rounded to the input dtype for the second
product, as in SDPA's FLASH. fp32 inputs use IEEE products, not TF32. Kept for the backward pass:
the log-sum-exp of each row, natural log, -inf for a row that sees nothing (whose output is 0).

SOFTCAP, SINKS and DROPOUT are compiled in where a call has them. A sink is a logit of the head's
own that joins the denominator and carries no value: the running softmax begins with it as if it
had seen it already, and the log-sum-exp includes it. Dropout leaves the denominator alone.
"""

import triton
import triton.language as tl

from hf_attn_backends.kernels.triton.memory_kernels import head_base, load_rows, store_rows
from hf_attn_backends.kernels.triton.score_kernels import kept, tanh
from hf_attn_backends.kernels.triton.visibility_kernels import (
    RUN_TIME,
    key_range,
    row_interval,
    visible_tile,
)


@triton.jit
def online_softmax(
    acc, denom, peak, q, k_base, v_base, b, kv, stride_kn, stride_vn, lo, hi, k_len,
    start, end, mask_base, m0, stride_mm, stride_mn, qk_scale, cap_scale, seed_ptr, bh, dropout_p,
    BM: tl.constexpr, BN: tl.constexpr, HEAD_DIM: tl.constexpr, BD: tl.constexpr,
    VALUE_DIM: tl.constexpr, BV: tl.constexpr,
    MASKED: tl.constexpr, DENSE: tl.constexpr, WIDE: tl.constexpr,
    SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Fold the keys `[lo, hi)` into the running output, denominator and maximum."""
    for n0 in tl.range(lo, hi, BN, num_stages=STAGES):
        k = load_rows(k_base, b, kv, n0, k_len, stride_kn, BN, HEAD_DIM, BD, MASKED, WIDE, False)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if SOFTCAP:
            s = tanh(s * cap_scale, PRECISION == "ieee")
        if MASKED:
            offs_m = tl.arange(0, BM)[:, None]
            offs_n = tl.arange(0, BN)[None, :]
            seen = visible_tile(
                start[:, None], end[:, None], n0 + offs_n, mask_base, m0, n0, offs_m, offs_n,
                stride_mm, stride_mn, DENSE,
            )  # fmt: skip
            s = tl.where(seen, s, float("-inf"))
        peak_new = tl.maximum(peak, tl.max(s, 1) * qk_scale)
        if MASKED:
            # A row that has seen nothing yet keeps -inf: subtract 0, not -inf, from -inf.
            shift = tl.where(peak_new == float("-inf"), 0.0, peak_new)
        else:
            shift = peak_new
        p = tl.math.exp2(s * qk_scale - shift[:, None])
        alpha = tl.math.exp2(peak - shift)
        denom = denom * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        if DROPOUT:
            drawn_m = m0 + tl.arange(0, BM)[:, None]
            drawn_n = n0 + tl.arange(0, BN)[None, :]
            p = tl.where(kept(seed_ptr, bh, drawn_m, drawn_n, dropout_p), p, 0.0)
        v = load_rows(v_base, b, kv, n0, k_len, stride_vn, BN, VALUE_DIM, BV, MASKED, WIDE, False)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        peak = peak_new
    return acc, denom, peak


@triton.jit(do_not_specialize=RUN_TIME)
def _attn_fwd_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, intervals_ptr, mask_ptr, sinks_ptr, seed_ptr,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn, stride_ob, stride_oh, stride_om,
    stride_ib, stride_im, stride_mb, stride_mh, stride_mm, stride_mn,
    heads, group, tiles_m, batch_heads, q_len, k_len, window, scale,
    softcap, dropout_p,
    HEAD_DIM: tl.constexpr, BD: tl.constexpr, VALUE_DIM: tl.constexpr, BV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
    KIND: tl.constexpr, WIDE: tl.constexpr, HEAD_MAJOR: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, DROPOUT: tl.constexpr,
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
    kv = h // group
    m0 = tile * BM
    rows = m0 + tl.arange(0, BM)
    q_base = head_base(q_ptr, b, h, stride_qb, stride_qh, False)
    q = load_rows(q_base, b, h, m0, q_len, stride_qm, BM, HEAD_DIM, BD, True, WIDE, False)
    k_base = head_base(k_ptr, b, kv, stride_kb, stride_kh, False)
    v_base = head_base(v_ptr, b, kv, stride_vb, stride_vh, False)
    mask_base = head_base(mask_ptr, b, h, stride_mb, stride_mh, False)

    start, end = row_interval(
        rows, b, q_len, k_len, window, intervals_ptr, stride_ib, stride_im, KIND
    )
    lo, full_lo, full_hi, hi = key_range(start, end, rows, m0, q_len, k_len, window, BM, BN, KIND)
    acc = tl.zeros([BM, BV], tl.float32)
    if SINKS:
        denom = tl.full([BM], 1.0, tl.float32)
        peak = denom * (tl.load(sinks_ptr + h).to(tl.float32) * LOG2E)
    else:
        denom = tl.zeros([BM], tl.float32)
        peak = tl.full([BM], float("-inf"), tl.float32)
    qk_scale = scale * LOG2E
    cap_scale = scale
    if SOFTCAP:
        cap_scale = scale / softcap
        qk_scale = softcap * LOG2E
    if KIND == "window" or KIND == "intervals":
        acc, denom, peak = online_softmax(
            acc, denom, peak, q, k_base, v_base, b, kv, stride_kn, stride_vn, lo, full_lo, k_len,
            start, end, mask_base, m0, stride_mm, stride_mn, qk_scale, cap_scale,
            seed_ptr, bh, dropout_p,
            BM, BN, HEAD_DIM, BD, VALUE_DIM, BV, True, False, WIDE, SOFTCAP, DROPOUT,
            PRECISION, STAGES,
        )  # fmt: skip
    if KIND != "dense":
        acc, denom, peak = online_softmax(
            acc, denom, peak, q, k_base, v_base, b, kv, stride_kn, stride_vn, full_lo, full_hi,
            k_len, start, end, mask_base, m0, stride_mm, stride_mn, qk_scale, cap_scale,
            seed_ptr, bh, dropout_p,
            BM, BN, HEAD_DIM, BD, VALUE_DIM, BV, False, False, WIDE, SOFTCAP, DROPOUT,
            PRECISION, STAGES,
        )  # fmt: skip
    acc, denom, peak = online_softmax(
        acc, denom, peak, q, k_base, v_base, b, kv, stride_kn, stride_vn,
        tl.maximum(full_lo, full_hi), hi, k_len,
        start, end, mask_base, m0, stride_mm, stride_mn, qk_scale, cap_scale,
        seed_ptr, bh, dropout_p,
        BM, BN, HEAD_DIM, BD, VALUE_DIM, BV, True, KIND == "dense", WIDE, SOFTCAP, DROPOUT,
        PRECISION, STAGES,
    )  # fmt: skip

    some = denom > 0.0
    total = tl.where(some, denom, 1.0)
    out = acc * tl.where(some, 1.0 / total, 0.0)[:, None]
    if DROPOUT:
        out = out * (1.0 / (1.0 - dropout_p))
    lse = tl.where(some, peak * LN2 + tl.log(total), float("-inf"))
    out_base = head_base(out_ptr, b, h, stride_ob, stride_oh, False)
    store_rows(out_base, m0, q_len, stride_om, out, BM, VALUE_DIM, BV, WIDE)
    tl.store(lse_ptr + bh.to(tl.int64) * q_len + rows, lse, mask=rows < q_len)
