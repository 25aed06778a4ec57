"""What arguments make an attention call: one error that names the argument, the rule, what came.

Shapes: `B` batch, `H` query heads, `G` key/value heads, `M` query length, `N` key length, `D`
head dim, `E` the value's head dim.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hf_attn_backends.call_class import dtype_name
from hf_attn_backends.errors import InvalidCallError, InvalidDtypeError

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise unless the three tensors make an attention call."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, tensor)
        if tensor.dim() != 4:
            raise InvalidCallError(
                f"{name} must have 4 dimensions [batch, heads, length, head_dim], "
                f"got shape {tuple(tensor.shape)}"
            )
    if not query.dtype == key.dtype == value.dtype:
        raise InvalidDtypeError(
            "query, key and value must have one dtype, got "
            f"{dtype_name(query.dtype)}, {dtype_name(key.dtype)} and {dtype_name(value.dtype)}"
        )
    if query.dtype not in _DTYPES:
        raise InvalidDtypeError(
            f"query must be one of {', '.join(map(dtype_name, _DTYPES))}, "
            f"got {dtype_name(query.dtype)}"
        )
    if not query.device == key.device == value.device:
        raise InvalidCallError(
            "query, key and value must be on one device, got "
            f"{query.device}, {key.device} and {value.device}"
        )
    b, h, _, d = query.shape
    if key.shape[0] != b or value.shape[0] != b:
        raise InvalidCallError(
            f"key and value must have the query's batch {b}, "
            f"got {key.shape[0]} and {value.shape[0]}"
        )
    if key.shape[3] != d:
        raise InvalidCallError(f"key must have the query's head_dim {d}, got {key.shape[3]}")
    if value.shape[1] != key.shape[1]:
        raise InvalidCallError(
            f"value must have as many heads as key, got {value.shape[1]} and {key.shape[1]}"
        )
    if value.shape[2] != key.shape[2]:
        raise InvalidCallError(
            f"value must be as long as key, got lengths {value.shape[2]} and {key.shape[2]}"
        )
    g = key.shape[1]
    if g == 0 or h == 0 or h % g:
        raise InvalidCallError(
            f"query heads must be a whole multiple of key heads, got {h} over {g}"
        )


def check_scalars(
    *, window: int | None = None, softcap: float | None = None, dropout_p: float = 0.0
) -> None:
    """Raise unless window, softcap and dropout are in range."""
    # Lengths and factors that come out of a traced graph are symbols, and compare like numbers.
    if window is not None and isinstance(window, bool | float | str | bytes | list | tuple):
        raise InvalidCallError(f"window must be a whole number of keys or None, got {window!r}")
    if window is not None and window <= 0:
        raise InvalidCallError(f"window must be at least 1 key or None, got {window}")
    if softcap is not None and (isinstance(softcap, str) or not 0 < softcap < math.inf):
        raise InvalidCallError(
            f"softcap must be greater than 0 and finite, or None, got {softcap!r}"
        )
    if isinstance(dropout_p, str) or not 0.0 <= dropout_p < 1.0:
        raise InvalidCallError(f"dropout_p must be in [0, 1), got {dropout_p!r}")


def check_tensor(name: str, value: object) -> None:
    """Raise unless an argument is a tensor."""
    if not isinstance(value, Tensor):
        raise InvalidCallError(f"{name} must be a tensor, got {value!r}")


def mask_kind(
    query: Tensor, key: Tensor, attn_mask: Tensor | None, is_causal: bool, window: int | None
) -> tuple[str, bool]:
    """The visibility kind of the arguments, and whether they carry an additive bias.

    Raises:
        InvalidCallError: They contradict each other, or the mask does not broadcast.
        InvalidDtypeError: The mask is neither bool nor in the query's dtype.
    """
    if attn_mask is None:
        if window is not None and not is_causal:
            raise InvalidCallError(f"window must come with is_causal=True, got window={window}")
        return (("window" if window is not None else "causal") if is_causal else "full"), False
    if is_causal or window is not None:
        raise InvalidCallError(
            "attn_mask must come alone (write causality and the window into it), "
            f"got is_causal={is_causal}, window={window} beside it"
        )
    b, h, m, n = query.shape[0], query.shape[1], query.shape[2], key.shape[2]
    if attn_mask.dtype == torch.int32 and attn_mask.dim() == 3 and attn_mask.shape[-1] == 2:
        if attn_mask.shape[0] not in (1, b) or attn_mask.shape[1] != m:
            raise InvalidCallError(
                f"intervals must have shape ({b}, {m}, 2), got {tuple(attn_mask.shape)}"
            )
        return "intervals", False
    if attn_mask.dim() > 4 or any(
        have not in (1, want)
        for have, want in zip(reversed(attn_mask.shape), (n, m, h, b), strict=False)
    ):
        raise InvalidCallError(
            f"attn_mask must broadcast to ({b}, {h}, {m}, {n}), got {tuple(attn_mask.shape)}"
        )
    if attn_mask.dtype == torch.bool:
        return "dense", False
    if attn_mask.dtype != query.dtype:
        raise InvalidDtypeError(
            f"attn_mask must be bool or {dtype_name(query.dtype)}, "
            f"got {dtype_name(attn_mask.dtype)}"
        )
    return "dense", True
