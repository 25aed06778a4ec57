"""Load time: which attention implementation a model gets, and why.

The order of the checks is structural -> environment -> gate -> preference, and every reason is
collected. A name that was asked for is that one or an error; None is `sdpa`; a custom kernel is
never selected on its own. No verdict is remembered from one question to the next.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Mapping

from hf_attn_backends import environment
from hf_attn_backends.backends import machine, proof
from hf_attn_backends.backends.base import BackendReport, ProbeContext
from hf_attn_backends.backends.decision import (
    Decision,
    context_of,
    device_name,
    report_on,
    reports,
)
from hf_attn_backends.backends.factory import AttentionBackendFactory
from hf_attn_backends.backends.names import (
    ALL_BACKENDS,
    AUTO,
    OUR_KERNELS,
    RequestedName,
    parse,
    unknown,
)
from hf_attn_backends.errors import BackendRefusedError, compose

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

_FLASH_NAME = re.compile(r"^flash_attention_(\d+)$")

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
        return _decide_backend(name, origin, context)
    if name.plain == AUTO:
        reason = "auto: every call is dispatched by capability, steered by context and environment"
        return _decided(requested, origin, AUTO, (reason,), context)
    if name.hub:
        reason = f"{requested} is a kernel of the hub: passed through, not probed and not gated"
        return _decided(requested, origin, requested, (reason,), context)
    return _decide_foreign(name, origin, context)


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


def _decide_backend(name: RequestedName, origin: str, context: ProbeContext) -> Decision:
    report = report_on(name.plain, context)
    refusals, error = list(report.refusals), report.error
    if name.plain not in ALL_BACKENDS and report.available and not _registered_with_host(name):
        refusals.append(
            f"{name.plain} is a plug-in for single calls, transformers does not know it: load with "
            f"attn_implementation='auto' and run under attn_backend('{name.plain}')"
        )
    if name.paged and name.plain in OUR_KERNELS:
        error = BackendRefusedError
        refusals.insert(
            0,
            f"{name.plain} does not read the block tables of continuous batching, "
            "which is what paged|… asks for",
        )
    if refusals:
        message = compose(
            f"attn_implementation '{name.asked}' (from the {origin}) is refused",
            refusals,
            works="attn_implementation='sdpa', or None",
            fix=report.fix,
        )
        if issubclass(error, BackendRefusedError):
            raise error(message, refusals)
        raise error(message)
    # transformers 5.17 needs the prefix to choose its paged functions.
    resolved = f"paged|{name.plain}" if name.paged else name.plain
    return _decided(name.asked, origin, resolved, (report.reason,), context)


def _decide_foreign(name: RequestedName, origin: str, context: ProbeContext) -> Decision:
    """A name that is none of ours: another flash version, or one that a third party registered."""
    flash = _FLASH_NAME.match(name.plain)
    if not _registered_with_host(name) and not flash:
        raise unknown(name.asked, origin, AttentionBackendFactory.list_registered())
    if flash and machine.version_of(f"flash-attn-{flash[1]}") is None:
        reason = (
            f"{name.plain} needs the distribution flash-attn-{flash[1]}, which is not installed in "
            "this environment (transformers would quietly load a hub kernel in its place)"
        )
        message = compose(
            f"attn_implementation '{name.asked}' (from the {origin}) is refused",
            [reason],
            works="attn_implementation='sdpa', or None",
            fix=f"pip install flash-attn-{flash[1]}",
        )
        raise BackendRefusedError(message, [reason])
    reason = f"{name.asked} is registered with transformers by others: not probed and not gated"
    return _decided(name.asked, origin, name.asked, (reason,), context)


def _registered_with_host(name: RequestedName) -> bool:
    """Whether transformers, if it is loaded, has an attention function under this name."""
    host = sys.modules.get("transformers.modeling_utils")
    functions = getattr(host, "ALL_ATTENTION_FUNCTIONS", None)
    return functions is not None and name.plain in functions.valid_keys()


def _decided(
    requested: str | None,
    origin: str,
    resolved: str,
    reasons: tuple[str, ...],
    context: ProbeContext,
) -> Decision:
    gated = resolved in OUR_KERNELS
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
