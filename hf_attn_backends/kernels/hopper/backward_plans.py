"""What a backward pass of the sm_90 variant allocates, and its launches through kept plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hf_attn_backends.kernels.bound import Plan

KEYS = 128  # keys of a program
TILE = 8192  # elements of a tile of queries


def tile_rows(head_dim: int) -> int:
    """Query rows of a tile: what keeps the shared memory of all head dims alike."""
    return TILE // head_dim


def new_gradients(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Empty dQ `[B, H, M, D]`, dK and dV `[B, G, N, D]`, over `[B, M, H, D]` memory."""
    _, heads, m_len, _ = query.shape
    _, kv_heads, n_len, _ = key.shape
    dk = _rows_first(query, kv_heads, n_len)
    return _rows_first(query, heads, m_len), dk, torch.empty_like(dk)


def _rows_first(tensor: Tensor, heads: int, length: int) -> Tensor:
    """An empty `[B, heads, length, D]` over `[B, length, heads, D]` memory; cheaper than a view."""
    batch, _, _, head_dim = tensor.shape
    row = heads * head_dim
    return torch.empty_strided(
        (batch, heads, length, head_dim), (length * row, head_dim, row, 1), dtype=tensor.dtype,
        device=tensor.device,
    )  # fmt: skip


class Room(NamedTuple):
    """Sizes of the workspaces, which are one allocation: in fp32 and int32 elements, in order.

    Attributes:
        acc: dQ's sum, see `backward_kernels`.
        stats: Statistics of the rows, see `backward_passes`.
        hull, tiles: Summary of the intervals, likewise; 0 without intervals.
    """

    acc: int
    stats: int
    hull: int
    tiles: int

    @classmethod
    def of(cls, query: Tensor, key: Tensor, kind: str) -> Room:
        """The sizes for `[B, H, M, D]` queries and `[B, G, N, D]` keys."""
        batch, heads, m_len, head_dim = query.shape
        rows = tile_rows(head_dim)
        m_tiles, n_tiles = -(-m_len // rows), -(-key.shape[2] // KEYS)
        tiles = batch * heads * m_tiles
        if kind != "intervals":
            return cls(tiles * TILE, tiles * rows * 2, 0, 0)
        return cls(tiles * TILE, tiles * rows * 4, 2 * batch * n_tiles, 2 * batch * m_tiles)


class Plans(NamedTuple):
    """The launches of one set of shapes and strides; `hull` for intervals only."""

    prepare: Plan
    hull: Plan | None
    main: Plan
    finish: Plan
    room: Room

    def launch(
        self, query: Tensor, key: Tensor, given: Sequence[int], intervals: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run the kernels on the current stream of the current device.

        Args:
            query: `[B, H, M, D]`.
            key: `[B, G, N, D]`.
            given: Addresses of query, grad_out, key, value, out and lse.
            intervals: int32 `[B or 1, M, 2]`, contiguous, or None.
        """
        q, grad_out, k, v, out, lse = given
        stream = torch._C._cuda_getCurrentRawStream(query.device.index)
        room = torch.empty(sum(self.room), dtype=torch.float32, device=query.device)
        acc = room.data_ptr()
        stats = acc + 4 * self.room.acc
        hull = stats + 4 * self.room.stats
        tiles = hull + 4 * self.room.hull
        bounds = lse if intervals is None else intervals.data_ptr()
        self.prepare.launch(stream, (), (out, grad_out, lse, bounds, stats, acc))
        if self.hull is not None:
            self.hull.launch(stream, (), (bounds, hull, tiles))
        grads = new_gradients(query, key)
        dq, dk, dv = (grad.data_ptr() for grad in grads)
        self.main.launch(stream, (q, grad_out, k, v, stats, acc, dk, dv), (hull, tiles))
        self.finish.launch(stream, (), (acc, dq))
        return grads
