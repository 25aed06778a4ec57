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
    k_len, group = key.shape[2], heads // key.shape[1]
    value_dim = value.shape[3]
    out = query.new_empty(batch, q_len, heads, value_dim).transpose(1, 2)
    lse = torch.empty(batch, heads, q_len, dtype=torch.float32, device=query.device)
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
    tiles_m = triton.cdiv(q_len, tile.block_m)
    with on_device(query):
        _attn_fwd_kernel[(tiles_m * batch * heads,)](
            query, key, value, out, lse, vis.intervals, vis.mask,
            lse if sinks is None else sinks.contiguous(), lse if seed is None else seed,
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *out.stride()[:3],
            *vis.interval_strides, *vis.mask_strides,
            heads, group, tiles_m, batch * heads, q_len, k_len, vis.window, scale,
            softcap, dropout_p,
            HEAD_DIM=head_dim, BD=block_d(head_dim), VALUE_DIM=value_dim, BV=block_d(value_dim),
            BM=tile.block_m, BN=tile.block_n,
            KIND=vis.kind, WIDE=wide(query, key, value, out),
            HEAD_MAJOR=vis.kind == "full",
            SOFTCAP=softcap > 0.0, SINKS=sinks is not None, DROPOUT=dropout_p > 0.0,
            PRECISION=precision(dtype), STAGES=tile.stages,
            **launch_options(tile.warps),
        )  # fmt: skip
    return out, lse
