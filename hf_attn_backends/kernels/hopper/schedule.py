"""Which tile a program takes when, and which keys a tile needs.

Device functions shared by the partitions of the sm_90 kernels (all partitions of a program must
agree on every trip count), and the host's choice of section size.

Work is cut into tiles of 128 query rows of one head. Heads are taken in sections whose keys and
values fit the L2 cache. Under causality the tiles of a section differ in length: sections run from
short to long and from long to short in turn, ending with short ones, and programs take tiles back
and forth, so that lengths add up evenly (within 3 % of the mean, mostly within 1 %).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ROWS = gl.constexpr(128)  # query rows of a tile


@gluon.jit
def _place(turn):
    """The place of this program among those that take the tiles of one turn.

    Back and forth, and by half the programs further every second time.
    """
    programs = gl.num_programs(0)
    place = gl.program_id(0)
    if turn & 2:
        place += programs // 2
        if place >= programs:
            place -= programs
    if turn & 1:
        place = programs - 1 - place
    return place


@gluon.jit
def divide(number, divider):
    """`number // divisor` for `0 <= number < 2**31`; `divider` is `forward.inverse`."""
    return gl.umulhi(number.to(gl.int64) << 2, divider).to(gl.int32)


@gluon.jit
def tile_count(tiles, whole):
    """How many of `tiles` this program takes; `whole` is what every program takes at least."""
    if _place(whole) < tiles - whole * gl.num_programs(0):
        whole += 1
    return whole


@gluon.jit
def pick_tile(turn):
    """The tile that this program takes in its `turn`-th turn."""
    return turn * gl.num_programs(0) + _place(turn)


@gluon.jit
def tile_rows(tile, batch_heads, m_tiles, section, sections, heads, dividers):
    """Batch, head and first row of a tile.

    The last section begins with the last rows of all of its heads and ends with the first rows;
    the section before it goes the other way, and so on.

    Args:
        tile: Its number.
        batch_heads, m_tiles, section, sections, heads: As for the kernel.
        dividers: For `section * m_tiles`, `section`, the last section's heads, and `heads`.
    """
    by_section, by_width, by_last, by_heads = dividers
    index = divide(tile, by_section)
    rest = tile - index * section * m_tiles
    width = section
    if index == sections - 1:
        width = batch_heads - index * section
        by_width = by_last
    block = divide(rest, by_width)
    bh = index * section + rest - block * width
    if (sections - index) & 1:
        block = m_tiles - 1 - block
    batch = divide(bh, by_heads)
    return batch, bh - batch * heads, block * ROWS


@gluon.jit
def row_bounds(rows, batch, m_len, n_len, intervals_ptr, batch_stride):
    """First and one-past-last key of each row, clamped to the keys; rows behind the last: 0, 0."""
    base = intervals_ptr + batch.to(gl.int64) * batch_stride
    inside = rows < m_len
    lo = gl.maximum(gl.load(base + rows * 2, mask=inside, other=0), 0)
    hi = gl.minimum(gl.load(base + rows * 2 + 1, mask=inside, other=0), n_len)
    return lo, hi


@gluon.jit
def tile_edges(row0, m_len, n_len, window, KIND: gl.constexpr, BN: gl.constexpr):
    """Which keys a tile sees, where that follows from its first row.

    Returns:
        hi: One past the last key of the block that is computed first; block `i` begins at
            `hi - (i + 1) * BN`.
        full_lo, full_hi: Every row sees every key of `[full_lo, full_hi)`.
        lo: The first key that a row sees.
    """
    shift = n_len - m_len
    lo = 0
    full_lo = 0
    full_hi = n_len
    if KIND == 0:
        hi = gl.cdiv(n_len, BN) * BN
    else:
        hi = row0 + ROWS + shift
        full_hi = row0 + shift + 1
        if KIND == 2:
            lo = gl.maximum(row0 + shift - window + 1, 0)
            full_lo = gl.maximum(row0 + ROWS + shift - window, 0)
    return hi, full_lo, full_hi, lo


@gluon.jit
def interval_edges(first, last, behind, n_len):
    """What `tile_edges` returns, from the bounds of a tile's rows (`row_bounds`).

    Args:
        first, last: First and one-past-last key of each row.
        behind: Rows behind the last one, which do not count.
        n_len: Number of keys.
    """
    seen = last > first
    lo = gl.min(gl.where(seen, first, n_len), 0)
    hi = gl.max(gl.where(seen, last, 0), 0)
    full_lo = gl.max(gl.where(seen, first, gl.where(behind, 0, n_len)), 0)
    full_hi = gl.min(gl.where(seen, last, gl.where(behind, n_len, 0)), 0)
    return hi, full_lo, full_hi, lo


@gluon.jit
def block_count(hi, lo, BN: gl.constexpr):
    """Blocks of keys that cover `[lo, hi)`, at least one (a tile that sees nothing masks it)."""
    return gl.maximum(gl.cdiv(hi - lo, BN), 1)
