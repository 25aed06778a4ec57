"""Tensors and masks of a case: the same numbers on every machine, in the class's own dtype.

Shapes: `B` batch, `H` query heads, `G` key/value heads, `M` query length, `N` key length, `D`
head dim.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

import torch
from torch import Tensor

from hf_attn_backends.call import CallClass
from hf_attn_backends.gate.cases import Case
from hf_attn_backends.kernels.visibility import Visibility


class Inputs(NamedTuple):
    """Everything that one measured call is given.

    Attributes:
        query, grad_out: `[B, H, M, D]`.
        key, value: `[B, G, N, D]`.
        visibility: Which keys each row sees.
        scale: Factor of the scores.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    grad_out: Tensor
    visibility: Visibility
    scale: float


def make_inputs(case: Case, call_class: CallClass, device: torch.device | str) -> Inputs:
    """Draw a case's numbers from a seed that is its own; on the CPU, then moved."""
    seed = zlib.crc32(f"{call_class} {case.name}".encode())
    draw = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, call_class.dtype)
    b, h, g, d = case.batch, case.heads, case.kv_heads, call_class.head_dim

    def tensor(heads: int, length: int) -> Tensor:
        numbers = torch.randn(b, heads, length, d, generator=draw)
        return _lay_out(numbers.to(device, dtype), case.layout)

    query, key, value = tensor(h, case.q_len), tensor(g, case.k_len), tensor(g, case.k_len)
    if case.grad == "ones":
        grad_out = torch.full((), 0.75, dtype=dtype, device=device).expand(b, h, case.q_len, d)
    else:
        grad_out = torch.randn(b, h, case.q_len, d, generator=draw).to(device, dtype)
    visibility = _visibility(case, draw, device)
    return Inputs(query, key, value, grad_out, visibility, case.steepness * d**-0.5)


def _lay_out(tensor: Tensor, layout: str) -> Tensor:
    """The same numbers in other memory."""
    if layout == "plain":
        return tensor
    b, h, m, d = tensor.shape
    if layout in ("strided", "skewed"):  # a slice of a wider projection: [B, M, H, D + 16] memory
        wide = tensor.new_zeros(b, m, h, d + (16 if layout == "strided" else 8))
        return wide[..., :d].transpose(1, 2).copy_(tensor)
    return tensor.transpose(2, 3).contiguous().transpose(2, 3)


def _visibility(case: Case, draw: torch.Generator, device: torch.device | str) -> Visibility:
    b, h, m, n = case.batch, case.heads, case.q_len, case.k_len
    if case.mask in ("full", "causal", "window"):
        return Visibility(causal=case.mask != "full", window=case.window)
    if case.mask in ("packed", "left_padding", "scattered"):
        build = {"packed": _packed, "left_padding": _left_padding, "scattered": _scattered}
        intervals = build[case.mask](b, m, n, draw)
        return Visibility(intervals=intervals.to(torch.int32).to(device))
    per_head = case.mask == "holes_per_head"
    mask = torch.rand(b if per_head else 1, h if per_head else 1, m, n, generator=draw) < 0.6
    if m > 1:
        mask[:, :, 1::9] = False  # rows that see nothing, in every tile
    mask[..., n // 3] = False  # a key that nobody sees
    # Broadcast masks come as views with zero strides, not as copies.
    return Visibility(dense=mask.to(device).expand(mask.shape[0] if per_head else b, h, m, n))


def _positions(m: int, n: int) -> Tensor:
    """Key position of each row: the last row is the last key's."""
    return torch.arange(m) + (n - m)


def _packed(b: int, m: int, n: int, draw: torch.Generator) -> Tensor:
    """Documents behind each other, causal within each: lengths ~N/2, 1, the rest."""
    first = n // 2 - 2
    starts = torch.tensor([0, first, first + 1])
    position = _positions(m, n)
    document = torch.searchsorted(starts, position, right=True) - 1
    return torch.stack([starts[document], position + 1], -1)[None].expand(b, m, 2)


def _left_padding(b: int, m: int, n: int, draw: torch.Generator) -> Tensor:
    """Causal, with 0, 7, 14 ... padding keys at the front; padding rows see nothing."""
    padding = (torch.arange(b) * 7)[:, None]
    end = (_positions(m, n) + 1)[None].expand(b, m)
    start = padding.expand(b, m)
    return torch.stack([start, torch.where(end > start, end, start)], -1)


def _scattered(b: int, m: int, n: int, draw: torch.Generator) -> Tensor:
    """Any interval for any row, in no order; every fifth row sees nothing, some in odd ways."""
    ends = torch.randint(0, n + 1, (b, m, 2), generator=draw).sort(-1).values
    ends[:, ::5, 1] = ends[:, ::5, 0]
    ends[:, ::10] = torch.tensor([n, 0])  # end before start
    return ends
