"""The device-side schedule, run as plain Python on integers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hf_attn_backends.kernels.hopper import schedule
from hf_attn_backends.kernels.hopper.forward import inverse, section_heads

BN = 128
KIND = {"full": 0, "causal": 1, "window": 2}


@pytest.fixture
def program(monkeypatch):
    """Stands in for `gl`; set `.id` and `.count`."""
    stub = SimpleNamespace(id=0, count=1)
    stub.program_id = lambda axis: stub.id
    stub.num_programs = lambda axis: stub.count
    stub.minimum, stub.maximum = min, max
    stub.cdiv = lambda a, b: int((a + b - 1) / b)  # towards zero, as on the device
    monkeypatch.setattr(schedule, "gl", stub)
    monkeypatch.setattr(schedule, "ROWS", 128)
    monkeypatch.setattr(schedule, "_place", schedule._place.fn)
    monkeypatch.setattr(schedule, "divide", lambda number, by: (number << 2) * by >> 64)
    return stub


class Number(int):
    """An integer with a tensor's cast."""

    def to(self, _dtype):
        return self


@pytest.mark.parametrize("divisor", [1, 2, 3, 7, 31, 128, 1000, 2**20 - 1, 2**31 - 1])
def test_division_by_multiplication_is_exact(monkeypatch, divisor):
    stub = SimpleNamespace(int64=None, int32=None, umulhi=lambda a, b: Number(a * b >> 64))
    monkeypatch.setattr(schedule, "gl", stub)
    by = inverse(divisor)
    assert 2**31 <= by < 2**63  # Triton takes it for an int64, whatever the divisor
    near = {n for k in (1, 2, 1000, 2**31 // divisor) for n in (k * divisor - 1, k * divisor)}
    for number in sorted(near | {0, 1, 2**31 - 1}):
        if number < 2**31:
            assert schedule.divide.fn(Number(number), by) == number // divisor


def rows_of(tile, batch_heads, m_tiles, section, heads):
    """`schedule.tile_rows` with what the host computes for it."""
    sections = -(-batch_heads // section)
    last = batch_heads - (sections - 1) * section
    by = tuple(map(inverse, (section * m_tiles, section, last, heads)))
    return schedule.tile_rows.fn(tile, batch_heads, m_tiles, section, sections, heads, by)


def tiles_of(program, programs, tiles):
    taken = []
    program.count = programs
    for program.id in range(programs):
        turns = schedule.tile_count.fn(tiles, tiles // programs)
        taken.append([schedule.pick_tile.fn(turn) for turn in range(turns)])
    return taken


@pytest.mark.parametrize(("programs", "tiles"), [(1, 1), (132, 132), (132, 4096), (7, 50), (5, 12)])
def test_every_tile_is_taken_once(program, programs, tiles):
    taken = tiles_of(program, programs, tiles)
    assert sorted(tile for mine in taken for tile in mine) == list(range(tiles))
    assert all(taken)
    assert max(map(len, taken)) - min(map(len, taken)) <= 1


@pytest.mark.parametrize("section", [1, 3, 4, 12])
def test_tiles_cover_every_head_and_row_block_once(program, section):
    batch, heads, m_tiles = 2, 6, 5
    sections = -(-batch * heads // section)
    seen = [
        rows_of(t, batch * heads, m_tiles, section, heads) for t in range(batch * heads * m_tiles)
    ]
    assert len(set(seen)) == len(seen)
    assert {(b, h) for b, h, _ in seen} == {(b, h) for b in range(batch) for h in range(heads)}
    assert {row for *_, row in seen} == {128 * i for i in range(m_tiles)}
    for index in range(sections):
        rows = [
            row for *_, row in seen[index * section * m_tiles : (index + 1) * section * m_tiles]
        ]
        assert rows == sorted(rows, reverse=(sections - index) % 2 == 1)


@pytest.mark.parametrize(
    ("heads", "m_tiles", "section"),
    [(128, 4, 128), (128, 8, 128), (128, 16, 128), (128, 32, 64), (64, 64, 32), (32, 128, 16)],
)
def test_causal_work_is_balanced(program, heads, m_tiles, section):
    def cost(tile):  # blocks of keys, and about one block's time for the rest
        *_, row0 = rows_of(tile, heads, m_tiles, section, heads)
        return row0 // 128 + 2

    sums = [sum(map(cost, tiles)) for tiles in tiles_of(program, 132, heads * m_tiles)]
    assert max(sums) / (sum(sums) / len(sums)) < 1.035


@pytest.mark.parametrize("kind", list(KIND))
@pytest.mark.parametrize(
    ("m_len", "n_len"), [(1, 1), (256, 256), (333, 333), (129, 515), (515, 129)]
)
@pytest.mark.parametrize("window", [1, 100, 128, 300])
def test_a_span_covers_what_its_rows_see(program, kind, m_len, n_len, window):
    i, j = torch.arange(m_len)[:, None], torch.arange(n_len)[None]
    seen = torch.ones(m_len, n_len, dtype=torch.bool)
    if kind != "full":
        seen = j <= i + n_len - m_len
    if kind == "window":
        seen &= j > i + n_len - m_len - window
    for row0 in range(0, m_len, 128):
        rows = seen[row0 : row0 + 128]
        hi, full_lo, full_hi, lo = schedule.tile_edges.fn(
            row0, m_len, n_len, window, KIND[kind], BN
        )
        blocks = schedule.block_count.fn(hi, lo, BN)
        assert blocks >= 1
        keys = rows.any(0).nonzero()
        if len(keys):
            assert hi - blocks * BN <= keys.min()
            assert keys.max() < hi
            assert blocks <= (int(keys.max() - keys.min()) + 1 + 2 * BN - 1) // BN + 1
        whole = (j[0] >= full_lo) & (j[0] < full_hi)
        assert rows[:, whole].all()


def test_sections_hold_what_fits_the_cache():
    mib = 2**20
    # 4096 keys of 128 + 128 bf16 values are 2 MiB a head: 16 heads fit 32 MiB.
    assert section_heads("causal", 4096, 128, 4, 128, 32 * mib) == 64
    assert section_heads("intervals", 16384, 128, 4, 32, 32 * mib) == 16
    assert section_heads("causal", 10**7, 128, 4, 32, 32 * mib) == 4  # at least one key head
    assert section_heads("causal", 128, 64, 1, 6, 32 * mib) == 6  # never more than there are
    assert section_heads("full", 4096, 128, 4, 128, 32 * mib) == 4
