"""Tiles and numbers of splits of the decode kernels: tables and shapes, no tuning at run time."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from hf_attn_backends.kernels.triton.launch import INTERPRETED

MAX_SPLITS = 128
# What a split costs when they are combined, in units of a tile's time; and what a multiprocessor
# draws at most, in shares of the memory's rate. Fitted to sweeps over splits on an H200, like
# `alone` of the tiles.
_COMBINE, _DRAWN = 0.0625, 1.7


class DecodeTile(NamedTuple):
    """BM packed rows by BN keys.

    Attributes:
        block_m: Rows: query rows of all heads of a key head's group.
        block_n: Keys of a tile.
        warps_apart: Warps that keep keys to themselves (all of them), or 1: they share a tile.
        warps: Triton's `num_warps`.
        stages: Pipelining depth of the loop over keys.
        resident: Programs that one multiprocessor holds at a time.
        query_in_loop: Whether the query is loaded again with every tile of keys, out of the L2
            cache: then no program waits for its query before it asks for its keys, and the
            query takes shared memory in place of registers.
        alone: What one program can draw, in shares of the memory's rate: its tiles in flight.
    """

    block_m: int
    block_n: int
    warps_apart: int
    warps: int
    stages: int
    resident: int
    query_in_loop: bool = False
    alone: float = 1.2


class Device(NamedTuple):
    """What the choice depends on."""

    capability: tuple[int, int]
    multiprocessors: int


# On Triton's interpreter, by bytes of an element: several tiles and splits of a short sequence,
# warps apart as on a GPU. NumPy sums smaller fp32 products in another order than the backward
# kernels' tiles, and what forward and backward pass round differently adds to the gradients.
_INTERPRETER = {4: DecodeTile(32, 64, 1, 2, 1, 1), 2: DecodeTile(16, 32, 2, 2, 1, 1)}
_INTERPRETER_DEVICE = Device((0, 0), 6)


@lru_cache(maxsize=64)
def device_of(index: int) -> Device:
    """Capability and number of multiprocessors of a CUDA device."""
    facts = torch.cuda.get_device_properties(index)
    return Device((facts.major, facts.minor), facts.multi_processor_count)


def decode_tile(
    capability: tuple[int, int], head_dim: int, itemsize: int, packed: int
) -> DecodeTile:
    """The tile for one device, head dim, dtype and number of packed rows.

    Args:
        capability: CUDA compute capability.
        head_dim: `D`.
        itemsize: Bytes per element of query, key and value.
        packed: Rows of a key head's group, `(H // G) * M`.
    """
    rows = 16 if packed <= 16 else 32 if packed <= 32 else 64
    large = capability in ((8, 0), (9, 0), (10, 0), (10, 3))  # shared memory: 163 KB or more
    if itemsize == 4:  # IEEE products on the FP32 units, no tensor cores
        return DecodeTile(min(rows, 32), 32 if head_dim <= 128 else 16, 1, 8, 2, 2)
    stages = 3 if large else 2
    if head_dim > 128:
        return DecodeTile(min(rows, 32), 32, 1, 4, stages, 2, alone=1.0)
    if rows > 16:
        return DecodeTile(rows, 64, 1, 4, stages, 2)
    if head_dim <= 64:
        return DecodeTile(16, 64, 4, 4, stages, 2, alone=0.8)
    if large and capability >= (9, 0):
        return DecodeTile(16, 64, 1, 4, 4, 2)
    return DecodeTile(16, 64, 4, 4, stages, 2)


def decode_tile_of(query: Tensor, packed: int) -> DecodeTile:
    """`decode_tile` for the device and dtype of a query `[B, H, M, D]`."""
    if INTERPRETED:
        return _INTERPRETER[query.element_size()]
    capability = device_of(query.device.index).capability
    return decode_tile(capability, query.shape[-1], query.element_size(), packed)


def splits_of(query: Tensor, tile: DecodeTile, programs: int, keys: int) -> int:
    """`number_of_splits` on the query's device."""
    device = _INTERPRETER_DEVICE if INTERPRETED else device_of(query.device.index)
    return number_of_splits(device.multiprocessors, tile, programs, keys)


def number_of_splits(multiprocessors: int, tile: DecodeTile, programs: int, keys: int) -> int:
    """Among how many programs a row's keys are divided.

    Args:
        multiprocessors: Of the device.
        tile: The tile.
        programs: Programs without a split: batch x key heads x tiles of rows.
        keys: The most keys that a row can see.

    Returns:
        The number with the least cost; see `cost_of_splits`.
    """
    tiles = max(1, -(-keys // tile.block_n))
    return _splits(multiprocessors, tile, programs, tiles)


@lru_cache(maxsize=4096)
def _splits(multiprocessors: int, tile: DecodeTile, programs: int, tiles: int) -> int:
    """By tiles, so that a cache that grows by a key a step asks anew at every tile only."""
    return min(
        range(1, min(tiles, MAX_SPLITS) + 1),
        key=lambda splits: cost_of_splits(
            splits, multiprocessors, tile, programs * splits, -(-tiles // splits)
        ),
    )


def cost_of_splits(
    splits: int, multiprocessors: int, tile: DecodeTile, programs: int, tiles: int
) -> float:
    """What a number of splits costs, in units of a tile's time when all share the memory's rate.

    Programs run in waves of `resident` a multiprocessor. A wave takes as long as the memory needs
    for all of it, or as its multiprocessors need, which alone cannot draw more than a certain share
    each. Every split is combined in the end.

    Args:
        splits: Their number.
        multiprocessors: Of the device.
        tile: The tile.
        programs: With the splits.
        tiles: Of one program.
    """
    wave = multiprocessors * tile.resident
    waves, rest = divmod(programs, wave)
    cost = waves * tile.resident * tiles + (_COMBINE * splits if splits > 1 else 0.0)
    if rest:
        shared = -(-rest // multiprocessors)  # programs of a multiprocessor
        drawn = tile.alone if shared == 1 else min(_DRAWN, shared * tile.alone)
        cost += max(rest * tiles / multiprocessors, shared * tiles / drawn)
    return cost
