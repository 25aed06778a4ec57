"""Launch the portable backward kernels."""

# A launch unpacks strides into positional arguments, which pyright cannot count.
# pyright: reportCallIssue=false
from __future__ import annotations

import torch
from torch import Tensor

from hf_attn_backends.kernels.triton.backward_kernels import (
    _attn_bwd_delta_kernel,
    _attn_bwd_dkdv_kernel,
    _attn_bwd_dq_kernel,
)
from hf_attn_backends.kernels.triton.launch import (
    Arguments,
    block_d,
    compute_dtype,
    describable,
    describe,
    launch_kernel,
    launch_options,
    on_device,
    precision,
    rows_contiguous,
    rows_first,
    tiles_of,
    visibility_arguments,
    wide,
)
from hf_attn_backends.kernels.triton.tiles import Tile, TileSet
from hf_attn_backends.kernels.visibility import Visibility

_SCAN = 1024  # rows of intervals read at a time


def launch_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    visibility: Visibility,
    scale: float,
    *,
    need_dq: bool = True,
    need_dkdv: bool = True,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    tiles: TileSet | None = None,
    descriptors: bool = True,
) -> tuple[Tensor, ...]:
    """Run the backward kernels.

    Args:
        grad_out: `[B, H, M, E]`, any strides.
        query: `[B, H, M, D]`.
        key: `[B, G, N, D]`.
        value: `[B, G, N, E]`.
        out: `[B, H, M, E]`, the forward pass's output.
        lse: `[B, H, M]`, the forward pass's, natural log.
        visibility: As in the forward pass.
        scale: As in the forward pass.
        need_dq: Whether the query's gradient is wanted; else it comes back empty `[0]`.
        need_dkdv: Likewise for key and value.
        softcap: As in the forward pass, with `sinks`, `dropout_p` and `seed`.
        sinks: See `softcap`.
        dropout_p: See `softcap`.
        seed: See `softcap`.
        tiles: In place of the table's entries; for benchmarks.
        descriptors: False keeps to pointers where tensor descriptors could be used.

    Returns:
        dQ `[B, H, M, D]`, dK `[B, G, N, D]` and dV `[B, G, N, E]`, views of `[B, M, H, D]`
        memory, in the query's dtype; with sinks, also dSinks `[H]` fp32. Deterministic: every
        element is written once, by one program.
    """
    batch, heads, q_len, head_dim = query.shape
    kv_heads, k_len, value_dim = key.shape[1], key.shape[2], value.shape[3]
    dtype = compute_dtype(query)
    if dtype != query.dtype:
        cast = [t.to(dtype) for t in (grad_out, query, key, value, out)]
        grads = launch_backward(
            *cast, lse, visibility, scale, need_dq=need_dq, need_dkdv=need_dkdv,
            softcap=softcap, sinks=sinks, dropout_p=dropout_p, seed=seed,
        )  # fmt: skip
        return *(grad.to(query.dtype) for grad in grads[:3]), *grads[3:]
    # Three tensors, not one: outputs of an operator must not alias each other.
    dq, dk, dv = query.new_empty(0), query.new_empty(0), query.new_empty(0)
    if need_dq:
        dq, _ = rows_first(query, batch, heads, q_len, head_dim)
    if need_dkdv:
        dk, _ = rows_first(key, batch, kv_heads, k_len, head_dim)
        dv, _ = rows_first(value, batch, kv_heads, k_len, value_dim)
    if out.numel() == 0 or key.numel() == 0:
        none = () if sinks is None else (torch.zeros_like(sinks, dtype=torch.float32),)
        return dq.zero_(), dk.zero_(), dv.zero_(), *none
    query, key, value = rows_contiguous(query), rows_contiguous(key), rows_contiguous(value)
    grad_out, out = rows_contiguous(grad_out), rows_contiguous(out)
    delta = torch.empty_like(lse)
    vis = visibility_arguments(visibility, lse)
    bd, bv = block_d(head_dim), block_d(value_dim)
    capped, dropped = softcap > 0.0, dropout_p > 0.0
    tiles = tiles or tiles_of(query, visibility.kind, value_dim, costly=capped or dropped)
    drawn = lse if seed is None else seed
    tma = descriptors and describable(query, key, value, grad_out)
    is_wide = wide(query, key, value, grad_out, out)
    rows = 64 if bv <= 128 else 32
    index = query.device.index
    launch_kernel(
        _attn_bwd_delta_kernel, ("delta", index, dtype, value_dim, rows, is_wide),
        -(-q_len // rows) * batch * heads,
        Arguments(
            (out, grad_out, delta), (*out.stride()[:3], *grad_out.stride()[:3]), (heads, q_len)
        ),
        lambda: {
            "HEAD_DIM": value_dim, "BD": bv, "BM": rows, "WIDE": is_wide, **launch_options(4),
        },
    )  # fmt: skip
    inputs = (
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *grad_out.stride()[:3],
    )  # fmt: skip
    masks = (*vis.interval_strides, *vis.mask_strides)
    floats = (float(scale), float(softcap), float(dropout_p))
    compiled_for = (
        index, dtype, head_dim, value_dim, vis.kind, is_wide, capped, dropped,
    )  # fmt: skip

    def constants(tile: Tile) -> dict[str, object]:
        return {
            "HEAD_DIM": head_dim, "BD": bd, "VALUE_DIM": value_dim, "BV": bv, "SOFTCAP": capped,
            "DROPOUT": dropped, "BM": tile.block_m, "BN": tile.block_n, "KIND": vis.kind,
            "WIDE": is_wide, "TMA": tma, "PRECISION": precision(dtype), "STAGES": tile.stages,
            **launch_options(tile.warps),
        }  # fmt: skip

    if need_dkdv:
        tile = tiles.dkdv
        tiles_n = -(-k_len // tile.block_n)
        programs = tiles_n * batch * kv_heads
        counts = (heads, kv_heads, tiles_n, batch * kv_heads, q_len, k_len, vis.window)
        strides = (*inputs, *dk.stride()[:3], *dv.stride()[:3])
        others = (lse, delta, dk, dv, vis.intervals, vis.mask, drawn)
        if tma:
            with on_device(query):
                _attn_bwd_dkdv_kernel[(programs,)](
                    describe(query, tile.block_m, bd), key, value,
                    describe(grad_out, tile.block_m, bv), *others, *strides, *masks, *counts,
                    *floats, SCAN=_SCAN, **constants(tile),
                )  # fmt: skip
        else:
            launch_kernel(
                _attn_bwd_dkdv_kernel, ("dkdv", *compiled_for, tile), programs,
                Arguments(
                    (query, key, value, grad_out, *others), strides, (*masks, *counts, *floats), 5
                ),
                lambda: {"SCAN": _SCAN, **constants(tile)},
            )  # fmt: skip
    if need_dq:
        tile = tiles.dq
        tiles_m = -(-q_len // tile.block_m)
        programs = tiles_m * batch * heads
        counts = (heads, heads // kv_heads, tiles_m, batch * heads, q_len, k_len, vis.window)
        strides = (*inputs, *dq.stride()[:3])
        others = (grad_out, lse, delta, dq, vis.intervals, vis.mask, drawn)
        if tma:
            with on_device(query):
                _attn_bwd_dq_kernel[(programs,)](
                    query, describe(key, tile.block_n, bd), describe(value, tile.block_n, bv),
                    *others, *strides, *masks, *counts, *floats, **constants(tile),
                )  # fmt: skip
        else:
            launch_kernel(
                _attn_bwd_dq_kernel, ("dq", *compiled_for, tile), programs,
                Arguments((query, key, value, *others), strides, (*masks, *counts, *floats), 5),
                lambda: constants(tile),
            )  # fmt: skip
    if sinks is None:
        return dq, dk, dv
    return dq, dk, dv, _sinks_gradient(sinks, lse, delta)


def _sinks_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """Gradient of the sinks, `[H]` fp32: -sum over rows of exp(sink - lse) * delta.

    A sink carries no value. `torch.sum` adds in one order: deterministic. -inf is no sink at all.
    """
    logits = sinks.float()[None, :, None]
    share = torch.where(logits == float("-inf"), 0.0, torch.exp(logits - lse))
    return -(share * delta).sum((0, 2))
