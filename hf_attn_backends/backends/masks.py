"""Visibility written out for PyTorch's kernels: boolean masks and additive ones.

Shapes: `B` batch, `H` query heads, `M` query length, `N` key length.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_attn_backends.kernels.visibility import CAUSAL, FULL, Visibility, intervals_of

# The last mask that was written, with what it was written from: the layers of a model ask for the
# same one in turn. One entry, and none above 64 MiB, so that little memory is kept alive.
_MAX_KEPT = 1 << 26
_last: tuple[tuple[object, ...], Tensor | None, Tensor] | None = None


def seen_mask(
    visibility: Visibility, q_len: int, k_len: int, device: torch.device
) -> Tensor | None:
    """`[1 or B, 1 or H, M, N]` bool, True where the key is seen; None where every key is."""
    global _last
    if visibility.dense is not None:
        return visibility.dense
    if visibility.kind == "full":
        return None
    if torch.compiler.is_compiling():
        return _written(visibility, q_len, k_len, device)
    rows = visibility.intervals
    version = None if rows is None or rows.is_inference() else rows._version
    # A tensor of inference mode cannot be saved for a backward pass.
    mode = torch.is_inference_mode_enabled()
    key = (visibility.causal, visibility.window, q_len, k_len, device, version, mode)
    held = _last
    if held is not None and held[0] == key and held[1] is rows:
        return held[2]
    mask = _written(visibility, q_len, k_len, device)
    if mask.numel() <= _MAX_KEPT and (rows is None or version is not None):
        _last = (key, rows, mask)
    return mask


def _written(visibility: Visibility, q_len: int, k_len: int, device: torch.device) -> Tensor:
    rows = intervals_of(visibility, q_len, k_len, device)
    keys = torch.arange(k_len, dtype=torch.int32, device=device)
    return ((keys >= rows[..., :1]) & (keys < rows[..., 1:]))[:, None]


def split_bias(bias: Tensor) -> tuple[Tensor, Tensor]:
    """Split an additive mask into what it hides and what it adds.

    A key is hidden where the bias is -inf or its dtype's lowest number, which is what
    transformers writes for it.

    Returns:
        `(seen, bias)`, bool and the bias with 0 at the hidden keys.
    """
    seen = bias > torch.finfo(bias.dtype).min
    return seen, bias.masked_fill(~seen, 0.0)


def no_keys(query: Tensor, value: Tensor) -> Tensor:
    """The output of a call without keys: zeros `[B, H, M, E]`, on the query's autograd graph."""
    batch, heads, q_len, _ = query.shape
    return query[..., :0].sum(-1, keepdim=True).expand(batch, heads, q_len, value.shape[-1])


def visibility_of(
    query: Tensor, key: Tensor, attn_mask: Tensor | None, is_causal: bool, window: int | None
) -> Visibility:
    """`attention`'s mask arguments as visibility; an additive mask is the caller's to apply."""
    if attn_mask is None or attn_mask.is_floating_point():
        if not is_causal:
            return FULL
        return CAUSAL if window is None else Visibility(causal=True, window=window)
    if attn_mask.dtype == torch.int32:
        return Visibility(intervals=attn_mask.expand(query.shape[0], -1, -1))
    mask = attn_mask[(None,) * (4 - attn_mask.dim())]
    return Visibility(dense=mask.expand(*mask.shape[:2], query.shape[2], key.shape[2]))
