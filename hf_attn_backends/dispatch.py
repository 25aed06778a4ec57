"""Call time: who serves this attention call.

Precedence: `backend=` argument > `attn_backend(...)` context > `HF_ATTN_BACKEND` > default order.
Argument and context are explicit: that backend serves, or the call raises with every reason. The
environment and the default are preferences: they fall back by capability, the substitution is
logged once for each call class and counted by the witness. An unknown name raises in all of them.

Inside `torch.compile` the choice is made when the graph is traced: the context is guarded (a
change of it traces anew), the environment variable and the gate's verdict are those of that moment.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from hf_attn_backends.backends import tracing
from hf_attn_backends.backends.execution import execute, mask_form, plan_for, plans, signature_of
from hf_attn_backends.backends.factory import backend_of
from hf_attn_backends.backends.masks import visibility_of
from hf_attn_backends.backends.names import AUTO, ENVIRONMENT_VARIABLE
from hf_attn_backends.backends.planning import DEFAULT_ORDER, served_reasons
from hf_attn_backends.backends.scope import (
    ATTN_BACKEND,
    BackendLike,
    as_backend,
    attn_backend,
    get_backend,
    in_context,
)
from hf_attn_backends.call import AttentionCall
from hf_attn_backends.kernels.visibility import Visibility

__all__ = [
    "ATTN_BACKEND",
    "DEFAULT_ORDER",
    "ENVIRONMENT_VARIABLE",
    "attention",
    "attn_backend",
    "get_backend",
    "run_call",
    "served_reasons",
]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    kv_cache: object | None = None,
    fwd: bool | None = None,
    backend: BackendLike | None = None,
) -> Tensor:
    """Attention by the backend in force, in SDPA's layout, key/value heads not repeated.

    Args:
        query: `[B, H, M, D]`.
        key: `[B, G, N, D]`; query head `h` reads key head `h // (H // G)`.
        value: `[B, G, N, E]`.
        attn_mask: Bool (True: seen) or additive in the query's dtype, broadcastable to
            `[B, H, M, N]`; or intervals `[B, M, 2]` int32. Not together with `is_causal`.
        is_causal: Row `i` sees key `j` iff `j <= i + N - M`: aligned to the LAST key, unlike
            SDPA's own flag.
        scale: Factor of the scores; default `D ** -0.5`.
        window: With `is_causal`: keys a row sees, its own included.
        softcap: `c` in `c * tanh(scores / c)`, after scaling, before the mask.
        sinks: `[H]` logits that join each head's denominator.
        dropout_p: Probability of dropping a weight.
        kv_cache: The cache that key and value came from; its presence alone matters, to backends
            that serve cached calls only.
        fwd: Forward only. True: no gradient is wanted, and none can be taken of the result; None
            or False: it is read off the tensors.
        backend: An enum member, a name, a class or an instance; explicit.

    Returns:
        `[B, H, M, E]`; rows that see nothing are 0.

    Raises:
        UnknownBackendError: The argument or the environment names no backend.
        InvalidCallError: The arguments describe no attention call.
        InvalidDtypeError: Likewise, for dtypes.
        CallRefusedError: The explicit backend cannot serve the call, or none can.
    """
    if fwd and torch.is_grad_enabled():
        with torch.no_grad():
            return attention(
                query, key, value, attn_mask=attn_mask, is_causal=is_causal, scale=scale,
                window=window, softcap=softcap, sinks=sinks, dropout_p=dropout_p,
                kv_cache=kv_cache, backend=backend,
            )  # fmt: skip
    try:
        bias = attn_mask if attn_mask is not None and attn_mask.is_floating_point() else None
    except AttributeError:
        bias = None  # no tensor: the call's description says so
    if torch.compiler.is_compiling():
        return tracing.run(
            tracing.name_of(backend), query, key, value,
            visibility_of(query, key, attn_mask, is_causal, window), scale, softcap, sinks,
            dropout_p, kv_cache is not None, bias,
        )  # fmt: skip
    if backend is not None:
        chosen = as_backend(backend, "argument")
    else:
        stack = in_context()
        chosen = stack[-1] if stack else None
    preference = os.environ.get(ENVIRONMENT_VARIABLE) if chosen is None else None

    try:
        signature = (
            signature_of(chosen, preference, query, key, value, dropout_p),
            mask_form(attn_mask, query, key), is_causal, window, softcap,
            None if sinks is None else sinks.shape, kv_cache is None,
        )  # fmt: skip
        plan = plans.get(signature)
    except (AttributeError, TypeError):  # its description says what is no tensor or no number
        AttentionCall.of(
            query, key, value, attn_mask, is_causal, window=window, softcap=softcap, sinks=sinks
        )
        raise
    if plan is None:
        plan = plan_for(
            signature, chosen, preference, query, key,
            lambda: AttentionCall.of(
                query, key, value, attn_mask, is_causal, window=window, softcap=softcap,
                sinks=sinks, dropout_p=dropout_p, kv_cache=kv_cache,
            ),
        )  # fmt: skip
    visibility = visibility_of(query, key, attn_mask, is_causal, window)
    return execute(plan, query, key, value, visibility, scale, softcap, sinks, dropout_p, bias)


def run_call(
    default_backend: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visibility: Visibility,
    *,
    scale: float | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    has_cache: bool = False,
) -> Tensor:
    """One call of a model that was loaded under `default_backend`; a context overrides it.

    Args:
        default_backend: Explicit; or `auto`, which dispatches.
        query: `[B, H, M, D]`.
        key: `[B, G, N, D]`.
        value: `[B, G, N, E]`.
        visibility: Which keys each row sees.
        scale: As in `attention`, with `softcap`, `sinks` and `dropout_p`.
        softcap: See `scale`.
        sinks: See `scale`.
        dropout_p: See `scale`.
        has_cache: Whether key and value come out of a KV cache.

    Returns:
        `[B, H, M, E]`.

    Raises:
        CallRefusedError: The backend cannot serve the call.
    """
    if torch.compiler.is_compiling():
        return tracing.run(
            tracing.name_of(None, default_backend), query, key, value, visibility, scale, softcap,
            sinks, dropout_p, has_cache, None,
        )  # fmt: skip
    stack = in_context()
    auto = stack[-1] is None if stack else default_backend == AUTO
    chosen = stack[-1] if stack else None if auto else backend_of(default_backend, "config")
    preference = os.environ.get(ENVIRONMENT_VARIABLE) if auto else None
    signature = (
        signature_of(chosen, preference, query, key, value, dropout_p),
        visibility.kind, visibility.window, softcap, None if sinks is None else sinks.shape,
        has_cache,
    )  # fmt: skip
    plan = plans.get(signature)
    if plan is None:
        plan = plan_for(
            signature, chosen, preference, query, key,
            lambda: AttentionCall.of(
                query, key, value, softcap=softcap, sinks=sinks, dropout_p=dropout_p,
                kv_cache=has_cache or None, visibility=visibility,
            ),
        )  # fmt: skip
    return execute(plan, query, key, value, visibility, scale, softcap, sinks, dropout_p, None)
