"""Tile sizes by architecture, head dim, dtype and kernel: a table, no tuning at run time.

Ranks of one job must choose alike and nothing may be tuned under CUDA-graph capture, so what a
tuner would find is written down here. `warps` and `stages` are Triton's `num_warps` and the
software-pipelining depth of the inner loops. Shared memory per CTA decides most of it: 227 KB on
sm_90 and sm_100, 163 KB on sm_80, 99 KB on sm_86, sm_89 and sm_120.
"""

from __future__ import annotations

from typing import NamedTuple


class Tile(NamedTuple):
    """BM query rows by BN keys, with `warps` warps and `stages` pipeline stages."""

    block_m: int
    block_n: int
    warps: int
    stages: int


class TileSet(NamedTuple):
    """The tiles of the three kernels."""

    forward: Tile
    dkdv: Tile
    dq: Tile


# On Triton's interpreter every operation costs its Python overhead, whatever the tile's size;
# 65 rows and keys still make several tiles of unequal sides.
INTERPRETER = TileSet(Tile(64, 32, 4, 1), Tile(32, 64, 4, 1), Tile(64, 32, 4, 1))

# fp32 uses IEEE products on the FP32 units: small tiles, no tensor cores.
_FP32 = {
    64: TileSet(Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
    128: TileSet(Tile(32, 32, 8, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    256: TileSet(Tile(16, 32, 8, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
}

_LARGE = {  # sm_90, sm_100
    64: TileSet(Tile(128, 128, 8, 3), Tile(64, 128, 8, 3), Tile(128, 64, 8, 3)),
    # Measured on an H200 at 4x4096 and 1x16384 (bench/results/h200-tiles.json).
    128: TileSet(Tile(128, 64, 8, 3), Tile(64, 64, 4, 2), Tile(128, 64, 8, 3)),
    256: TileSet(Tile(128, 32, 8, 2), Tile(32, 32, 8, 2), Tile(64, 32, 8, 2)),
}

_AMPERE = {  # sm_80
    64: TileSet(Tile(128, 64, 4, 3), Tile(64, 32, 8, 2), Tile(64, 64, 8, 2)),
    128: TileSet(Tile(128, 64, 8, 3), Tile(32, 64, 8, 2), Tile(64, 64, 8, 2)),
    256: TileSet(Tile(64, 32, 8, 2), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
}

_SMALL = {  # sm_86, sm_89, sm_120
    64: TileSet(Tile(128, 64, 4, 2), Tile(64, 32, 8, 2), Tile(64, 64, 8, 2)),
    128: TileSet(Tile(128, 32, 8, 2), Tile(32, 64, 8, 2), Tile(64, 32, 8, 2)),
    256: TileSet(Tile(64, 32, 8, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
}

_BY_CAPABILITY = {(8, 0): _AMPERE, (9, 0): _LARGE, (10, 0): _LARGE, (10, 3): _LARGE}


def tiles_for(
    capability: tuple[int, int] | None,
    head_dim: int,
    itemsize: int,
    kind: str = "causal",
    costly: bool = False,
) -> TileSet:
    """The tiles for one device, head dim and dtype.

    Args:
        capability: CUDA compute capability, or None for the interpreter.
        head_dim: `D`; looked up at the next of 64, 128 and 256.
        itemsize: Bytes per element of query, key and value.
        kind: Of visibility. A dense mask is loaded beside the keys: half the rows keep it, and
            the scores, in registers.
        costly: Whether scores have a softcap or weights dropout, whose arithmetic takes registers
            that the largest tile of four warps does not leave.
    """
    if capability is None:
        return INTERPRETER
    block_d = 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256
    if itemsize == 4:
        return _FP32[block_d]
    tiles = _BY_CAPABILITY.get(capability, _SMALL)[block_d]
    if costly and tiles.dkdv.warps == 4:
        tiles = tiles._replace(dkdv=tiles.dkdv._replace(block_m=32))
    if kind == "dense":
        return tiles._replace(forward=tiles.forward._replace(block_m=64, warps=8))
    return tiles
