"""The passes around the sm_90 backward, against hand-written torch."""

from __future__ import annotations

import pytest
import torch

from hf_attn_backends.kernels.hopper import backward_passes as passes

BATCH, HEADS, ROWS, KEYS = 2, 3, 200, 300
TILES = {64: 2, 128: 4}  # by head dim: tiles of 128 and of 64 rows


def intervals(device):
    bounds = torch.randint(0, KEYS + 5, (BATCH, ROWS, 2), dtype=torch.int32).sort(-1).values
    bounds[:, ::9, 1] = bounds[:, ::9, 0]
    bounds[1, 64:] = torch.tensor([280, 290], dtype=torch.int32)
    return bounds.to(device)


def eighths(tensor):
    return [stride // 8 for stride in tensor.stride()[:3]]


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("with_intervals", [False, True])
def test_prepare(kernel_device, dim, with_intervals):
    device, tiles, rows = kernel_device, TILES[dim], 8192 // dim
    out = torch.randn(BATCH, ROWS, HEADS, dim, device=device).transpose(1, 2)
    grad = torch.randn(BATCH, HEADS, ROWS, dim, device=device)
    lse = torch.randn(BATCH, HEADS, ROWS, device=device)
    lse[0, 0, 5] = -torch.inf
    stats_rows = 4 if with_intervals else 2
    stats = torch.full((BATCH * HEADS * tiles, stats_rows, rows), 7.0, device=device)
    acc = torch.ones(BATCH * HEADS * tiles * 8192, device=device)
    bounds = intervals(device) if with_intervals else lse
    passes.backward_prepare[(BATCH * HEADS * tiles,)](
        out, grad, lse, bounds, stats, acc, *eighths(out), *eighths(grad), *lse.stride(),
        bounds.stride(0), HEADS, ROWS, KEYS, tiles, BM=rows, D=dim, INTERVALS=with_intervals,
    )  # fmt: skip
    found = stats.view(BATCH, HEADS, tiles, stats_rows, rows).permute(3, 0, 1, 2, 4)
    found = found.reshape(stats_rows, BATCH, HEADS, tiles * rows)
    want = torch.where(lse == -torch.inf, torch.inf, lse * 1.4426950408889634)
    torch.testing.assert_close(found[0, :, :, :ROWS], want)
    assert (found[0, :, :, ROWS:] == torch.inf).all()
    delta = (out * grad).sum(-1).masked_fill(lse == -torch.inf, 0)
    torch.testing.assert_close(found[1, :, :, :ROWS], delta, atol=1e-4, rtol=1e-5)
    assert (found[1, :, :, ROWS:] == 0).all()
    assert (acc == 0).all()
    if with_intervals:
        keys = found[2:].contiguous().view(torch.int32)
        for head in range(HEADS):
            assert torch.equal(keys[0, :, head, :ROWS], bounds[..., 0])
            assert torch.equal(keys[1, :, head, :ROWS], bounds[..., 1].clamp(max=KEYS))
        assert (keys[..., ROWS:] == 0).all()


@pytest.mark.parametrize("dim", [64, 128])
def test_hull(kernel_device, dim):
    bounds = intervals(kernel_device)
    n_tiles, m_tiles, rows = -(-KEYS // 128), TILES[dim], 8192 // dim
    hull = torch.full((BATCH, n_tiles, 2), -7, dtype=torch.int32, device=kernel_device)
    tiles = torch.full((BATCH, m_tiles, 2), -7, dtype=torch.int32, device=kernel_device)
    passes.backward_hull[(BATCH * (n_tiles + m_tiles),)](
        bounds, hull, tiles, bounds.stride(0), ROWS, KEYS, m_tiles, n_tiles,
        BM=rows, BN=128, SCAN=32,
    )  # fmt: skip
    keys = torch.arange(KEYS, device=kernel_device)
    seen = (keys >= bounds[..., :1]) & (keys < bounds[..., 1:])
    for batch in range(BATCH):
        for tile in range(n_tiles):
            hit = seen[batch, :, tile * 128 : (tile + 1) * 128].any(-1).nonzero().flatten()
            want = [int(hit[0]) // rows, int(hit[-1]) // rows + 1] if len(hit) else [0, 0]
            assert hull[batch, tile].tolist() == want
        for tile in range(m_tiles):
            mine = bounds[batch, tile * rows : (tile + 1) * rows].clamp(max=KEYS)
            mine = mine[mine[:, 1] > mine[:, 0]]
            assert tiles[batch, tile].tolist() == [int(mine[:, 0].max()), int(mine[:, 1].min())]


def test_hull_of_keys_that_nobody_sees(kernel_device):
    bounds = torch.tensor([130, 140], dtype=torch.int32, device=kernel_device)
    bounds = bounds.expand(1, ROWS, 2).contiguous()
    hull = torch.full((1, 3, 2), -7, dtype=torch.int32, device=kernel_device)
    tiles = torch.empty((1, 4, 2), dtype=torch.int32, device=kernel_device)
    passes.backward_hull[(3 + 4,)](bounds, hull, tiles, 0, ROWS, KEYS, 4, 3, BM=64, BN=128, SCAN=64)
    assert hull[0].tolist() == [[0, 0], [0, 4], [0, 0]]


@pytest.mark.parametrize("dim", [64, 128])
def test_finish_undoes_the_register_order(kernel_device, dim):
    """Thread `32 w + 4 r + l` holds rows `16 w + r` and `+ 8`, columns `8 j + 2 l` and `+ 1` of a
    64 x 64 half: of the columns for tiles of 64 rows, of the rows for tiles of 128.
    """
    tiles, rows = TILES[dim], 8192 // dim
    tile = torch.randn(BATCH * HEADS * tiles, rows, dim, device=kernel_device)
    halves = tile.view(-1, 64, 2, 64).transpose(1, 2) if rows == 64 else tile.view(-1, 2, 64, 64)
    split = halves.reshape(-1, 2, 4, 2, 8, 8, 4, 2)  # half, warp, +8, row, part, lane, pair
    acc = split.permute(0, 1, 2, 4, 6, 3, 5, 7).contiguous()
    dq = torch.zeros(BATCH, ROWS, HEADS, dim, device=kernel_device).transpose(1, 2)
    passes.backward_finish[(BATCH * HEADS * tiles,)](
        acc, dq, 2.0, *eighths(dq), HEADS, ROWS, tiles, BM=rows, D=dim
    )
    want = 2 * tile.view(BATCH, HEADS, tiles * rows, dim)[:, :, :ROWS]
    torch.testing.assert_close(dq, want)
