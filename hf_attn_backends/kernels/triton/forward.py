"""Launch the portable forward kernel."""

# A launch unpacks strides into positional arguments, which pyright cannot count.
# pyright: reportCallIssue=false
from __future__ import annotations

import torch
import triton
from torch import Tensor

from hf_attn_backends.kernels.triton.forward_kernels import _attn_fwd_kernel
from hf_attn_backends.kernels.triton.launch import (
    block_d,
    compute_dtype,
    launch_options,
    on_device,
    precision,
    rows_contiguous,
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
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the forward kernel.

    Args:
        query: `[B, H, M, D]`, bf16, fp16 or fp32, any strides.
        key: `[B, G, N, D]`.
        value: `[B, G, N, D]`.
        visibility: Which keys each row sees.
        scale: Factor of the scores.
        tile: In place of the table's entry; for benchmarks.

    Returns:
        The output `[B, H, M, D]`, a view of `[B, M, H, D]` memory, in the query's dtype, and the
        log-sum-exp `[B, H, M]`, fp32, natural log, -inf for rows that see nothing. Deterministic.
    """
    batch, heads, q_len, head_dim = query.shape
    k_len, group = key.shape[2], heads // key.shape[1]
    out = query.new_empty(batch, q_len, heads, head_dim).transpose(1, 2)
    lse = torch.empty(batch, heads, q_len, dtype=torch.float32, device=query.device)
    if out.numel() == 0:
        return out, lse
    dtype = compute_dtype(query)
    if dtype != query.dtype:
        wider, lse = launch_forward(
            query.to(dtype), key.to(dtype), value.to(dtype), visibility, scale
        )
        return out.copy_(wider), lse
    query, key, value = rows_contiguous(query), rows_contiguous(key), rows_contiguous(value)
    tile = tile or tiles_of(query, visibility.kind).forward
    vis = visibility_arguments(visibility, lse)
    tiles_m = triton.cdiv(q_len, tile.block_m)
    with on_device(query):
        _attn_fwd_kernel[(tiles_m * batch * heads,)](
            query, key, value, out, lse, vis.intervals, vis.mask,
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *out.stride()[:3],
            *vis.interval_strides, *vis.mask_strides,
            heads, group, tiles_m, batch * heads, q_len, k_len, vis.window, scale,
            HEAD_DIM=head_dim, BD=block_d(head_dim), BM=tile.block_m, BN=tile.block_n,
            KIND=vis.kind, WIDE=wide(query, key, value, out),
            HEAD_MAJOR=vis.kind == "full", PRECISION=precision(dtype), STAGES=tile.stages,
            **launch_options(tile.warps),
        )  # fmt: skip
    return out, lse
