"""How a backend asks the equivalence gate: at load for a model, at a call for its class.

The gate's module is imported by name at the moment of asking, so that an absent gate is a refusal
of its own and a replaced one is seen. At load nothing is remembered. At a call the verdict is kept
by (class, device type) until `forget()`; it is called whenever a backend is selected or an
artifact is written.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from hf_attn_backends.backends.dims import ModelDims
from hf_attn_backends.call import AttentionCall
from hf_attn_backends.errors import GateError, GateNotImplementedError, SelectionError

TRITON_FA2_GATE_MODULE = "hf_attn_backends.gate"

_verdicts: dict[tuple[object, str], tuple[str, ...]] = {}
_on_forget: list[Callable[[], None]] = []


@dataclass(frozen=True, slots=True)
class GateVerdict:
    """What the gate says of a model on a device.

    Attributes:
        refusals: Empty where it vouches for the kernel.
        error: The exception class to raise for them.
        summary: The artifact's summary for the banner and the record; None without a valid one.
        fix: The command that would remove the refusal.
        note: What the artifact does not state, for the reasons of an accepted request.
    """

    refusals: tuple[str, ...] = ()
    error: type[SelectionError] = GateError
    summary: dict | None = None
    fix: str | None = None
    note: str | None = None


def gate_module_name() -> str:
    """The gate's module: an override on `selection` or on the package's top, else the constant."""
    for holder in ("hf_attn_backends.selection", "hf_attn_backends"):
        name = vars(sys.modules.get(holder, object)).get("TRITON_FA2_GATE_MODULE")
        if name is not None and name != TRITON_FA2_GATE_MODULE:
            return name
    return TRITON_FA2_GATE_MODULE


def gate_module() -> ModuleType:
    """Import the gate, now.

    Raises:
        GateNotImplementedError: It cannot be imported.
    """
    name = gate_module_name()
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise GateNotImplementedError(
            f"the gate module {name} is not yet implemented in this installation "
            f"(importing it failed: {error}), so nothing vouches for the Triton kernels"
        ) from error


def load_verdict(device: str | None, gate_dir: Path | None, dims: ModelDims | None) -> GateVerdict:
    """Ask the gate for a model, at load; verifies the artifact on disk and remembers nothing."""
    try:
        gate = gate_module()
        artifact = gate.require(device, gate_dir)
    except GateError as error:
        # The command is the verdict's fix, so that it is not said twice where reasons are listed.
        reason, _, command = str(error).partition("\n  to fix it: ")
        reason = reason.replace("\n  ", "\n     ")  # it will stand in a list of reasons
        return GateVerdict((reason,), type(error), fix=command or None)
    summary = artifact.summary()
    if dims is None or dims.head_dim is None:
        return GateVerdict(summary=summary)
    if not artifact.coverage:
        note = "the artifact does not state which head_dim it covers: each call will be checked"
        return GateVerdict(summary=summary, note=note)
    # Autocast turns a float32 model's calls into half precision, so its dtype binds nothing yet.
    dtype = dims.dtype if dims.dtype in ("bfloat16", "float16") else None
    covered = artifact.head_dims(dtype, dims.features)
    if dims.head_dim in covered:
        return GateVerdict(summary=summary)
    refusal = (
        f"the equivalence gate's artifact covers head_dim {_listed(covered)}"
        f"{f' with {dims.features}' if dims.features else ''}"
        f"{f' in {dtype}' if dtype else ''}, and the model has head_dim {dims.head_dim}"
    )
    fix = gate.extend_command(
        dims.head_dim, dtype, features=dims.features, device=device, gate_dir=gate_dir
    )
    return GateVerdict((refusal,), GateError, summary, fix)


def call_refusals(call: AttentionCall) -> list[str]:
    """Ask the gate for one call; cheap after the first call of its class."""
    key = (call.call_class, call.device.type)
    verdict = _verdicts.get(key)
    if verdict is None:
        verdict = _verdicts[key] = _call_verdict(call)
    return list(verdict)


def forget() -> None:
    """Drop every verdict on calls, here and wherever one was derived from it."""
    _verdicts.clear()
    for callback in _on_forget:
        callback()


def on_forget(callback: Callable[[], None]) -> None:
    """Have `callback` run at each `forget()`; for caches that hold a verdict."""
    _on_forget.append(callback)


def _call_verdict(call: AttentionCall) -> tuple[str, ...]:
    try:
        gate = gate_module()
        artifact = gate.require(str(call.device))
    except GateError as error:
        return (str(error),)
    if artifact.covers(call.call_class):
        return ()
    return (
        f"the equivalence gate does not cover {call.call_class} on {call.device.type}; "
        f"to have it measured: {gate.extend_command(call.call_class, device=str(call.device))}",
    )


def _listed(numbers: set[int]) -> str:
    return ", ".join(map(str, sorted(numbers))) or "(none)"
