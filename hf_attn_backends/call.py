"""`AttentionCall`: the frozen description of one attention call, and its class.

Shapes: `B` batch, `H` query heads, `G` key/value heads, `M` query length, `N` key length, `D`
head dim, `E` the value's head dim. Layout is SDPA's: query `[B, H, M, D]`, key `[B, G, N, D]`,
value `[B, G, N, E]`, key/value heads not repeated: query head `h` reads head `h // (H // G)`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hf_attn_backends.errors import InvalidCallError, InvalidDtypeError

if TYPE_CHECKING:
    from hf_attn_backends.kernels.visibility import Visibility

FEATURES = ("bias", "dropout", "sinks", "softcap", "value_dim")
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class CallClass(NamedTuple):
    """What the gate proves and the witness counts by; `str()` gives `bfloat16/d128/causal`.

    Attributes:
        dtype: `bfloat16`, `float16`, `float32`.
        head_dim: `D`.
        visibility: One of `kernels.visibility.KINDS`.
        features: Sorted, `+`-joined extras out of `FEATURES`.
    """

    dtype: str
    head_dim: int
    visibility: str
    features: str = ""

    def __str__(self) -> str:
        return class_name(*self)


@lru_cache(maxsize=4096)
def class_name(dtype: str, head_dim: int, visibility: str, features: str = "") -> str:
    """The one spelling of a call class."""
    return f"{dtype}/d{head_dim}/{visibility}" + (f"+{features}" if features else "")


@lru_cache(maxsize=64)
def features_name(
    *,
    bias: bool = False,
    dropout: bool = False,
    sinks: bool = False,
    softcap: bool = False,
    value_dim: bool = False,
) -> str:
    """The features of a class, in the one order that they are written in."""
    present = {
        "bias": bias,
        "dropout": dropout,
        "sinks": sinks,
        "softcap": softcap,
        "value_dim": value_dim,
    }
    return "+".join(name for name in FEATURES if present[name])


@lru_cache(maxsize=16)
def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """One attention call, without its tensors.

    Attributes:
        batch, heads, kv_heads, q_len, k_len, head_dim, value_head_dim: `B, H, G, M, N, D, E`.
        dtype: Of query, key and value alike.
        device: Where they are.
        visibility: Kind of mask, one of `kernels.visibility.KINDS`.
        window: Keys a row sees, itself included; None without a window.
        softcap: `c` in `c * tanh(scores / c)`, or None.
        sinks: Whether per-head sink logits come with the call.
        bias: Whether an additive bias other than 0 / -inf comes with it.
        dropout_p: Probability of dropping a weight.
        has_cache: Whether key and value come out of a KV cache.
        needs_grad: Whether a gradient is wanted of query, key or value.
        strides: Of query, key and value, in elements.
    """

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    k_len: int
    head_dim: int
    value_head_dim: int
    dtype: torch.dtype
    device: torch.device
    visibility: str
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    bias: bool = False
    dropout_p: float = 0.0
    has_cache: bool = False
    needs_grad: bool = False
    strides: tuple[tuple[int, ...], ...] = field(default=(), compare=False)

    @property
    def call_class(self) -> CallClass:
        """The class under which the gate covers this call and the witness counts it."""
        features = features_name(
            bias=self.bias,
            dropout=self.dropout_p > 0.0,
            sinks=self.sinks,
            softcap=self.softcap is not None,
            value_dim=self.value_head_dim != self.head_dim,
        )
        return CallClass(dtype_name(self.dtype), self.head_dim, self.visibility, features)

    @classmethod
    def of(
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        dropout_p: float = 0.0,
        kv_cache: object | None = None,
        visibility: Visibility | None = None,
    ) -> AttentionCall:
        """Describe a call and validate it.

        Args:
            query: `[B, H, M, D]`.
            key: `[B, G, N, D]`.
            value: `[B, G, N, E]`.
            attn_mask: Bool (True: seen) or additive in the query's dtype, broadcastable to
                `[B, H, M, N]`; or intervals `[B, M, 2]` int32. Not together with `is_causal`.
            is_causal: Row `i` sees key `j` iff `j <= i + N - M` (aligned to the last key).
            window: With `is_causal`: keys a row sees, its own included.
            softcap: `c` in `c * tanh(scores / c)`, after scaling, before the mask.
            sinks: `[H]` logits that join each head's denominator.
            dropout_p: In `[0, 1)`.
            kv_cache: The cache that key and value came from, or None.
            visibility: In place of `attn_mask`, `is_causal` and `window`.

        Raises:
            InvalidCallError: Names the argument, the rule and what came.
            InvalidDtypeError: Likewise, for dtypes.
        """
        check_tensors(query, key, value)
        check_scalars(window=window, softcap=softcap, dropout_p=dropout_p)
        if visibility is None:
            kind, bias = _mask_kind(query, key, attn_mask, is_causal, window)
        elif attn_mask is not None or is_causal or window is not None:
            raise InvalidCallError(
                "visibility must come alone, got attn_mask, is_causal or window beside it"
            )
        else:
            kind, bias, window = visibility.kind, False, visibility.window
        if sinks is not None and sinks.shape != (query.shape[1],):
            raise InvalidCallError(
                f"sinks must have shape ({query.shape[1]},), one logit a query head, "
                f"got {tuple(sinks.shape)}"
            )
        grad = query.requires_grad or key.requires_grad or value.requires_grad
        return cls(
            batch=query.shape[0],
            heads=query.shape[1],
            kv_heads=key.shape[1],
            q_len=query.shape[2],
            k_len=key.shape[2],
            head_dim=query.shape[3],
            value_head_dim=value.shape[3],
            dtype=query.dtype,
            device=query.device,
            visibility=kind,
            window=window,
            softcap=softcap,
            sinks=sinks is not None,
            bias=bias,
            dropout_p=dropout_p,
            has_cache=kv_cache is not None,
            needs_grad=grad and torch.is_grad_enabled(),
            strides=(query.stride(), key.stride(), value.stride()),
        )


def check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise unless the three tensors make an attention call."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
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
    if window is not None and window <= 0:
        raise InvalidCallError(f"window must be at least 1 key or None, got {window}")
    if softcap is not None and not softcap > 0:
        raise InvalidCallError(f"softcap must be greater than 0 or None, got {softcap}")
    if not 0.0 <= dropout_p < 1.0:
        raise InvalidCallError(f"dropout_p must be in [0, 1), got {dropout_p}")


def _mask_kind(
    query: Tensor, key: Tensor, attn_mask: Tensor | None, is_causal: bool, window: int | None
) -> tuple[str, bool]:
    """The visibility kind of the arguments, and whether they carry an additive bias."""
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
