"""Launch the portable forward kernel."""

# A launch unpacks strides into positional arguments, which pyright cannot count.
# pyright: reportCallIssue=false
from __future__ import annotations

from torch import Tensor

from hf_attn_backends.kernels.triton.forward_kernels import _attn_fwd_kernel
from hf_attn_backends.kernels.triton.launch import (
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
    tiles_m = -(-q_len // tile.block_m)
    programs = tiles_m * batch * heads
    sinks = None if sinks is None else sinks.contiguous()
    pointers = (
        query, key, value, out, lse, vis.intervals, vis.mask, lse if sinks is None else sinks,
        lse if seed is None else seed,
    )  # fmt: skip
    addresses = tuple([tensor.data_ptr() for tensor in pointers])
    strides = (*query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *out_strides)
    *mask_strides, between_keys = vis.mask_strides
    masked = (*vis.interval_strides, *mask_strides)
    counts = (heads, heads // key.shape[1], tiles_m, batch * heads, q_len, key.shape[2], vis.window)
    floats = (float(scale), float(softcap), float(dropout_p))
    is_wide = wide(query, key, value, out)
    which = (
        "forward", query.device.index, dtype, head_dim, value_dim, tile, vis.kind, is_wide,
        softcap > 0.0, None if sinks is None else sinks.dtype, dropout_p > 0.0, between_keys,
    )  # fmt: skip
    kept = (
        between_keys in (0, 1) and max(masked) < 2**31 and regular(query, addresses, strides)
    )  # fmt: skip
    if kept and (block := block_of(which)) is not None:
        # Triton makes a constant of a stride that is 1, and no parameter.
        between = () if between_keys == 1 else (between_keys,)
        values = (*addresses, *strides, *masked, *between, *counts, *floats)
        block.launch(stream_of(query), programs, 1, values)
        return out, lse
    with on_device(query):
        compiled = _attn_fwd_kernel[(programs,)](
            *pointers, *strides, *masked, between_keys, *counts, *floats,
            HEAD_DIM=head_dim, BD=block_d(head_dim), VALUE_DIM=value_dim, BV=block_d(value_dim),
            BM=tile.block_m, BN=tile.block_n,
            KIND=vis.kind, WIDE=is_wide,
            HEAD_MAJOR=vis.kind == "full",
            SOFTCAP=softcap > 0.0, SINKS=sinks is not None, DROPOUT=dropout_p > 0.0,
            PRECISION=precision(dtype), STAGES=tile.stages,
            **launch_options(tile.warps),
        )  # fmt: skip
    if kept:
        keep_block(which, compiled, "q" * 9 + "i" * (25 - (between_keys == 1)) + "fff")
    return out, lse
