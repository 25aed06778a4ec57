"""Device functions: which keys a row sees, which tiles a program visits.

The five kinds of `kernels.visibility` come down to one rule for the kernels: row `i` sees the keys
`start_i <= j < end_i` (and, for `dense`, only those where the mask says so). From it follow the
tiles that have to be visited at all, and those of them that need no mask because every row of the
tile sees every key of it.

`shift = k_len - q_len` lines the last query up with the last key.
"""

import triton
import triton.language as tl

# Arguments that no code is generated for: lengths, counts, and the strides of masks but the last.
# Every other stride is specialised, because its divisibility by 16 makes the accesses wide.
RUN_TIME = (
    "heads", "group", "tiles_m", "batch_heads", "q_len", "k_len", "window",
    "stride_ib", "stride_im", "stride_mb", "stride_mh", "stride_mm",
)  # fmt: skip
RUN_TIME_KEYS = (
    "heads", "kv_heads", "tiles_n", "batch_kv_heads", "q_len", "k_len", "window",
    "stride_ib", "stride_im", "stride_mb", "stride_mh", "stride_mm",
)  # fmt: skip


@triton.jit
def row_interval(
    rows, batch, q_len, k_len, window, intervals_ptr, stride_ib, stride_im, KIND: tl.constexpr
):
    """First and one-past-last visible key of each row; rows beyond `q_len` see nothing."""
    inside = rows < q_len
    if KIND == "intervals":
        base = intervals_ptr + batch.to(tl.int64) * stride_ib
        offsets = rows.to(tl.int64) * stride_im
        start = tl.maximum(tl.load(base + offsets, mask=inside, other=0), 0)
        end = tl.minimum(tl.load(base + offsets + 1, mask=inside, other=0), k_len)
    else:
        start = rows * 0
        end = start + k_len
        if KIND == "causal" or KIND == "window":
            end = tl.minimum(rows + (k_len - q_len) + 1, k_len)
        if KIND == "window":
            start = tl.maximum(rows + (k_len - q_len) + 1 - window, 0)
        end = tl.where(inside, end, 0)
    return start, end


@triton.jit
def visible_tile(
    start, end, cols, mask_base, m0, n0, local_rows, local_cols, stride_mm, stride_mn,
    DENSE: tl.constexpr,
):  # fmt: skip
    """Which pairs of the tile at `(m0, n0)` are seen; the index tiles broadcast to its shape.

    The mask is read at a scalar base plus 32-bit offsets: a tile of 64-bit pointers would spill.
    """
    seen = (cols >= start) & (cols < end)
    if DENSE:
        base = mask_base + tl.cast(m0, tl.int64) * stride_mm + tl.cast(n0, tl.int64) * stride_mn
        offsets = local_rows * stride_mm + local_cols * stride_mn
        seen = seen & (tl.load(base + offsets, mask=seen, other=0) != 0)
    return seen


@triton.jit
def key_range(
    start, end, rows, m0, q_len, k_len, window, BM: tl.constexpr, BN: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """The keys that a tile of rows visits.

    Returns:
        (lo, full_lo, full_hi, hi): tiles of `[lo, full_lo)` and `[full_hi, hi)` need a mask, those
        of `[full_lo, full_hi)` do not. All but `hi` are multiples of `BN`.
    """
    shift = k_len - q_len
    last = tl.minimum(m0 + BM, q_len) - 1
    if KIND == "intervals":
        some = (end > start) & (rows < q_len)
        lo = tl.min(tl.where(some, start, k_len), 0)
        hi = tl.max(tl.where(some, end, 0), 0)
        full_lo = tl.max(tl.where(rows < q_len, start, 0), 0)
        full_hi = tl.min(tl.where(rows < q_len, end, k_len), 0)
    elif KIND == "window":
        lo = tl.maximum(m0 + shift + 1 - window, 0)
        full_lo = tl.maximum(last + shift + 1 - window, 0)
        full_hi = m0 + shift + 1
        hi = tl.minimum(last + shift + 1, k_len)
    elif KIND == "causal":
        lo = m0 * 0
        full_lo = lo
        full_hi = m0 + shift + 1
        hi = tl.minimum(last + shift + 1, k_len)
    elif KIND == "full":
        lo = m0 * 0
        full_lo = lo
        full_hi = k_len
        hi = k_len
    else:
        lo = m0 * 0
        full_lo = lo
        full_hi = lo
        hi = k_len
    # Division truncates towards zero here: clamp first.
    hi = tl.maximum(hi, 0)
    lo = tl.minimum(lo, hi) // BN * BN
    full_lo = tl.maximum(tl.cdiv(tl.maximum(full_lo, 0), BN) * BN, lo)
    full_hi = tl.maximum(tl.minimum(full_hi, k_len), 0) // BN * BN
    full_hi = tl.maximum(full_hi, full_lo)
    return lo, tl.minimum(full_lo, tl.cdiv(hi, BN) * BN), tl.minimum(full_hi, hi // BN * BN), hi


@triton.jit
def query_range(
    n0, batch, q_len, k_len, window, intervals_ptr, stride_ib, stride_im,
    BM: tl.constexpr, BN: tl.constexpr, KIND: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """The rows that see some key of the tile at `n0`.

    For intervals this is the hull of the rows that overlap the tile, found by reading them all
    once (`SCAN` at a time): two int32 a row, nothing beside the tile's own work.

    Returns:
        (lo, full_lo, full_hi, hi) of rows, with the meaning of `key_range`; `lo` and `full_lo` are
        multiples of `BM`.
    """
    shift = k_len - q_len
    last = tl.minimum(n0 + BN, k_len) - 1
    lo = n0 * 0
    full_lo = lo
    full_hi = lo
    hi = lo + q_len
    if KIND == "full":
        full_hi = hi
    elif KIND == "causal":
        lo = n0 - shift
        full_lo = last - shift
        full_hi = hi
    elif KIND == "window":
        lo = n0 - shift
        full_lo = last - shift
        full_hi = tl.minimum(n0 + window - shift, q_len)
        hi = tl.minimum(last + window - shift, q_len)
    elif KIND == "intervals":
        first = q_len
        end_row = 0
        for m0 in range(0, q_len, SCAN):
            rows = m0 + tl.arange(0, SCAN)
            start, end = row_interval(
                rows, batch, q_len, k_len, window, intervals_ptr, stride_ib, stride_im, KIND
            )
            sees = (start <= last) & (end > n0) & (end > start)
            first = tl.minimum(first, tl.min(tl.where(sees, rows, q_len), 0))
            end_row = tl.maximum(end_row, tl.max(tl.where(sees, rows + 1, 0), 0))
        lo = first
        hi = end_row
        full_lo = hi
        full_hi = hi
    hi = tl.maximum(hi, 0)
    lo = tl.minimum(tl.maximum(lo, 0), hi) // BM * BM
    full_lo = tl.maximum(tl.cdiv(tl.maximum(full_lo, 0), BM) * BM, lo)
    full_lo = tl.minimum(full_lo, tl.cdiv(hi, BM) * BM)
    # The last rows of the last tile lie beyond q_len: they read as 0 and add 0, without a mask.
    full_hi = tl.where(full_hi >= q_len, hi, tl.maximum(full_hi, 0) // BM * BM)
    return lo, full_lo, tl.maximum(full_hi, full_lo), hi
