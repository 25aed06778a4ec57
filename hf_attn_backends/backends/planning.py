"""Who serves one call: an explicit backend or nobody, a preference or the next that can.

A plan is made once for each kind of call and reused; asking every backend for its refusals costs
some ten microseconds, looking a plan up about one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from hf_attn_backends.backends import proof
from hf_attn_backends.backends.base import AttentionBackend
from hf_attn_backends.backends.counting import class_text
from hf_attn_backends.backends.factory import backend_of
from hf_attn_backends.call import AttentionCall
from hf_attn_backends.errors import CallRefusedError, compose

# What serves a call for which nobody asked, in this order. flash_attention_2 takes calls without a
# mask tensor where it is installed; eager is last, for softcap and sinks. Our own kernels are not
# in it: asking for them is how they come in.
DEFAULT_ORDER = ("flash_attention_2", "sdpa", "eager")

_log = logging.getLogger("hf_attn_backends.dispatch")

_environment: dict[tuple[int, torch.device], tuple[AttentionBackend, tuple[str, ...]]] = {}
_logged: set[tuple[str, str, str]] = set()
_why: dict[tuple[str, str], str] = {}


@dataclass(frozen=True, slots=True)
class Plan:
    """One kind of call, and who serves it.

    Attributes:
        backend: Who.
        call: The call's description.
        call_class: `str(call.call_class)`.
        requested: The preference that could not serve it, where this is a substitute; else None.
    """

    backend: AttentionBackend
    call: AttentionCall
    call_class: str
    requested: str | None = None


def explicit_plan(backend: AttentionBackend, call: AttentionCall) -> Plan:
    """That backend, or an error.

    Raises:
        CallRefusedError: Carries every reason.
    """
    reasons = reasons_against(backend, call)
    if reasons:
        others = [name for name in DEFAULT_ORDER if not reasons_against(backend_of(name), call)]
        message = compose(
            f"Explicitly-set backend '{backend.name}' cannot serve this call",
            reasons,
            works=f"backend={others[0]!r}" if others else None,
        )
        raise CallRefusedError(message, reasons)
    name = class_text(call)
    _why[backend.name, name] = "asked for explicitly"
    return Plan(backend, call, name)


def preferred_plan(preference: AttentionBackend | None, call: AttentionCall) -> Plan:
    """The preference if it can, else the first of `DEFAULT_ORDER` that can.

    Args:
        preference: What the environment asks for, or None for the default order alone.
        call: The call.

    Raises:
        CallRefusedError: Nobody can; carries every backend's reasons.
    """
    name = class_text(call)
    against: list[str] = []
    candidates = [] if preference is None else [preference]
    candidates += [backend_of(other) for other in DEFAULT_ORDER if other != preference]
    for backend in candidates:
        reasons = reasons_against(backend, call)
        if not reasons:
            return _chosen(preference, backend, call, name, against)
        against += reasons
    raise CallRefusedError(compose("no backend can serve this call", against), against)


def reasons_against(backend: AttentionBackend, call: AttentionCall) -> list[str]:
    """The environment's reasons and the call's; one from both tables is said once."""
    key = (id(backend), call.device)
    held = _environment.get(key)
    if held is None:
        held = _environment[key] = (backend, _machine_reasons(backend, call.device))
    return list(dict.fromkeys((*held[1], *_call_reasons(backend, call))))


def _machine_reasons(backend: AttentionBackend, device: torch.device) -> tuple[str, ...]:
    """The environment's reasons; what a plug-in raises is one."""
    try:
        return tuple(backend.machine_refusals(device))
    except Exception as error:
        return (f"asking whether {backend.name} is available raised {_text(error)}",)


def _call_reasons(backend: AttentionBackend, call: AttentionCall) -> Iterable[str]:
    """The call's reasons; what a plug-in raises, or answers against the contract, is one."""
    try:
        found = backend.refusals(call)
    except Exception as error:
        return (f"asking whether {backend.name} can serve this call raised {_text(error)}",)
    if isinstance(found, list | tuple) and all(isinstance(reason, str) for reason in found):
        return found
    return (f"{backend.name}'s refusals() must give texts, got {found!r}",)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def served_reasons() -> dict[tuple[str, str], str]:
    """Why each (backend, call class) was served by it: for the record of a run under `auto`."""
    return dict(_why)


def forget_plans() -> None:
    """Drop what was asked of the environment, and what was logged; for tests and new gates."""
    _environment.clear()
    _logged.clear()
    _why.clear()


def _chosen(
    preference: AttentionBackend | None,
    backend: AttentionBackend,
    call: AttentionCall,
    name: str,
    against: Iterable[str],
) -> Plan:
    # By default flash_attention_2 and sdpa share the work; only what neither can serve is a
    # substitution there.
    wanted = preference.name if preference is not None else "sdpa"
    substituted = backend.name != wanted and not (preference is None and backend.name in
                                                  DEFAULT_ORDER[:2])  # fmt: skip
    if not substituted:
        _why[backend.name, name] = (
            "preferred by HF_ATTN_BACKEND" if preference is not None else "the default order"
        )
        return Plan(backend, call, name)
    why = "; ".join(against)
    _why[backend.name, name] = f"in place of {wanted}: {why}"
    if (wanted, backend.name, name) not in _logged:
        _logged.add((wanted, backend.name, name))
        _log.warning(
            "attention calls of class %s are served by %s in place of %s: %s",
            name, backend.name, wanted, why,
        )  # fmt: skip
    return Plan(backend, call, name, wanted)


proof.on_forget(_environment.clear)
