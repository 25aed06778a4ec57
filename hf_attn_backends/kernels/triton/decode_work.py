"""What shapes, strides and device decide of a decode launch, and the launch by kept blocks.

Shapes: `B` batch, `H` query heads, `M` query length, `D` head dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_attn_backends.kernels.block import Block
from hf_attn_backends.kernels.triton.decode_tiles import DecodeTile, decode_tile_of, splits_of
from hf_attn_backends.kernels.triton.launch import block_of, row_sums, visibility_arguments
from hf_attn_backends.kernels.visibility import Visibility

CODES = "q" * 11 + "i" * 19 + "f"  # parameters of the two kernels, see `kernels.block`
COMBINE_CODES = "q" * 5 + "i" * 6


class Work(NamedTuple):
    """What shapes, strides and device decide of a launch.

    Attributes:
        tile, tiles_m, programs, splits, rows, padded: How the work is divided; `padded` is the
            power of two that the splits are combined in.
        peaks, denoms, room: Where parts begin in the workspace, and its size, in fp32 elements.
        shape, out_strides: Of the output.
        strides, numbers, combined: Arguments of the two kernels.
        which, combine: Names of their blocks.
    """

    tile: DecodeTile
    tiles_m: int
    programs: int
    splits: int
    rows: int
    padded: int
    peaks: int
    denoms: int
    room: int
    shape: tuple[int, int, int, int]
    out_strides: tuple[int, int, int]
    strides: tuple[int, ...]
    numbers: tuple[int | float, ...]
    combined: tuple[int, ...]
    which: tuple[object, ...]
    combine: tuple[object, ...]

    @classmethod
    def of(
        cls, query: Tensor, visibility: Visibility, scale: float, kv_heads: int, k_len: int,
        key_strides: tuple[int, ...], value_strides: tuple[int, ...],
        interval_strides: tuple[int, int], lengths: Tensor | None, table: Tensor | None, page: int,
        is_wide: bool, tile: DecodeTile | None, splits: int | None,
    ) -> Work:  # fmt: skip
        """Divide the work of a call; the arguments are `_launch`'s."""
        batch, heads, q_len, head_dim = query.shape
        packed = heads // kv_heads * q_len
        tile = tile or decode_tile_of(query, packed)
        tiles_m = -(-packed // tile.block_m)
        programs = batch * kv_heads * tiles_m
        window = visibility.window or 0
        if splits is None:
            seen = min(k_len, window + q_len - 1) if window else k_len
            splits = splits_of(query, tile, programs, seen)
        rows = batch * heads * q_len
        parts = rows * splits
        padded_parts = -(-parts // 4) * 4  # so that every part begins at 16 bytes
        peaks = parts * head_dim
        row = heads * head_dim
        out_strides = (q_len * row, head_dim, row)
        padded = 1 << (splits - 1).bit_length()
        index, dtype = query.device.index, query.dtype
        return cls(
            tile, tiles_m, programs, splits, rows, padded, peaks, peaks + padded_parts,
            peaks + 2 * padded_parts, (batch, heads, q_len, head_dim), out_strides,
            (*query.stride()[:3], *key_strides, *value_strides, *out_strides),
            (*interval_strides, 0 if table is None else table.stride(0), splits, q_len, k_len,
             window, float(scale)),
            (*out_strides, heads, q_len, splits),
            ("decode", index, dtype, heads, kv_heads, tiles_m, head_dim, tile, visibility.kind,
             lengths is None, page, splits > 1, is_wide),
            ("decode combine", index, dtype, head_dim, padded),
        )  # fmt: skip

    def memory(self, query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Empty output, log-sum-exp and workspace; without splits the workspace is no own one."""
        out = torch.empty_strided(
            self.shape, (*self.out_strides, 1), dtype=query.dtype, device=query.device
        )
        lse = row_sums(query, *self.shape[:3])
        if self.splits == 1:
            return out, lse, lse
        room = torch.empty_strided(
            (self.room,), (1,), dtype=torch.float32, device=query.device
        )  # fmt: skip
        return out, lse, room

    def blocks(self) -> tuple[Block, Block | None] | None:
        """The kept blocks of the kernels, if there are all."""
        first = block_of(self.which)
        second = block_of(self.combine) if self.splits > 1 else None
        return None if first is None or (second is None and self.splits > 1) else (first, second)

    def launch(self, stream: int, addresses: tuple[int, ...]) -> bool:
        """Launch by the kept blocks; False where there are none."""
        blocks = self.blocks()
        if blocks is None:
            return False
        first, second = blocks
        first.launch(stream, self.programs, self.splits, addresses + self.strides + self.numbers)
        if second is not None:
            second.launch(
                stream, self.rows, 1, (*addresses[5:8], *addresses[3:5], *self.combined)
            )  # fmt: skip
        return True


def interval_arguments(visibility: Visibility) -> tuple[Tensor | None, tuple[int, int]]:
    """The intervals, a copy where the kernel cannot read them, and their strides."""
    intervals = visibility.intervals
    if intervals is None:
        return None, (0, 0)
    arguments = visibility_arguments(visibility, intervals)
    return arguments.intervals, arguments.interval_strides
