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
    """Empty dQ `[B, H, M, D]`, dK and dV `[B, G, N, D]`, views of `[B, M, H, D]` memory."""
    batch, heads, m_len, head_dim = query.shape
    kv_heads, n_len = key.shape[1:3]
    dq = query.new_empty((batch, m_len, heads, head_dim))
    dk = query.new_empty((batch, n_len, kv_heads, head_dim))
    dv = query.new_empty((batch, n_len, kv_heads, head_dim))
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


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
