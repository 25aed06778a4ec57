"""Device code of the sm_90 forward on one tile of scores: masks, softmax, the way out.

Visibility kinds are numbered as in `schedule.tile_edges`: 0 full, 1 causal, 2 causal with a window,
3 intervals. `w` is the consumer (0 or 1), which owns rows `64 * w` to `64 * w + 63` of a tile.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from hf_attn_backends.kernels.hopper.forward_producer import read_rows
from hf_attn_backends.kernels.hopper.gluon_compat import (
    fence_async_shared,
    tma_store,
    tma_store_wait,
)

_LEAST = gl.constexpr(-(2.0**100))  # times the scale it is exact


def _rescale_code(count: int) -> str:
    """PTX that multiplies `count` numbers of a lane unless no lane of the warp has a factor.

    An accumulator's lane holds two rows: numbers 0 and 1 of the first, 2 and 3 of the second, and
    so on.
    """
    moves = " ".join(f"mov.f32 ${i}, ${count + i};" for i in range(count))
    products = " ".join(f"mul.f32 ${i}, ${i}, ${2 * count + i};" for i in range(count))
    return (
        f"{{ .reg .pred any; {moves} setp.neu.f32 any, ${2 * count}, 0f3F800000; "
        f"@!any setp.neu.f32 any, ${2 * count + 2}, 0f3F800000; "
        f"vote.sync.any.pred any, any, 0xffffffff; @!any bra.uni SAME; {products} SAME: }}"
    )


_RESCALE_64 = gl.constexpr(_rescale_code(64))
_RESCALE_32 = gl.constexpr(_rescale_code(32))
_CONSTRAINTS_64 = gl.constexpr(",".join(["=&f"] * 64 + ["f"] * 128))
_CONSTRAINTS_32 = gl.constexpr(",".join(["=&f"] * 32 + ["f"] * 64))


@gluon.jit
def lane_sum(p):
    """Sum what one lane holds of each row: `[64, N]` -> `[64, 4]`, no shuffles."""
    x = p.reshape([p.shape[0], p.shape[1] // 8, 4, 2])
    return gl.sum(gl.sum(x, 3), 1)


@gluon.jit
def halves(s):
    """The left and the right half of each row: `[64, N]` -> twice `[64, N / 2]`, no moves."""
    return s.reshape([s.shape[0], 2, s.shape[1] // 2]).permute((0, 2, 1)).split()


@gluon.jit
def joined(left, right):
    """Put `halves` together again."""
    both = gl.join(left, right).permute((0, 2, 1))
    return both.reshape([left.shape[0], 2 * left.shape[1]])


@gluon.jit
def weights(s, base, qk_scale):
    """`2 ** (s * qk_scale - base)` for each row's `base`."""
    base = gl.convert_layout(base, gl.SliceLayout(1, s.type.layout))
    return gl.exp2(s * qk_scale - base[:, None])


@gluon.jit
def mask_first(
    s, w: gl.constexpr, row0, start, n_len, shift, window, full_lo, full_hi, lo_row, hi_row,
    KIND: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Hide keys in the block that is computed first; `start` is its first key."""
    rows = gl.arange(0, 64, gl.SliceLayout(1, layout))
    cols = gl.arange(0, s.shape[1], gl.SliceLayout(0, layout))
    if KIND == 0:
        if start + s.shape[1] > n_len:
            s = gl.where((cols < n_len - start)[None, :], s, float("-inf"))
    else:
        if KIND != 3:  # anchored at the diagonal: start == row0 + shift
            s = gl.where(cols[None, :] <= rows[:, None] + w * 64, s, float("-inf"))
        s = mask_block(
            s, w, row0, start, shift, window, full_lo, full_hi, lo_row, hi_row, KIND, layout
        )
    return s


@gluon.jit
def mask_block(
    s, w: gl.constexpr, row0, start, shift, window, full_lo, full_hi, lo_row, hi_row,
    KIND: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Hide keys in a later block; most blocks have nothing to hide and skip it."""
    if KIND == 3:
        cols = gl.arange(0, s.shape[1], gl.SliceLayout(0, layout))
        if start < full_lo:
            s = gl.where(cols[None, :] >= (lo_row - start)[:, None], s, float("-inf"))
        if start + s.shape[1] > full_hi:
            s = gl.where(cols[None, :] < (hi_row - start)[:, None], s, float("-inf"))
    else:
        if start < full_lo:
            s = mask_left(s, w, row0, start, shift, window, KIND, layout)
    return s


@gluon.jit
def mask_left(
    s, w: gl.constexpr, row0, start, shift, window, KIND: gl.constexpr, layout: gl.constexpr
):
    """Hide keys before the first one, and those that the window has left behind."""
    cols = gl.arange(0, s.shape[1], gl.SliceLayout(0, layout))
    if KIND == 2:
        rows = gl.arange(0, 64, gl.SliceLayout(1, layout))
        least = gl.maximum(rows + (row0 + w * 64 + shift - window + 1 - start), -start)
        return gl.where(cols[None, :] >= least[:, None], s, float("-inf"))
    return gl.where((cols >= -start)[None, :], s, float("-inf"))


@gluon.jit
def first_softmax(s, qk_scale):
    """Row maximum and weights of a tile's first block.

    The maximum is at least `_LEAST`, so that rows that see nothing here give weights of 0, not NaN.
    """
    m = gl.maximum(gl.max(s, 1), _LEAST)
    p = gl.exp2(s * qk_scale - (m * qk_scale)[:, None])
    return m, p


@gluon.jit
def rescale(acc, alpha):
    """Multiply rows of the accumulator by `alpha`; a warp whose factors are all 1 skips it."""
    factors = alpha[:, None] + gl.zeros_like(acc)
    if acc.shape[1] == 128:
        return gl.inline_asm_elementwise(
            _RESCALE_64, _CONSTRAINTS_64, [acc, factors], dtype=gl.float32, is_pure=False, pack=64
        )
    return gl.inline_asm_elementwise(
        _RESCALE_32, _CONSTRAINTS_32, [acc, factors], dtype=gl.float32, is_pure=False, pack=32
    )


@gluon.jit
def finish_rows(m, lanes, qk_scale, layout: gl.constexpr):
    """The log-sum-exp (natural) of each row, and what its output is to be multiplied by."""
    total = gl.convert_layout(gl.sum(lanes, 1), gl.SliceLayout(1, layout))
    seen = total > 0.0
    lse = gl.where(seen, (m * qk_scale + gl.log2(total)) * 0.6931471805599453, float("-inf"))
    tma_store_wait(0)  # the rows of the tile before have left shared memory
    return lse, gl.where(seen, 1.0 / total, 0.0)


@gluon.jit
def store_rows(
    acc, factor, lse, w: gl.constexpr, o_desc, o_s, lse_ptr, tile_s, heads, m_len,
    layout: gl.constexpr,
):  # fmt: skip
    """Multiply by `factor` and store a tile's output rows, then the log-sum-exp."""
    batch, head, row0 = read_rows(tile_s)
    acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, layout))[:, None]
    mine = o_s.index(w)
    mine.reshape([64, acc.shape[1]]).store(acc.to(o_desc.dtype))
    fence_async_shared()
    tma_store(o_desc, [batch, head, row0 + w * 64, 0], mine)
    # Behind the fence, which waits for every store.
    rows = row0 + w * 64 + gl.arange(0, 64, lse.type.layout)
    base = (batch * heads + head).to(gl.int64) * m_len
    gl.store(lse_ptr + base + rows, lse, mask=rows < m_len)
