"""Plans kept by the signature of a call, and the running of one."""

from __future__ import annotations

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
from hf_attn_backends.kernels.visibility import Visibility

_MAX_PLANS = 4096
plans: dict[tuple[object, ...], Plan] = {}


def signature_of(
    chosen: AttentionBackend | None, preference: str | None, query: Tensor, key: Tensor,
    value: Tensor, dropout_p: float,
) -> tuple[object, ...]:  # fmt: skip
    """Everything that a plan depends on and that is common to `attention` and models' calls."""
    grad = query.requires_grad or key.requires_grad or value.requires_grad
    # By id: a plan holds its backend, so that the id is not reused while the plan is kept.
    return (
        None if chosen is None else id(chosen), preference, grad and torch.is_grad_enabled(),
        query.shape, key.shape, value.shape, query.dtype, key.dtype, value.dtype,
        query.device, key.device, value.device, dropout_p,
    )  # fmt: skip


def make_plan(chosen: AttentionBackend | None, preference: str | None, call: AttentionCall) -> Plan:
    """Plan a call: `chosen` is explicit; else `preference`, the environment's name, or None."""
    if chosen is not None:
        return explicit_plan(chosen, call)
    wanted = as_backend(preference, "environment") if preference else None
    return preferred_plan(wanted, call)


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
    if plan.requested is not None:
        witness.count_substitution(plan.requested, plan.backend.name, plan.call_class)
    options: dict[str, Any] = {} if bias is None else {"bias": bias}
    backend, foreign = plan.backend, not plan.backend.counts_itself
    if foreign:
        count_forward(backend.name, plan.call, "plugin")
    out = backend.forward(
        query, key, value, plan.call, visibility=visibility, scale=scale, softcap=softcap,
        sinks=sinks, dropout_p=dropout_p, **options,
    )  # fmt: skip
    return with_backward_counted(out, backend.name, plan.call, "plugin") if foreign else out


proof.on_forget(plans.clear)
