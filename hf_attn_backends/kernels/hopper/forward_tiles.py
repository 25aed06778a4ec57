"""Device code of the sm_90 forward on one tile of scores: masks, softmax, the way out.

Visibility kinds are numbered as in `schedule.tile_edges`: 0 full, 1 causal, 2 causal with a window,
3 intervals. `w` is the consumer (0 or 1), which owns rows `64 * w` to `64 * w + 63` of a tile.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from hf_attn_backends.kernels.hopper.gluon_compat import (
    fence_async_shared,
    tma_store,
    tma_store_wait,
)


_LEAST = gl.constexpr(-1e30)


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
def finish_rows(
    m, lanes, w: gl.constexpr, lse_ptr, batch, head, heads, row0, m_len, qk_scale,
    layout: gl.constexpr,
):  # fmt: skip
    """Store the log-sum-exp (natural); return what the output rows are to be multiplied by."""
    rows = row0 + w * 64 + gl.arange(0, 64, gl.SliceLayout(1, layout))
    total = gl.convert_layout(gl.sum(lanes, 1), gl.SliceLayout(1, layout))
    seen = total > 0.0
    lse = gl.where(seen, (m * qk_scale + gl.log2(total)) * 0.6931471805599453, float("-inf"))
    base = (batch * heads + head).to(gl.int64) * m_len
    gl.store(lse_ptr + base + rows, lse, mask=rows < m_len)
    tma_store_wait(0)  # the rows of the tile before have left shared memory
    return gl.where(seen, 1.0 / total, 0.0)


@gluon.jit
def store_rows(
    acc, factor, w: gl.constexpr, o_desc, o_s, batch, head, row0, layout: gl.constexpr
):
    """Multiply by `factor` and store the output rows."""
    acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, layout))[:, None]
    mine = o_s.index(w)
    mine.reshape([64, acc.shape[1]]).store(acc.to(o_desc.dtype))
    fence_async_shared()
    tma_store(o_desc, [batch, head, row0 + w * 64, 0], mine)


@gluon.jit
def use(number):
    """A use of a loop-carried number that Triton 3.6 sees.

    It takes one whose only use is the bound of an inner loop for dead, and for constant.
    """
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    x = gl.full([32 * gl.num_warps()], number, gl.int32, layout)
    gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def here(x):
    """Pin `x` to this place of the instruction stream (ptxas would hoist what depends on it)."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=False, pack=1
    )
