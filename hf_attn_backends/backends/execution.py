"""Plans kept by the signature of a call, and the running of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_attn_backends import witness
from hf_attn_backends.backends import proof
from hf_attn_backends.backends.base import AttentionBackend
from hf_attn_backends.backends.counting import count_forward, with_backward_counted
from hf_attn_backends.backends.planning import Plan, explicit_plan, preferred_plan
from hf_attn_backends.backends.scope import as_backend
from hf_attn_backends.call import AttentionCall
from hf_attn_backends.errors import CallRefusedError
from hf_attn_backends.kernels.visibility import Visibility

_MAX_PLANS = 4096
plans: dict[tuple[object, ...], Plan] = {}


def signature_of(
    chosen: AttentionBackend | None, preference: str | None, query: Tensor, key: Tensor,
    value: Tensor, dropout_p: float,
) -> tuple[object, ...]:  # fmt: skip
    """What a plan depends on and what is common to `attention` and models' calls.

    Batch and lengths are no part of it, only whether they agree: a cache that grows by a key with
    every step, or a batch of another length, needs no new plan.
    """
    shape, key_shape, value_shape = query.shape, key.shape, value.shape
    form: tuple[object, ...] = (shape, key_shape, value_shape)
    if len(shape) == len(key_shape) == len(value_shape) == 4:
        batch, heads, q_len, head_dim = shape
        key_batch, kv_heads, k_len, key_dim = key_shape
        alike = value_shape == key_shape or value_shape[:3] == key_shape[:3]
        if batch == key_batch and head_dim == key_dim and alike:
            form = (heads, kv_heads, head_dim, value_shape[3], q_len == k_len)
    grad = torch.is_grad_enabled() and (
        query.requires_grad or key.requires_grad or value.requires_grad
    )
    # By id: a plan holds its backend, so that the id is not reused while the plan is kept.
    return (
        None if chosen is None else id(chosen), preference, grad, form, query.dtype, key.dtype,
        value.dtype, query.device, key.device, value.device, dropout_p,
    )  # fmt: skip


def mask_form(mask: Tensor | None, query: Tensor, key: Tensor) -> object:
    """The part of a signature that a mask makes: how its shape agrees with the call's."""
    if mask is None:
        return None
    want = (*query.shape[:3], key.shape[2])
    shape = mask.shape
    if mask.dtype != torch.int32 and len(shape) <= 4:
        pairs = zip(reversed(shape), reversed(want), strict=False)
        if all(have == 1 or have == wanted for have, wanted in pairs):
            return mask.dtype
    return mask.dtype, shape, want


def plan_for(
    signature: tuple[object, ...], chosen: AttentionBackend | None, preference: str | None,
    query: Tensor, key: Tensor, describe: Callable[[], AttentionCall],
) -> Plan:  # fmt: skip
    """Plan a call whose signature is new, or whose backends may look at its lengths.

    Args:
        signature: See `signature_of`.
        chosen: The explicit backend, or None.
        preference: The environment's, where there is no explicit one.
        query: `[B, H, M, D]`.
        key: `[B, G, N, D]`.
        describe: Makes the call's description, and validates it.
    """
    exact = (signature, query.shape, key.shape)
    plan = plans.get(exact)
    if plan is not None:
        return plan
    call = describe()
    asked = chosen
    if chosen is not None:
        plan = explicit_plan(chosen, call)
    else:
        asked = as_backend(preference, "environment") if preference else None
        plan = preferred_plan(asked, call)
    # The default order's backends are the package's own, and look at no length.
    return keep(signature if asked is None or asked.any_length else exact, plan)


def keep(signature: tuple[object, ...], plan: Plan) -> Plan:
    """Keep a plan for the next call of its signature."""
    if len(plans) >= _MAX_PLANS:
        plans.clear()
    plans[signature] = plan
    return plan


def execute(
    plan: Plan, query: Tensor, key: Tensor, value: Tensor, visibility: Visibility,
    scale: float | None, softcap: float | None, sinks: Tensor | None, dropout_p: float,
    bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """Run a planned call, counted."""
    backend = plan.backend
    if plan.requested is not None:
        witness.count_substitution(plan.requested, backend.name, plan.call_class)
    if backend.counts_itself and bias is None:
        return backend.forward(
            query, key, value, plan.call, visibility=visibility, scale=scale, softcap=softcap,
            sinks=sinks, dropout_p=dropout_p,
        )  # fmt: skip
    options: dict[str, Any] = {} if bias is None else {"bias": bias}
    if not backend.counts_itself:
        count_forward(backend.name, plan.call, "plugin")
    out = backend.forward(
        query, key, value, plan.call, visibility=visibility, scale=scale, softcap=softcap,
        sinks=sinks, dropout_p=dropout_p, **options,
    )  # fmt: skip
    if backend.counts_itself:
        return out
    want = (*query.shape[:3], value.shape[3])
    if not isinstance(out, Tensor) or out.shape != want:
        got = f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
        raise CallRefusedError(f"backend '{backend.name}' must return a tensor {want}, got {got}")
    return with_backward_counted(out, backend.name, plan.call, "plugin")


proof.on_forget(plans.clear)
