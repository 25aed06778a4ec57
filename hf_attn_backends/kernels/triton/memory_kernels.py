"""Device functions: tiles in and out of global memory.

Two ways in: pointers with asynchronous copies (any GPU, any strides), and tensor descriptors
(`TMA`, sm_90 and newer), which take no registers for addresses and read as 0 whatever lies
outside the tensor. The backward kernels spill without them on sm_90; the forward kernel is faster
with pointers. Below sm_90 Triton turns descriptors into unpipelined pointer code.
"""

import triton
import triton.language as tl


@triton.jit
def tile_offsets(indices, stride, WIDE: tl.constexpr):
    """Element offsets inside a tile; int64 only where a tile spans more than 2^31 elements."""
    # One return: a second one behind a constexpr branch would have to have the first one's type.
    if WIDE:
        offsets = indices.to(tl.int64) * stride
    else:
        offsets = indices * stride
    return offsets


@triton.jit
def head_base(source, b, h, stride_b, stride_h, TMA: tl.constexpr):
    """Where one head of a `[B, H, L, D]` tensor begins; a descriptor stays what it is."""
    if TMA:
        base = source
    else:
        base = source + b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h
    return base


@triton.jit
def load_rows(
    base, b, h, first, limit, stride,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BD: tl.constexpr,
    GUARD: tl.constexpr, WIDE: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Rows `[first, first + ROWS)` of head `(b, h)` as a tile `[ROWS, BD]`.

    Padding columns read as 0, and so do rows beyond `limit` where `GUARD` (or `TMA`) says so.
    """
    if TMA:
        tile = tl.reshape(base.load([b, h, first, 0]), [ROWS, BD])
    else:
        offs = tl.arange(0, ROWS)
        offs_d = tl.arange(0, BD)
        # A scalar base and 32-bit offsets: carried tiles of pointers would cost registers.
        ptrs = base + tl.cast(first, tl.int64) * stride
        ptrs = ptrs + tile_offsets(offs[:, None], stride, WIDE) + offs_d[None, :]
        if GUARD:
            inside = (first + offs < limit)[:, None]
            if HEAD_DIM != BD:
                inside = inside & (offs_d < HEAD_DIM)[None, :]
            tile = tl.load(ptrs, mask=inside, other=0.0)
        elif HEAD_DIM != BD:
            tile = tl.load(ptrs, mask=(offs_d < HEAD_DIM)[None, :], other=0.0)
        else:
            tile = tl.load(ptrs)
    return tile


@triton.jit
def store_rows(
    base, first, limit, stride, value,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BD: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Write a tile `[ROWS, BD]` in the pointer's dtype, without its padding."""
    offs = tl.arange(0, ROWS)
    offs_d = tl.arange(0, BD)
    ptrs = base + tl.cast(first, tl.int64) * stride
    ptrs = ptrs + tile_offsets(offs[:, None], stride, WIDE) + offs_d[None, :]
    keep = (first + offs < limit)[:, None]
    if HEAD_DIM != BD:
        keep = keep & (offs_d < HEAD_DIM)[None, :]
    tl.store(ptrs, value.to(base.dtype.element_ty), mask=keep)
