"""Tensors and masks of a case: the same numbers on every machine, in the class's own dtype.

Shapes: `B` batch, `H` query heads, `G` key/value heads, `M` query length, `N` key length, `D`
head dim.
"""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_attn_backends.call import CallClass
from hf_attn_backends.gate.cases import Case
from hf_attn_backends.gate.dropout import kept_weights
from hf_attn_backends.kernels.visibility import Visibility


class Inputs(NamedTuple):
    """Everything that one measured call is given.

    Attributes:
        query: `[B, H, M, D]`.
        key: `[B, G, N, D]`.
        value: `[B, G, N, E]`.
        grad_out: `[B, H, M, E]`.
        visibility: Which keys each row sees.
        scale: Factor of the scores.
        softcap: `c` in `c * tanh(scores / c)`; 0: none.
        sinks: `[H]` logits, or None.
        dropout_p: Probability of dropping a weight.
        seed: With dropout, `[1]` int64.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    grad_out: Tensor
    visibility: Visibility
    scale: float
    softcap: float = 0.0
    sinks: Tensor | None = None
    dropout_p: float = 0.0
    seed: Tensor | None = None

    def kernel_options(self) -> dict[str, Any]:
        """The features that the call has, as the launches and the operator take them."""
        options = {"softcap": self.softcap, "dropout_p": self.dropout_p}
        options = {name: number for name, number in options.items() if number}
        tensors = {"sinks": self.sinks, "seed": self.seed}
        return options | {name: given for name, given in tensors.items() if given is not None}

    def oracle_options(self) -> dict[str, Any]:
        """Everything beside the tensors, as the oracle takes it."""
        options: dict[str, Any] = {
            "visibility": self.visibility,
            "scale": self.scale,
            "softcap": self.softcap or None,
            "sinks": self.sinks,
        }
        if self.seed is not None:
            options |= {"kept": self.kept(), "dropout_p": self.dropout_p}
        return options

    def kept(self) -> Tensor | None:
        """The weights that dropout leaves, `[B, H, M, N]` bool; None without dropout."""
        if self.seed is None:
            return None
        b, h, m, _ = self.query.shape
        shape = (b, h, m, self.key.shape[2])
        return kept_weights(int(self.seed), shape, self.dropout_p, self.query.device)


def make_inputs(case: Case, call_class: CallClass, device: torch.device | str) -> Inputs:
    """Draw a case's numbers from a seed that is its own; on the CPU, then moved."""
    seed = zlib.crc32(f"{call_class} {case.name}".encode())
    draw = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, call_class.dtype)
    b, h, g, d = case.batch, case.heads, case.kv_heads, call_class.head_dim
    features = call_class.features.split("+")
    e = _value_dim(d, seed) if "value_dim" in features else d

    def tensor(heads: int, length: int, dim: int) -> Tensor:
        numbers = torch.randn(b, heads, length, dim, generator=draw)
        return _lay_out(numbers.to(device, dtype), case.layout)

    query, key = tensor(h, case.q_len, d), tensor(g, case.k_len, d)
    value = tensor(g, case.k_len, e)
    if case.grad == "ones":
        grad_out = torch.full((), 0.75, dtype=dtype, device=device).expand(b, h, case.q_len, e)
    else:
        grad_out = torch.randn(b, h, case.q_len, e, generator=draw).to(device, dtype)
    visibility = _visibility(case, draw, device)
    found = Inputs(query, key, value, grad_out, visibility, case.steepness * d**-0.5)
    if "softcap" in features:  # one that bends every score, or one that steep scores saturate
        found = found._replace(softcap=1.5 if case.steepness == 1.0 else 30.0)
    if "sinks" in features:
        found = found._replace(sinks=2 * torch.randn(h, generator=draw).to(device, dtype))
    if "dropout" in features:
        number = torch.randint(2**62, (1,), generator=draw)
        found = found._replace(dropout_p=0.3, seed=number.to(device))
    return found


def _value_dim(head_dim: int, seed: int) -> int:
    """A value head dim unlike the query's: MLA's two thirds, one that is no multiple, a larger."""
    mla = max(16, head_dim * 2 // 3 // 16 * 16)
    other = max(16, head_dim // 2 + 4)
    choices = (mla, other, head_dim + 16 if head_dim <= 240 else 128)
    return next(e for e in choices[seed % 3 :] + choices if e != head_dim)


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
