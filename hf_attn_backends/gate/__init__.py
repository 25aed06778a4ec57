"""The equivalence gate: before a kernel may be used, it is measured on this machine.

cases (what is tried) -> inputs -> measure (the kernel, the oracle and SDPA on the same numbers)
-> budgets (how much error is allowed) -> run (many classes, worker processes) -> artifact (what
was proven) -> verify (whether it still holds).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hf_attn_backends.gate.sources import kernel_source_hash

# The functions above are looked up through this module at every check, so they come first.
from hf_attn_backends.gate.artifact import (  # isort: skip
    Artifact,
    artifact_path,
    device_kind,
    parse_class,
)
from hf_attn_backends.gate.writer import write_equivalence_gate  # isort: skip
from hf_attn_backends.gate.verify import extend_command, gate_command, require  # isort: skip

if TYPE_CHECKING:
    from hf_attn_backends.gate.results import GateResult
    from hf_attn_backends.gate.run import run_gate


def __getattr__(name: str) -> Any:
    """`run_gate` and `GateResult`, imported when the gate is to run and not when it is asked."""
    if name in ("GateResult", "run_gate"):
        return getattr(importlib.import_module("hf_attn_backends.gate.run"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Artifact",
    "GateResult",
    "artifact_path",
    "device_kind",
    "extend_command",
    "gate_command",
    "kernel_source_hash",
    "parse_class",
    "require",
    "run_gate",
    "write_equivalence_gate",
]
