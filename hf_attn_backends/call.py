"""`AttentionCall`: the frozen description of one attention call, and its class.

Shapes: `B` batch, `H` query heads, `G` key/value heads, `M` query length, `N` key length, `D`
head dim, `E` the value's head dim. Layout is SDPA's: query `[B, H, M, D]`, key `[B, G, N, D]`,
value `[B, G, N, E]`, key/value heads not repeated: query head `h` reads head `h // (H // G)`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_attn_backends.call_class import (
    FEATURES,
    CallClass,
    class_name,
    dtype_name,
    features_name,
)
from hf_attn_backends.call_rules import check_scalars, check_tensor, check_tensors, mask_kind
from hf_attn_backends.errors import InvalidCallError

if TYPE_CHECKING:
    from hf_attn_backends.kernels.visibility import Visibility

__all__ = [
    "FEATURES",
    "AttentionCall",
    "CallClass",
    "class_name",
    "dtype_name",
    "features_name",
]


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
        for name, tensor in (("attn_mask", attn_mask), ("sinks", sinks)):
            if tensor is not None:
                check_tensor(name, tensor)
        if visibility is None:
            kind, bias = mask_kind(query, key, attn_mask, is_causal, window)
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
