"""The equivalence gate: before a kernel may be used, it is measured on this machine.

cases (what is tried) -> inputs -> measure (the kernel, the oracle and SDPA on the same numbers)
-> budgets (how much error is allowed) -> run (many classes, worker processes) -> artifact (what
was proven) -> verify (whether it still holds).
"""

from __future__ import annotations

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

__all__ = [
    "Artifact",
    "artifact_path",
    "device_kind",
    "extend_command",
    "gate_command",
    "kernel_source_hash",
    "parse_class",
    "require",
    "write_equivalence_gate",
]
