"""The mask that dropout must draw, from the generator's definition and not from the kernel's code.

Philox4x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3)
with 7 rounds, in 64-bit integer arithmetic of torch: key = the seed, counter = (column, row, head,
0), `head` counting through the batch. The first word's upper 24 bits, as a fraction, keep the
weight where they are at least `dropout_p`.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ROUNDS = 7
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF


def kept_weights(
    seed: int, shape: tuple[int, int, int, int], dropout_p: float, device: torch.device | str
) -> Tensor:
    """Which weights stay, `[B, H, M, N]` bool.

    Args:
        seed: Non-negative, below 2^63.
        shape: `B, H, M, N`.
        dropout_p: Probability of dropping, as fp32.
        device: Of the result.
    """
    b, h, m, n = shape
    head = torch.arange(b * h, device=device).view(b, h, 1, 1).expand(shape)
    row = torch.arange(m, device=device).view(1, 1, m, 1).expand(shape)
    column = torch.arange(n, device=device).view(1, 1, 1, n).expand(shape)
    words = [column, row, head, torch.zeros_like(head)]
    key = [seed & _WORD, seed >> 32]
    for _ in range(_ROUNDS):
        high0, low0 = _product(words[0], _MULTIPLIERS[0])
        high1, low1 = _product(words[2], _MULTIPLIERS[1])
        words = [high1 ^ words[1] ^ key[0], low1, high0 ^ words[3] ^ key[1], low0]
        key = [(part + step) & _WORD for part, step in zip(key, _WEYL, strict=True)]
    number = (words[0] >> 8).to(torch.float32) * 2.0**-24
    return number >= torch.tensor(dropout_p, dtype=torch.float32, device=device)


def _product(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of the product of two 32-bit numbers held in int64."""
    low = word * (factor & 0xFFFF)
    high = word * (factor >> 16) + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)
