"""Dispatch inside a traced graph: the choice is a constant of the graph.

TorchDynamo cannot trace a ContextVar, so the context's backend is mirrored into a thread-local,
which Dynamo guards: entering another context traces anew. Everything that is asked of tables, the
machine and the gate is asked by ordinary Python while tracing.
"""

from __future__ import annotations

import operator
import os
import threading
from typing import Any

import torch
from torch import Tensor

from hf_attn_backends.backends.base import AttentionBackend
from hf_attn_backends.backends.counting import counted_in_graph, substituted_in_graph
from hf_attn_backends.backends.factory import backend_of
from hf_attn_backends.backends.names import ALL_BACKENDS, AUTO, ENVIRONMENT_VARIABLE
from hf_attn_backends.backends.planning import explicit_plan, preferred_plan
from hf_attn_backends.call import AttentionCall
from hf_attn_backends.errors import CallRefusedError, UnknownBackendError
from hf_attn_backends.kernels.visibility import Visibility


class _Mirror(threading.local):
    def __init__(self) -> None:
        self.name = ""  # no context; a string, because Dynamo guards no None found here


_context = _Mirror()
_traceable: dict[str, AttentionBackend] = {name: backend_of(name) for name in ALL_BACKENDS}


def mirror(stack: tuple[AttentionBackend | None, ...]) -> None:
    """Show the context's backend to graphs; None on the stack is `auto`."""
    if not stack:
        _context.name = ""
        return
    backend = stack[-1]
    _context.name = AUTO if backend is None else backend.name
    if backend is not None:
        _traceable[backend.name] = backend


def name_of(argument: Any, default: str = AUTO) -> str:
    """The name that a traced call goes by: the argument's, else the context's, else `default`."""
    if argument is not None:
        return argument if isinstance(argument, str) else argument.name
    return _context.name or default


def run(
    name: str, query: Tensor, key: Tensor, value: Tensor, visibility: Visibility,
    scale: float | None, softcap: float | None, sinks: Tensor | None, dropout_p: float,
    has_cache: bool, bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """Serve one traced call under `name`, or raise while tracing."""
    grad = query.requires_grad or key.requires_grad or value.requires_grad
    # operator.index makes a constant of a symbolic size, a branch one of a symbolic condition.
    dropped = True if dropout_p > 0.0 else False  # noqa: SIM210
    cached = True if has_cache else False  # noqa: SIM210  (it may come from comparing lengths)
    equal_lengths = True if query.shape[2] == key.shape[2] else False  # noqa: SIM210
    served, call_class, requested = _choose(
        str(name), str(query.dtype), query.device.type, operator.index(query.shape[1]),
        operator.index(key.shape[1]), operator.index(query.shape[3]),
        operator.index(value.shape[3]), "dense" if bias is not None else visibility.kind,
        softcap is not None, sinks is not None, bias is not None, dropped, cached,
        grad and torch.is_grad_enabled(), equal_lengths,
    )  # fmt: skip
    if not served:
        # Dynamo cannot trace our exceptions' constructors. Without fullgraph this frame runs
        # again outside of the graph and raises the real one.
        raise RuntimeError(call_class)
    backend = _traceable[served]
    options: dict[str, Any] = {} if bias is None else {"bias": bias}
    out = backend.forward(
        query, key, value, None, visibility=visibility, scale=scale,  # pyright: ignore
        softcap=softcap, sinks=sinks, dropout_p=dropout_p, **options,
    )  # fmt: skip
    if requested is not None:
        substituted_in_graph(requested, served, call_class)
    if backend.counts_in_graphs:
        return out
    variant = "torch" if backend.counts_itself else "plugin"
    return counted_in_graph(out, served, call_class, variant)


@torch.compiler.assume_constant_result
def _choose(
    name: str, dtype: str, device: str, heads: int, kv_heads: int, head_dim: int,
    value_head_dim: int, visibility: str, softcap: bool, sinks: bool, bias: bool, dropout: bool,
    has_cache: bool, needs_grad: bool, equal_lengths: bool,
) -> tuple[str, str, str | None]:  # fmt: skip
    """Plan while tracing.

    Returns:
        (backend, call class, the preference it stands in for), or ("", why not, None).
    """
    call = AttentionCall(
        batch=1, heads=heads, kv_heads=kv_heads, q_len=2, k_len=2 if equal_lengths else 3,
        head_dim=head_dim, value_head_dim=value_head_dim,
        dtype=getattr(torch, dtype.removeprefix("torch.")), device=torch.device(device),
        visibility=visibility, softcap=1.0 if softcap else None, sinks=sinks, bias=bias,
        dropout_p=0.5 if dropout else 0.0, has_cache=has_cache, needs_grad=needs_grad,
    )  # fmt: skip
    try:
        if name == AUTO:
            asked = os.environ.get(ENVIRONMENT_VARIABLE)
            wanted = None if not asked or asked == AUTO else backend_of(asked, "environment")
            plan = preferred_plan(wanted, call)
        else:
            plan = explicit_plan(_traceable.get(name) or backend_of(name), call)
    except (CallRefusedError, UnknownBackendError) as error:
        return "", str(error), None
    plan.backend.prepare_tracing()
    _traceable[plan.backend.name] = plan.backend
    return plan.backend.name, plan.call_class, plan.requested
