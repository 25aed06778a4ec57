"""Launch the portable forward kernel."""

# A launch unpacks strides into positional arguments, which pyright cannot count.
# pyright: reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hf_attn_backends.kernels.triton.forward_kernels import _attn_fwd_kernel
from hf_attn_backends.kernels.triton.launch import (
    INTERPRETED,
    WIDE_FROM,
    VisibilityArguments,
    block_d,
    block_of,
    compute_dtype,
    keep_block,
    launch_options,
    on_device,
    precision,
    regular,
    row_sums,
    rows_contiguous,
    rows_first,
    stream_of,
    tiles_of,
    visibility_arguments,
    wide,
)
from hf_attn_backends.kernels.triton.tiles import Tile
from hf_attn_backends.kernels.visibility import Visibility

CODES = "q" * 9 + "i" * 25 + "fff"  # parameters of the kernel, see `kernels.block`


def launch_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visibility: Visibility,
    scale: float,
    *,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the forward kernel.

    Args:
        query: `[B, H, M, D]`, bf16, fp16 or fp32, any strides.
        key: `[B, G, N, D]`.
        value: `[B, G, N, E]`; `E` may differ from `D`.
        visibility: Which keys each row sees.
        scale: Factor of the scores.
        softcap: `c` in `c * tanh(scores / c)`; 0: none.
        sinks: `[H]` logits that join each row's denominator, any floating dtype.
        dropout_p: Probability of dropping a weight; the others are divided by `1 - dropout_p`.
        seed: With dropout: `[1]` int64 on the query's device; decides the mask.
        tile: In place of the table's entry; for benchmarks.

    Returns:
        The output `[B, H, M, E]`, a view of `[B, M, H, E]` memory, in the query's dtype, and the
        log-sum-exp `[B, H, M]`, fp32, natural log, -inf for rows that see nothing. With sinks it
        includes them: a row that sees nothing else has its sink. Deterministic.
    """
    batch, heads, q_len, head_dim = query.shape
    value_dim = value.shape[3]
    out, out_strides = rows_first(query, batch, heads, q_len, value_dim)
    lse = row_sums(query, batch, heads, q_len)
    if out.numel() == 0:
        return out, lse
    dtype = compute_dtype(query)
    if dtype != query.dtype:
        wider, lse = launch_forward(
            query.to(dtype), key.to(dtype), value.to(dtype), visibility, scale,
            softcap=softcap, sinks=sinks, dropout_p=dropout_p, seed=seed,
        )  # fmt: skip
        return out.copy_(wider), lse
    query, key, value = rows_contiguous(query), rows_contiguous(key), rows_contiguous(value)
    tile = tile or tiles_of(query, visibility.kind, value_dim).forward
    vis = visibility_arguments(visibility, lse)
    sinks = None if sinks is None else sinks.contiguous()
    work = _Work.of(query, key, value, vis, out_strides, scale, softcap, sinks, dropout_p, tile)
    pointers = (
        query, key, value, out, lse, vis.intervals, vis.mask, lse if sinks is None else sinks,
        lse if seed is None else seed,
    )  # fmt: skip
    addresses = tuple([tensor.data_ptr() for tensor in pointers])
    kept = work.regular and regular(query, addresses, work.strides)
    block = block_of(work.which) if kept else None
    if block is not None:
        block.launch(stream_of(query), work.programs, 1, addresses + work.tail)
        return out, lse
    with on_device(query):
        compiled = _attn_fwd_kernel[(work.programs,)](
            *pointers, *work.strides, *work.numbers,
            HEAD_DIM=head_dim, BD=block_d(head_dim), VALUE_DIM=value_dim, BV=block_d(value_dim),
            BM=tile.block_m, BN=tile.block_n,
            KIND=vis.kind, WIDE=work.is_wide,
            HEAD_MAJOR=vis.kind == "full",
            SOFTCAP=softcap > 0.0, SINKS=sinks is not None, DROPOUT=dropout_p > 0.0,
            PRECISION=precision(dtype), STAGES=tile.stages,
            **launch_options(tile.warps),
        )  # fmt: skip
    if kept:
        keep_block(work.which, compiled, CODES[:9] + CODES[9 + work.ones :])
    return out, lse


def bind(
    query: Tensor, key: Tensor, value: Tensor, visibility: Visibility, scale: float
) -> Callable[[Tensor, Tensor, Tensor, Visibility], tuple[Tensor, Tensor]] | None:
    """`launch_forward` for calls of one layout, see `counted.Lane`.

    Args:
        query, key, value, visibility, scale: Of a call that was launched.

    Returns:
        None where that call did not go by a kept block.
    """
    last = (
        query,
        key,
        value,
        *([visibility.intervals] if visibility.intervals is not None else []),
    )
    if INTERPRETED or any(tensor.stride(-1) != 1 for tensor in last):  # copied for each launch
        return None
    batch, heads, q_len, _ = query.shape
    value_dim = value.shape[3]
    row = heads * value_dim
    out_strides = (q_len * row, value_dim, row)
    vis = visibility_arguments(visibility, query)
    tile = tiles_of(query, vis.kind, value_dim).forward
    work = _Work.of(query, key, value, vis, out_strides, scale, 0.0, None, 0.0, tile)
    block = block_of(work.which)
    if block is None or not work.regular or not regular(query, (0,), work.strides):
        return None
    index, programs, tail = query.device.index, work.programs, work.tail

    def launch(
        query: Tensor, key: Tensor, value: Tensor, visibility: Visibility
    ) -> tuple[Tensor, Tensor]:
        intervals, mask = visibility.intervals, visibility.dense
        rows = 0 if intervals is None else intervals.data_ptr()
        seen = 0 if mask is None else mask.data_ptr()
        if (rows | seen) & 15 or index != torch.cuda.current_device():
            return launch_forward(query, key, value, visibility, scale)
        out, _ = rows_first(query, batch, heads, q_len, value_dim)
        lse = row_sums(query, batch, heads, q_len)
        sums = lse.data_ptr()
        addresses = (
            query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr(), sums, rows or sums,
            seen or sums, sums, sums,
        )  # fmt: skip
        stream = torch._C._cuda_getCurrentRawStream(index)
        block.launch(stream, programs, 1, addresses + tail)
        return out, lse

    return launch


class _Work(NamedTuple):
    """What shapes, strides and device decide of a launch.

    Attributes:
        programs: Of the grid.
        strides, numbers: Arguments behind the pointers; Triton specialises the former, and the
            stride between a mask's keys.
        ones: 1 where that one is 1: Triton makes a constant of it, and no parameter.
        regular: Whether it is 1 or 0, and nothing needs more than 32 bits.
        is_wide: Whether a tile spans more than 32 bits.
        which: The name of the kernel's block.
    """

    programs: int
    strides: tuple[int, ...]
    numbers: tuple[int | float, ...]
    ones: int
    regular: bool
    is_wide: bool
    which: tuple[object, ...]

    @classmethod
    def of(
        cls, query: Tensor, key: Tensor, value: Tensor, vis: VisibilityArguments,
        out_strides: tuple[int, int, int], scale: float, softcap: float, sinks: Tensor | None,
        dropout_p: float, tile: Tile,
    ) -> _Work:  # fmt: skip
        """Of a call."""
        batch, heads, q_len, head_dim = query.shape
        tiles_m = -(-q_len // tile.block_m)
        between_keys = vis.mask_strides[3]
        masked = (*vis.interval_strides, *vis.mask_strides)
        counts = (
            heads, heads // key.shape[1], tiles_m, batch * heads, q_len, key.shape[2], vis.window,
        )  # fmt: skip
        is_wide = wide(query, key, value) or out_strides[2] >= WIDE_FROM
        which = (
            "forward", query.device.index, query.dtype, head_dim, value.shape[3], tile, vis.kind,
            is_wide, softcap > 0.0, None if sinks is None else sinks.dtype, dropout_p > 0.0,
            between_keys,
        )  # fmt: skip
        return cls(
            tiles_m * batch * heads,
            (*query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *out_strides),
            (*masked, *counts, float(scale), float(softcap), float(dropout_p)),
            int(between_keys == 1),
            between_keys in (0, 1) and max(masked) < 2**31,
            is_wide,
            which,
        )

    @property
    def tail(self) -> tuple[int | float, ...]:
        """The parameters behind the pointers."""
        numbers = self.numbers
        if self.ones:
            numbers = numbers[:5] + numbers[6:]
        return self.strides + numbers
