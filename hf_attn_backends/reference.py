"""Attention written from its definition: the oracle of the gate and of the tests.

Shapes: `B` batch, `H` query heads, `G` key/value heads, `M` query length, `N` key length, `D`
head dim, `E` the value's head dim. Everything is computed in one dtype, fp64 unless told
otherwise, with scores `[B, H, M, N]` in memory; autograd differentiates it. The mask code is this
file's own and shares nothing with the kernels', so that a mistake in theirs cannot hide here.
Needs torch alone: no Triton, no GPU.

With `dtype` set to the inputs' own dtype it is eager attention in that dtype, the yardstick where
SDPA has no such call (softcap, sinks).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from hf_attn_backends.kernels.visibility import Visibility


class ReferenceGrads(NamedTuple):
    """What `attention_reference_grads` returns; every tensor in the reference's dtype."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks: Tensor | None = None


def visible_keys(
    batch: int,
    heads: int,
    q_len: int,
    k_len: int,
    device: torch.device | str,
    *,
    visibility: Visibility | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    window: int | None = None,
) -> Tensor:
    """Which keys each row sees, `[B, H, M, N]` bool (expanded, not copied).

    Row `i` stands at position `i + N - M`: the last query is the last key's. Causal rows see the
    keys at or before their position, a window the last `window` of those, intervals
    `start <= j < end`, a boolean mask where it is True. An additive mask hides a key where it is
    -inf or its dtype's most negative number, transformers' two spellings of "hidden".
    """
    intervals = dense = None
    if visibility is not None:
        is_causal, window = visibility.causal, visibility.window
        intervals, dense = visibility.intervals, visibility.dense
    elif attn_mask is not None:
        if attn_mask.dtype == torch.int32 and attn_mask.dim() == 3:
            intervals = attn_mask
        elif attn_mask.dtype == torch.bool:
            dense = attn_mask
        else:
            dense = attn_mask > torch.finfo(attn_mask.dtype).min
    key = torch.arange(k_len, device=device)
    position = torch.arange(q_len, device=device)[:, None] + (k_len - q_len)
    seen = torch.ones(1, 1, q_len, k_len, dtype=torch.bool, device=device)
    if is_causal:
        seen = seen & (key <= position)
    if window is not None:
        seen = seen & (position - key < window)
    if intervals is not None:
        first, end = intervals[..., 0].to(device), intervals[..., 1].to(device)
        seen = seen & ((key >= first[..., None]) & (key < end[..., None]))[:, None]
    if dense is not None:
        seen = seen & dense.to(device)
    return seen.expand(batch, heads, q_len, k_len)


def attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    visibility: Visibility | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    kept: Tensor | None = None,
    dropout_p: float = 0.0,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Softmax attention (arXiv 1706.03762, eq. 1) with everything that transformers adds.

    Args:
        query: `[B, H, M, D]`.
        key: `[B, G, N, D]`; query head `h` reads head `h // (H // G)`.
        value: `[B, G, N, E]`.
        visibility: Which keys a row sees; in place of the next three.
        attn_mask: Bool (True: seen), additive, or int32 intervals `[B, M, 2]`.
        is_causal: Aligned to the last key.
        window: With `is_causal`: how many keys a row sees, its own included.
        scale: Default `D ** -0.5`.
        softcap: `c` in `c * tanh(scores / c)`, after the scale, before bias and mask.
        sinks: `[H]` logits that join each head's denominator and carry no value.
        bias: Added to the scores; broadcastable to `[B, H, M, N]`.
        kept: `[B, H, M, N]` bool, the weights that dropout leaves; they are divided by
            `1 - dropout_p`, the others are 0. The denominator is that of all.
        dropout_p: With `kept`.
        dtype: Of every operation and of the results.

    Returns:
        `out` `[B, H, M, E]` and `lse` `[B, H, M]`, the natural logarithm of the denominator (the
        sink included). A row that sees nothing: `out` 0, `lse` -inf (the sink's logit with sinks).
    """
    b, h, m, d = query.shape
    g, n = key.shape[1], key.shape[2]
    seen = visible_keys(
        b, h, m, n, query.device,
        visibility=visibility, attn_mask=attn_mask, is_causal=is_causal, window=window,
    )  # fmt: skip
    q, k, v = (tensor.to(dtype) for tensor in (query, key, value))
    k = k.repeat_interleave(h // g, dim=1)
    v = v.repeat_interleave(h // g, dim=1)
    scores = (q @ k.transpose(-1, -2)) * (d**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.to(dtype)
    if attn_mask is not None and attn_mask.dtype.is_floating_point:
        scores = scores + torch.where(seen, attn_mask.to(dtype), 0.0)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        sink = sinks.to(dtype)[None, :, None, None].expand(b, h, m, 1)
        scores = torch.cat([scores, sink], dim=-1)
        v = torch.cat([v, torch.zeros_like(v[..., :1, :])], dim=-2)
    if scores.shape[-1] == 0:
        return q.new_zeros(b, h, m, v.shape[-1]), q.new_full((b, h, m), float("-inf"))
    peak = scores.detach().amax(-1, keepdim=True)
    peak = torch.where(peak == float("-inf"), 0.0, peak)
    weights = torch.exp(scores - peak)
    total = weights.sum(-1, keepdim=True)
    empty = total == 0
    safe = torch.where(empty, 1.0, total)  # before the division and the logarithm: no NaN gradients
    weights = weights / safe
    if kept is not None:
        weights = torch.cat(
            [weights[..., :n] * kept / (1.0 - dropout_p), weights[..., n:]], dim=-1
        )  # a sink beside them carries no value
    out = weights @ v
    lse = torch.where(empty, float("-inf"), peak + torch.log(safe))[..., 0]
    return out, lse


def attention_reference_grads(
    query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor, **kwargs: Any
) -> ReferenceGrads:
    """The reference and its gradients for one `grad_out` `[B, H, M, E]`.

    Takes `attention_reference`'s keyword arguments. The inputs are left without gradients; dK and
    dV are `[B, G, N, ...]`, summed over the query heads of each group. With sinks, dSinks `[H]`.
    """
    dtype = kwargs.get("dtype", torch.float64)
    sinks = kwargs.pop("sinks", None)
    inputs = (query, key, value) if sinks is None else (query, key, value, sinks)
    leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in inputs]
    if sinks is not None:
        kwargs["sinks"] = leaves[3]
    with torch.enable_grad():
        out, lse = attention_reference(*leaves[:3], **kwargs)
        if out.requires_grad:
            grads = torch.autograd.grad(
                out, leaves, grad_out.to(dtype), allow_unused=True, materialize_grads=True
            )
        else:  # no keys at all
            grads = [torch.zeros_like(leaf) for leaf in leaves]
    return ReferenceGrads(out.detach(), lse.detach(), *(grad.detach() for grad in grads))
