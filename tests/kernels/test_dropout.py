"""Dropout: the published generator, a mask of (seed, head, row, column), the right statistics."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

from hf_attn_backends.gate.dropout import _product, kept_weights
from hf_attn_backends.kernels.ops import triton_attention
from hf_attn_backends.kernels.triton.forward import launch_forward
from hf_attn_backends.kernels.triton.tiles import Tile
from hf_attn_backends.kernels.visibility import CAUSAL, FULL


def test_philox_is_the_published_one():
    """Random123's known answer for philox4x32, 7 rounds, counter and key 0."""
    first = 0x5F6FB709
    fraction = (first >> 8) / 2**24
    for p, kept in ((fraction, True), (fraction + 2.0**-24, False)):
        assert bool(kept_weights(0, (1, 1, 1, 1), p, "cpu")) is kept
    high, low = _product(torch.tensor(0xFFFFFFFF), 0xD2511F53)
    assert (int(high) << 32) | int(low) == 0xFFFFFFFF * 0xD2511F53


def test_dropout_does_not_depend_on_tiles(draw, kernel_device):
    query, key, value, _ = draw(m=70, n=70, grad=False)
    seed = torch.tensor([77], device=kernel_device)
    outs = [
        launch_forward(query, key, value, CAUSAL, 0.25, dropout_p=0.4, seed=seed, tile=tile)[0]
        for tile in (Tile(64, 32, 4, 1), Tile(16, 64, 4, 1))
    ]
    torch.testing.assert_close(*outs)


def test_dropout_is_that_of_torchs_seed(draw):
    leaves = draw()

    def step(seed):
        torch.manual_seed(seed)
        out = triton_attention(*leaves[:3], CAUSAL, dropout_p=0.5)
        return out.detach(), *torch.autograd.grad(out.sum(), leaves[:3])

    one, same, other = step(1), step(1), step(2)
    assert all(torch.equal(x, y) for x, y in zip(one, same, strict=True))
    assert not torch.equal(one[0], other[0])
    torch.manual_seed(1)
    first, second = (triton_attention(*leaves[:3], CAUSAL, dropout_p=0.5) for _ in range(2))
    assert torch.equal(first, one[0])
    assert not torch.equal(first, second)


def test_dropout_keeps_the_mean_and_drops_as_often_as_asked(kernel_device):
    """Weights read off a value of unit vectors, over 4 x 8 heads of 64 x 32 of them."""
    zeros = torch.zeros(4, 8, 64, 32, device=kernel_device)
    unit = torch.eye(32, device=kernel_device).expand(4, 8, 32, 32)
    torch.manual_seed(3)
    weights = triton_attention(zeros, zeros[:, :, :32], unit, FULL, dropout_p=0.3)
    kept = weights != 0
    count = kept.numel()
    torch.testing.assert_close(weights[kept] * 32, torch.full_like(weights[kept], 1 / 0.7))
    deviation = (0.3 * 0.7 / count) ** 0.5
    assert abs(float(kept.double().mean()) - 0.7) < 4 * deviation
    for pair in ((kept[:, :, 1:], kept[:, :, :-1]), (kept[:, 1:], kept[:, :-1]),
                 (kept[1:], kept[:-1]), (kept[..., 1:], kept[..., :-1])):  # fmt: skip
        both = float((pair[0] & pair[1]).double().mean())  # neighbours are independent
        assert abs(both - 0.49) < 4 * (0.49 * 0.51 / pair[0].numel()) ** 0.5


def test_checkpointing_draws_the_same_dropout_again(draw):
    leaves = draw()[:3]

    def attend(*tensors):
        return triton_attention(*tensors, CAUSAL, dropout_p=0.5)

    torch.manual_seed(4)
    plain = torch.autograd.grad(attend(*leaves).sum(), leaves)
    for reentrant in (False, True):
        torch.manual_seed(4)
        out = checkpoint(attend, *leaves, use_reentrant=reentrant)
        out.sum().backward()
        for leaf, want in zip(leaves, plain, strict=True):
            assert torch.equal(leaf.grad, want)
            leaf.grad = None
