"""Load time: which attention implementation a model gets, and why.

The order of the checks is structural -> environment -> gate -> preference, and every reason is
collected. A name that was asked for is that one or an error; None is `sdpa`; a custom kernel is
never selected on its own. No verdict is remembered from one question to the next.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from hf_attn_backends import environment
from hf_attn_backends.backends import proof
from hf_attn_backends.backends.base import BackendReport, ProbeContext
from hf_attn_backends.backends.decision import (
    Decision,
    context_of,
    device_name,
    reports,
)
from hf_attn_backends.backends.factory import AttentionBackendFactory
from hf_attn_backends.backends.names import (
    ALL_BACKENDS,
    AUTO,
    OUR_KERNELS,
    parse,
    unknown,
)
from hf_attn_backends.backends.resolving import resolve, resolve_foreign

__all__ = [
    "ALL_BACKENDS",
    "TRITON_FA2_GATE_MODULE",
    "BackendReport",
    "Decision",
    "banner_value",
    "decide",
    "probe_backends",
    "select_attn_implementation",
]

# Imported by this name whenever the gate is asked; an override here or on the package's top holds.
TRITON_FA2_GATE_MODULE = proof.TRITON_FA2_GATE_MODULE

_log = logging.getLogger(__name__)
_log.setLevel(logging.INFO)  # a decision is always emitted; without handlers INFO prints nothing

Requested = str | Mapping[str, str | None] | None


def probe_backends(
    device: object = None, gate_dir: str | os.PathLike[str] | None = None
) -> dict[str, BackendReport]:
    """Report on every backend of this machine, plug-ins included. Never raises.

    Args:
        device: `cpu`, `cuda`, `cuda:1`, …; default: CUDA where there is one. For `cpu` no CUDA
            context is created and triton is not imported.
        gate_dir: Folder of the gate's artifacts; default below `environment.home()`.
    """
    return reports(context_of(device, gate_dir, None))


def select_attn_implementation(
    requested: Requested,
    *,
    device: object = None,
    gate_dir: str | os.PathLike[str] | None = None,
    model_config: object = None,
) -> str:
    """Resolve a request for an attention implementation, or refuse it with every reason.

    Args:
        requested: A name in transformers' vocabulary, a dict of them (its top-level entry is
            resolved), `auto`, a hub kernel `org/repo`, or None.
        device: Where the model is to run; default: CUDA where there is one.
        gate_dir: Folder of the gate's artifacts; default below `environment.home()`.
        model_config: The model's configuration, for the refusals that depend on its dimensions.

    Returns:
        A name that transformers' registry knows: `sdpa` for None.

    Raises:
        UnknownBackendError: No backend has that name.
        BackendRefusedError: Structure or environment say no.
        GateError: The gate says no; a subclass for each kind.
    """
    decision = decide(requested, device=device, gate_dir=gate_dir, model_config=model_config)
    return decision.resolved


def decide(
    requested: Requested,
    *,
    origin: str = "argument",
    device: object = None,
    gate_dir: str | os.PathLike[str] | None = None,
    model_config: object = None,
) -> Decision:
    """`select_attn_implementation` with the whole answer. `origin` says who asked."""
    proof.forget()
    if isinstance(requested, Mapping):
        requested = requested.get("")
    context = context_of(device, gate_dir, model_config)
    if requested is None:
        return _decided(
            None,
            "default",
            "sdpa",
            (
                "nothing was requested: PyTorch's sdpa is the default, "
                "and a custom kernel is never selected on its own",
            ),
            context,
        )
    if not isinstance(requested, str):
        raise unknown(requested, origin, AttentionBackendFactory.list_registered())
    name = parse(requested)
    if name.plain in AttentionBackendFactory.list_registered():
        resolved, reason = resolve(name, origin, context)
    elif name.plain == AUTO:
        resolved = AUTO
        reason = "auto: every call is dispatched by capability, steered by context and environment"
    elif name.hub:
        resolved = requested
        reason = f"{requested} is a kernel of the hub: passed through, not probed and not gated"
    else:
        resolved, reason = resolve_foreign(name, origin)
    return _decided(requested, origin, resolved, (reason,), context)


def banner_value(
    requested: Decision | Requested = None,
    *,
    origin: str = "argument",
    device: object = None,
    gate_dir: str | os.PathLike[str] | None = None,
    model_config: object = None,
) -> str:
    """The banner's `attention_backend=`: `triton_fa2 (requested by argument; gate ok 3f9c…; cpu)`.

    Args:
        requested: A decision that was made, or a request that is decided now.
        origin: As in `decide`.
        device: As in `decide`.
        gate_dir: As in `decide`.
        model_config: As in `decide`.
    """
    decision = requested
    if not isinstance(decision, Decision):
        decision = decide(
            decision, origin=origin, device=device, gate_dir=gate_dir, model_config=model_config
        )
    return decision.banner(environment.device_facts(device_name(device)))


def _decided(
    requested: str | None,
    origin: str,
    resolved: str,
    reasons: tuple[str, ...],
    context: ProbeContext,
) -> Decision:
    gated = parse(resolved).plain in OUR_KERNELS  # also under the prefix of continuous batching
    decision = Decision(
        requested,
        origin,
        resolved,
        reasons,
        candidates=tuple(reports(context).values()),
        gate=context.gate_verdict.summary if gated else None,
    )
    _log.info("attention: %s -> %s: %s", requested, resolved, "; ".join(reasons))
    return decision
