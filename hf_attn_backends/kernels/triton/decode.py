"""Launch the decode kernels: few query rows, many keys, contiguous or in pages.

Shapes: `B` batch, `H` query heads, `G` key/value heads, `M` query length, `N` key length, `D`
head dim.

Whatever decides the launch (tiles, number of splits, size of the workspace) is read off shapes and
the device, never off values: no host synchronisation, and a captured CUDA graph stays right when
lengths, tables or intervals change under it.
"""

# A launch unpacks strides into positional arguments, which pyright cannot count.
# pyright: reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hf_attn_backends.errors import InvalidCallError
from hf_attn_backends.kernels.triton.decode_kernels import (
    _attn_decode_combine_kernel,
    _attn_decode_kernel,
)
from hf_attn_backends.kernels.triton.decode_tiles import DecodeTile, device_of
from hf_attn_backends.kernels.triton.decode_work import (
    CODES,
    COMBINE_CODES,
    Work,
    interval_arguments,
)
from hf_attn_backends.kernels.triton.launch import (
    INTERPRETED,
    block_d,
    compute_dtype,
    keep_block,
    launch_options,
    on_device,
    precision,
    regular,
    rows_contiguous,
    stream_of,
    wide,
)
from hf_attn_backends.kernels.visibility import Visibility

MAX_QUERY_LENGTH = 16


def refusals(query: Tensor, visibility: Visibility) -> list[str]:
    """Why the decode kernels cannot serve a call; empty when they can.

    Args:
        query: `[B, H, M, D]`.
        visibility: Which keys each row sees.
    """
    reasons = []
    if query.shape[2] > MAX_QUERY_LENGTH:
        reasons.append(f"q_len must be at most {MAX_QUERY_LENGTH}, got q_len {query.shape[2]}")
    if visibility.dense is not None:
        reasons.append("visibility must be full, causal, window or intervals, got dense")
    return reasons


def pipeline_stages(tile: DecodeTile, page: int) -> int:
    """Where a page is has to be loaded before what is in it, and takes stages of its own."""
    return 2 * tile.stages - 1 if page else tile.stages


def launch_decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visibility: Visibility,
    scale: float,
    *,
    lengths: Tensor | None = None,
    tile: DecodeTile | None = None,
    splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of a few query rows over contiguous keys.

    Args:
        query: `[B, H, M, D]`, bf16, fp16 or fp32, M at most 16, any strides.
        key: `[B, G, N, D]`, any strides.
        value: `[B, G, N, D]`, any strides.
        visibility: Which keys each row sees; not dense.
        scale: Factor of the scores.
        lengths: `[B]` int32, how many of the N keys each sequence has, or None: all. Causal
            visibility and windows are aligned to the last key of each.
        tile: In place of the table's entry; for benchmarks.
        splits: In place of the number that the shapes give; for benchmarks.

    Returns:
        The output `[B, H, M, D]`, a view of `[B, M, H, D]` memory, in the query's dtype, and the
        log-sum-exp `[B, H, M]`, fp32, natural log, -inf for rows that see nothing. Deterministic.
    """
    dtype = compute_dtype(query)
    if dtype != query.dtype:
        wider = (t.to(dtype) for t in (query, key, value))
        out, lse = launch_decode(
            *wider, visibility, scale, lengths=lengths, tile=tile, splits=splits
        )
        return out.to(query.dtype), lse
    key, value = rows_contiguous(key), rows_contiguous(value)
    return _launch(
        query, key, value, visibility, scale, key.shape[1], key.shape[2],
        key.stride()[:3], value.stride()[:3], lengths, None, 0, wide(key, value), tile, splits,
    )  # fmt: skip


def launch_paged_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    visibility: Visibility,
    scale: float,
    *,
    tile: DecodeTile | None = None,
    splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`launch_decode` over a paged cache.

    Args:
        query: `[B, H, M, D]`.
        key_cache: `[blocks, block_size, G, D]`, last dimension contiguous.
        value_cache: `[blocks, block_size, G, D]`, likewise.
        block_table: `[B, blocks of a sequence]` int32: key `n` of sequence `b` is row
            `n % block_size` of block `block_table[b, n // block_size]`. Entries beyond a
            sequence's length are never read.
        lengths: `[B]` int32.
        visibility: Over each sequence's keys, `0 <= n < lengths[b]`; not dense.
        scale: Factor of the scores.
        tile: As in `launch_decode`.
        splits: As in `launch_decode`.

    Returns:
        As `launch_decode`.
    """
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if cache.stride(3) != 1:  # never copied: a cache is the largest tensor there is
            raise InvalidCallError(
                f"{name} must have a contiguous last dimension, got strides {cache.stride()}"
            )
    dtype = compute_dtype(query)
    if dtype != query.dtype:
        wider = (t.to(dtype) for t in (query, key_cache, value_cache))
        out, lse = launch_paged_decode(
            *wider, block_table, lengths, visibility, scale, tile=tile, splits=splits
        )
        return out.to(query.dtype), lse
    if block_table.stride(1) != 1:
        block_table = block_table.contiguous()
    block_size, kv_heads = key_cache.shape[1], key_cache.shape[2]

    def strides(cache: Tensor) -> tuple[int, int, int]:
        return cache.stride(0), cache.stride(2), cache.stride(1)

    is_wide = wide(key_cache.transpose(1, 2), value_cache.transpose(1, 2))
    return _launch(
        query, key_cache, value_cache, visibility, scale, kv_heads,
        block_table.shape[1] * block_size, strides(key_cache), strides(value_cache),
        lengths, block_table, block_size, is_wide, tile, splits,
    )  # fmt: skip


def _launch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visibility: Visibility,
    scale: float,
    kv_heads: int,
    k_len: int,
    key_strides: tuple[int, ...],
    value_strides: tuple[int, ...],
    lengths: Tensor | None,
    table: Tensor | None,
    page: int,
    is_wide: bool,
    tile: DecodeTile | None,
    splits: int | None,
) -> tuple[Tensor, Tensor]:
    if query.shape[2] > MAX_QUERY_LENGTH or visibility.dense is not None:
        raise InvalidCallError("; ".join(refusals(query, visibility)))
    query = rows_contiguous(query)
    intervals, interval_strides = interval_arguments(visibility)
    work = Work.of(
        query, visibility, scale, kv_heads, k_len, key_strides, value_strides, interval_strides,
        lengths, table, page, is_wide, tile, splits,
    )  # fmt: skip
    out, lse, room = work.memory(query)
    if out.numel() == 0:
        return out, lse
    pointers = (
        query, key, value, out, lse, room, room[work.peaks :], room[work.denoms :],
        *(lse if tensor is None else tensor for tensor in (lengths, intervals, table)),
    )  # fmt: skip
    addresses = tuple([tensor.data_ptr() for tensor in pointers])
    kept = regular(query, addresses, work.strides)
    if kept and work.launch(stream_of(query), addresses):
        return out, lse
    pdl = _dependent_launches(query)
    options = {"launch_pdl": True} if pdl else {}
    tile, head_dim, bd = work.tile, query.shape[3], block_d(query.shape[3])
    with on_device(query):
        compiled = _attn_decode_kernel[(work.programs, work.splits)](
            *pointers, *work.strides, *work.numbers,
            KV_HEADS=kv_heads, GROUP=query.shape[1] // kv_heads, TILES_M=work.tiles_m,
            HEAD_DIM=head_dim, BD=bd, BM=tile.block_m, BN=tile.block_n,
            WARPS_APART=tile.warps_apart, KIND=visibility.kind, LENGTHS=lengths is not None,
            PAGE=page, SPLIT=work.splits > 1, WIDE=is_wide, PRECISION=precision(query.dtype),
            STAGES=pipeline_stages(tile, page), PDL=pdl, QUERY_IN_LOOP=tile.query_in_loop,
            **launch_options(tile.warps), **options,
        )  # fmt: skip
        if kept:
            keep_block(work.which, compiled, CODES)
        if work.splits > 1:
            compiled = _attn_decode_combine_kernel[(work.rows,)](
                *pointers[5:8], out, lse, *work.combined,
                HEAD_DIM=head_dim, BD=bd, SPLITS=work.padded, CHUNK=min(work.padded, 4096 // bd),
                PDL=pdl, **launch_options(4), **options,
            )  # fmt: skip
            if kept:
                keep_block(work.combine, compiled, COMBINE_CODES)
    return out, lse


def bind(
    query: Tensor, key: Tensor, value: Tensor, visibility: Visibility, scale: float
) -> Callable[[Tensor, Tensor, Tensor, Visibility], tuple[Tensor, Tensor]] | None:
    """`launch_decode` for calls of one layout, see `counted.Lane`: the layers of one step.

    Args:
        query, key, value, visibility, scale: Of a call that was launched.

    Returns:
        None where that call did not go by kept blocks.
    """
    intervals = visibility.intervals
    if intervals is not None and intervals.stride(2) != 1:  # copied for each launch
        return None
    if INTERPRETED or query.stride(3) != 1 or key.stride(3) != 1 or value.stride(3) != 1:
        return None
    _, interval_strides = interval_arguments(visibility)
    work = Work.of(
        query, visibility, scale, key.shape[1], key.shape[2], key.stride()[:3], value.stride()[:3],
        interval_strides, None, None, 0, wide(key, value), None, None,
    )  # fmt: skip
    if not regular(query, (0,), work.strides) or not work.blocks():
        return None
    index = query.device.index

    def launch(
        query: Tensor, key: Tensor, value: Tensor, visibility: Visibility
    ) -> tuple[Tensor, Tensor]:
        intervals = visibility.intervals
        place = 0 if intervals is None else intervals.data_ptr()
        if place & 15 or index != torch.cuda.current_device():
            return launch_decode(query, key, value, visibility, scale)
        out, lse, room = work.memory(query)
        sums, part = lse.data_ptr(), room.data_ptr()
        addresses = (
            query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr(), sums, part,
            part + 4 * work.peaks, part + 4 * work.denoms, sums, place or sums, sums,
        )  # fmt: skip
        if not work.launch(torch._C._cuda_getCurrentRawStream(index), addresses):
            return launch_decode(query, key, value, visibility, scale)
        return out, lse

    return launch


def _dependent_launches(query: Tensor) -> bool:
    """Whether a kernel may be launched before the one before it has ended, and wait in itself."""
    return not INTERPRETED and device_of(query.device.index).capability >= (9, 0)
