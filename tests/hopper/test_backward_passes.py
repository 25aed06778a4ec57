"""The passes around the sm_90 backward, against hand-written torch."""

from __future__ import annotations

import pytest
import torch

from hf_attn_backends.kernels.hopper import backward_passes as passes

BATCH, HEADS, ROWS, TILES, KEYS = 2, 3, 100, 2, 300


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
    device = kernel_device
    out = torch.randn(BATCH, ROWS, HEADS, dim, device=device).transpose(1, 2)
    grad = torch.randn(BATCH, HEADS, ROWS, dim, device=device)
    lse = torch.randn(BATCH, HEADS, ROWS, device=device)
    lse[0, 0, 5] = -torch.inf
    stats_rows = 4 if with_intervals else 2
    stats = torch.full((BATCH * HEADS * TILES, stats_rows, 64), 7.0, device=device)
    acc = torch.ones(BATCH * HEADS * TILES * 64 * dim, device=device)
    bounds = intervals(device) if with_intervals else lse
    passes.backward_prepare[(BATCH * HEADS * TILES,)](
        out, grad, lse, bounds, stats, acc, *eighths(out), *eighths(grad), *lse.stride(),
        bounds.stride(0), HEADS, ROWS, KEYS, TILES, D=dim, INTERVALS=with_intervals,
    )  # fmt: skip
    found = stats.view(BATCH, HEADS, TILES, stats_rows, 64).permute(3, 0, 1, 2, 4)
    found = found.reshape(stats_rows, BATCH, HEADS, TILES * 64)
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


def test_hull(kernel_device):
    bounds = intervals(kernel_device)
    n_tiles = -(-KEYS // 128)
    hull = torch.full((BATCH, n_tiles, 2), -7, dtype=torch.int32, device=kernel_device)
    tiles = torch.full((BATCH, TILES, 2), -7, dtype=torch.int32, device=kernel_device)
    passes.backward_hull[(BATCH * (n_tiles + TILES),)](
        bounds, hull, tiles, bounds.stride(0), ROWS, KEYS, TILES, n_tiles, BM=64, BN=128, SCAN=32
    )
    keys = torch.arange(KEYS, device=kernel_device)
    seen = (keys >= bounds[..., :1]) & (keys < bounds[..., 1:])
    for batch in range(BATCH):
        for tile in range(n_tiles):
            rows = seen[batch, :, tile * 128 : (tile + 1) * 128].any(-1).nonzero().flatten()
            want = [int(rows[0]) // 64, int(rows[-1]) // 64 + 1] if len(rows) else [0, 0]
            assert hull[batch, tile].tolist() == want
        for tile in range(TILES):
            mine = bounds[batch, tile * 64 : (tile + 1) * 64].clamp(max=KEYS)
            mine = mine[mine[:, 1] > mine[:, 0]]
            assert tiles[batch, tile].tolist() == [int(mine[:, 0].max()), int(mine[:, 1].min())]


def test_hull_of_keys_that_nobody_sees(kernel_device):
    bounds = torch.tensor([130, 140], dtype=torch.int32, device=kernel_device)
    bounds = bounds.expand(1, ROWS, 2).contiguous()
    hull = torch.full((1, 3, 2), -7, dtype=torch.int32, device=kernel_device)
    tiles = torch.empty((1, TILES, 2), dtype=torch.int32, device=kernel_device)
    passes.backward_hull[(3 + TILES,)](
        bounds, hull, tiles, 0, ROWS, KEYS, TILES, 3, BM=64, BN=128, SCAN=64
    )
    assert hull[0].tolist() == [[0, 0], [0, 2], [0, 0]]


@pytest.mark.parametrize("dim", [64, 128])
def test_finish_undoes_the_register_order(kernel_device, dim):
    """Thread `32 w + 4 r + l` holds rows `16 w + r` and `+ 8`, columns `8 j + 2 l` and `+ 1`."""
    tile = torch.randn(BATCH * HEADS * TILES, 64, dim, device=kernel_device)
    split = tile.view(-1, 4, 2, 8, 2, dim // 16, 4, 2)  # warp, +8, row, half, part, lane, pair
    acc = split.permute(0, 4, 1, 3, 6, 2, 5, 7).contiguous()
    dq = torch.zeros(BATCH, ROWS, HEADS, dim, device=kernel_device).transpose(1, 2)
    passes.backward_finish[(BATCH * HEADS * TILES,)](
        acc, dq, 2.0, *eighths(dq), HEADS, ROWS, TILES, D=dim
    )
    want = 2 * tile.view(BATCH, HEADS, TILES * 64, dim)[:, :, :ROWS]
    torch.testing.assert_close(dq, want)
