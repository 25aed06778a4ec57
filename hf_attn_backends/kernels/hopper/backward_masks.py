"""Masks of the sm_90 backward, on transposed weights `[keys, rows]` in registers."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Visibility kinds, as everywhere in this package.
FULL = gl.constexpr(0)
CAUSAL = gl.constexpr(1)
WINDOW = gl.constexpr(2)
INTERVALS = gl.constexpr(3)

BN = gl.constexpr(128)  # keys of a program


@gluon.jit
def _band(p, first, window, WINDOWED: gl.constexpr):
    """Zero weights `[keys, rows]` outside the band: key `first + a` is seen by row `b` iff
    `first + a <= b`, and with a window iff also `first + a + window > b`.

    The columns are split into (group, lane, pair) so that each thread compares one number for each
    of its two rows with constants; column numbers in registers would spill.
    """
    keys: gl.constexpr = p.shape[0]
    rows: gl.constexpr = p.shape[1]
    x = p.reshape([keys, rows // 8, 4, 2])
    whole: gl.constexpr = x.type.layout
    no_pair: gl.constexpr = gl.SliceLayout(3, whole)
    key = gl.arange(0, keys, gl.SliceLayout(1, gl.SliceLayout(2, no_pair)))
    lane = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, no_pair)))
    part = gl.arange(0, rows // 8, gl.SliceLayout(0, gl.SliceLayout(2, no_pair)))
    pair = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, whole))))
    limit = (first + key)[:, None, None, None] - 2 * lane[None, None, :, None]
    column = 8 * part[None, :, None, None] + pair[None, None, None, :]
    seen = limit <= column
    if WINDOWED:
        seen = seen & (limit + window > column)
    x = gl.where(seen, x, 0.0)
    return gl.convert_layout(x.reshape([keys, rows]), p.type.layout, assert_trivial=True)


@gluon.jit
def masked(p, stats, ragged, row, key, n_last, n_len, shift, window, KIND: gl.constexpr):
    """Zero the weights of keys that rows do not see; no work where the whole tile is seen.

    `row` and `key` are the tile's first row and this consumer's first key, `n_last` the program's
    last key; `ragged` says for intervals that some row does not see every key.
    """
    layout: gl.constexpr = p.type.layout
    if KIND == FULL:
        if n_last >= n_len:
            keys = key + gl.arange(0, p.shape[0], gl.SliceLayout(1, layout))
            p = gl.where(keys[:, None] < n_len, p, 0.0)
    elif KIND == CAUSAL:
        # Keys behind the last one are later than every row, so the band hides them too.
        if n_last > row + shift:
            p = _band(p, key - row - shift, window, False)
    elif KIND == WINDOW:
        last_row = row + p.shape[1] - 1
        if (n_last > row + shift) | (n_last - BN + window < last_row + 1 + shift):
            p = _band(p, key - row - shift, window, True)
    else:
        if ragged:
            keys = key + gl.arange(0, p.shape[0], gl.SliceLayout(1, layout))
            first = stats.slice(2, 1, 0).load(layout).to(gl.int32, bitcast=True)
            p = gl.where(keys[:, None] >= first, p, 0.0)
            end = stats.slice(3, 1, 0).load(layout).to(gl.int32, bitcast=True)
            p = gl.where(keys[:, None] < end, p, 0.0)
    return p
