"""What a probe is asked about, and what it reports."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from hf_attn_backends.backends import proof
from hf_attn_backends.backends.dims import ModelDims
from hf_attn_backends.errors import BackendRefusedError, SelectionError


@dataclass(frozen=True, slots=True)
class BackendReport:
    """What a probe found.

    Attributes:
        name: The backend.
        available: Whether it can serve here.
        reason: Why, one sentence, never empty; where it cannot: the first of `refusals`.
        refusals: Every reason against it, in the order structural, environment, gate.
        fix: The command that removes the last of them that can be removed, or None.
        gate: The artifact's summary where the gate was asked and has a valid one.
        error: The exception class that a request for it raises.
    """

    name: str
    available: bool
    reason: str
    refusals: tuple[str, ...] = ()
    fix: str | None = None
    gate: dict | None = None
    error: type[SelectionError] = BackendRefusedError

    def as_dict(self) -> dict[str, object]:
        """For `--json` and the run's record."""
        return {
            "name": self.name,
            "available": self.available,
            "reason": self.reason,
            "refusals": list(self.refusals),
            "fix": self.fix,
        }


@dataclass(frozen=True)
class ProbeContext:
    """What a probe is asked about: a device, where artifacts are, and maybe a model.

    One context is one moment: the gate is asked at most once through it, whatever number of
    backends need it.
    """

    device: str = "cpu"
    gate_dir: Path | None = None
    dims: ModelDims | None = None

    @cached_property
    def torch_device(self) -> torch.device:
        """The device, parsed; raises RuntimeError for a name that torch does not know."""
        return torch.device(self.device)

    @cached_property
    def gate_verdict(self) -> proof.GateVerdict:
        """What the gate says, verified against the disk once for this context."""
        return proof.load_verdict(self.device, self.gate_dir, self.dims)
