"""Masks of four dimensions, as they arrive at the attention function.

Int32 `[B, 1, M, 2]` are the mask function's own intervals. A user's own mask is boolean (True: the
key is seen) or additive (0: seen, -inf or thereabouts: hidden). Its values are read once for each
tensor, never for each layer. An additive mask with any other value is a bias, and is refused.

Shapes: `B` batch, `H` query heads, `M` query length, `N` key length.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.utils.import_utils import is_tracing

from hf_attn_backends.errors import CallRefusedError, compose
from hf_attn_backends.hf.memo import DENSE, MASKS
from hf_attn_backends.kernels.visibility import Visibility, intervals_from_dense

HIDDEN = -1e4  # BERT's old -10000 and all beyond: exp() of it is 0 in every dtype

_READ = "visibility"
_AS_IT_IS = "dense, the mask itself"
_last: tuple[Tensor | None, Visibility | None] = (None, None)


def visibility_of(mask: Any, q_length: int, k_length: int) -> Visibility:
    """Read a mask that came with a call.

    Args:
        mask: `[B, 1, M, 2]` int32, or `[1 or B, 1 or H, M, >= N]` bool or floating point.
        q_length, k_length: `M`, `N`.

    Raises:
        CallRefusedError: No tensor of four dimensions, of another dtype, or a bias.
    """
    compiling = torch.compiler.is_compiling()
    if not compiling:
        last, visibility = _last
        if mask is last and visibility is not None:
            return visibility
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        raise _refused(
            f"attention_mask must be a tensor of 4 dimensions, got {_describe(mask)}; the mask "
            "function of this backend was passed by, or the model calls attention in its own way"
        )
    if mask.dtype == torch.int32 and mask.shape[-1] == 2 and mask.shape[1] == 1:
        return _own(mask)
    kept: dict = {}
    if not compiling:
        kept = MASKS.of(mask)
        found = kept.get((_READ, q_length, k_length))
        if found is not None:
            return Visibility(dense=mask) if found is _AS_IT_IS else found
    tracing = is_tracing(mask)  # also fake tensors and captured streams: nothing can be read
    if mask.dtype == torch.bool:
        seen, read = mask, q_length > 1 and not tracing and mask not in DENSE
    elif mask.dtype.is_floating_point:
        if tracing and not compiling:  # torch.compile breaks the graph at the reading instead
            raise _refused("an additive attention_mask cannot be read while a graph is captured")
        seen, read = mask == 0, not compiling
        if not bool((seen | (mask <= HIDDEN)).all()):
            raise _refused(_bias(mask))
    else:
        raise _refused(
            "attention_mask must be bool (True: seen) or floating point (0: seen, -inf: hidden), "
            f"got {mask.dtype}"
        )
    if seen.shape[-1] != k_length:
        seen = seen[..., :k_length]
    if seen.shape[2] not in (q_length, 1) or seen.shape[-1] not in (k_length, 1):
        raise _refused(
            f"attention_mask must end in ({q_length}, {k_length}) or longer keys, "
            f"got shape {tuple(mask.shape)}"
        )
    if seen.shape[-2:] != (q_length, k_length):
        seen = seen.expand(-1, -1, q_length, k_length)
    rows = intervals_from_dense(seen) if read and q_length > 1 else None
    visibility = Visibility(dense=seen) if rows is None else Visibility(intervals=rows)
    own_memory = seen is not mask and seen._base is not mask
    if rows is not None or own_memory:  # a view of the mask would keep it alive for ever
        kept[_READ, q_length, k_length] = visibility
    elif read:
        DENSE.add(mask)
    if seen is mask and rows is None and not tracing:
        kept[_READ, q_length, k_length] = _AS_IT_IS
    return visibility


def _own(mask: Tensor) -> Visibility:
    """The mask function's intervals; every layer of a model gets the same tensor."""
    global _last
    if torch.compiler.is_compiling():
        return Visibility(intervals=mask[:, 0])
    visibility = Visibility(intervals=mask[:, 0])
    _last = (mask, visibility)
    return visibility


def _bias(mask: Tensor) -> str:
    values = mask.detach().float()
    other = values[(values != 0) & ~(values <= HIDDEN)]
    return (
        "attention_mask is an additive bias: it holds values other than 0 (seen) and -inf "
        f"(hidden), such as {float(other[0]):.4g}, in {other.numel()} of {values.numel()} places"
    )


def _describe(mask: Any) -> str:
    return f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__


def _refused(reason: str) -> CallRefusedError:
    works = 'a boolean mask [batch, 1 or heads, queries, keys], or attn_implementation="eager"'
    return CallRefusedError(compose("this call cannot be served", [reason], works=works), [reason])
