"""What a selection answers, and the probing of every backend that goes with it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hf_attn_backends import environment
from hf_attn_backends.backends.base import BackendReport, ProbeContext
from hf_attn_backends.backends.dims import ModelDims
from hf_attn_backends.backends.factory import AttentionBackendFactory, backend_of


@dataclass(frozen=True, slots=True)
class Decision:
    """What the selector answered.

    Attributes:
        requested: The request as it came; of a dict of implementations, its top-level entry.
        origin: `argument`, `context`, `environment`, `config` or `default`.
        resolved: The name for transformers' registry.
        reasons: Why; never empty.
        substituted: Whether it is another backend than the one that was asked for. Load-time
            requests are served or refused, so it is False here.
        candidates: A report for every backend, of this moment.
        gate: The artifact's summary where the resolved backend needs one, else None.
    """

    requested: str | None
    origin: str
    resolved: str
    reasons: tuple[str, ...]
    substituted: bool = False
    candidates: tuple[BackendReport, ...] = ()
    gate: dict | None = None

    def banner(self, facts: Mapping[str, object]) -> str:
        """`triton_fa2 (requested by argument; gate ok 3f9c…; cuda NVIDIA H200)`.

        Args:
            facts: The device's, from `environment.device_facts`.
        """
        if self.requested is None:
            asked = "nothing requested"
        elif self.requested == self.resolved:
            asked = f"requested by {self.origin}"
        else:
            asked = f"requested {self.requested} by {self.origin}"
        parts = [asked]
        if self.gate is not None:
            digest = str(self.gate.get("artifact_sha256") or self.gate.get("sha256") or "")
            parts.append(f"gate ok {digest[:8]}…")
        parts.append(" ".join(str(facts[key]) for key in ("type", "name") if facts.get(key)))
        return f"{self.resolved} ({'; '.join(parts)})"

    def as_dict(self) -> dict[str, object]:
        """For the run's record; strict JSON types only."""
        return {
            "requested": self.requested,
            "origin": self.origin,
            "resolved": self.resolved,
            "reasons": list(self.reasons),
            "substituted": self.substituted,
            "candidates": [report.as_dict() for report in self.candidates],
            "gate": self.gate,
        }


def reports(context: ProbeContext) -> dict[str, BackendReport]:
    """A report for every backend, plug-ins included."""
    return {name: report_on(name, context) for name in AttentionBackendFactory.list_registered()}


def report_on(name: str, context: ProbeContext) -> BackendReport:
    """One backend's report; a probe that fails becomes its reason."""
    try:
        backend = backend_of(name)
        return backend.probe(context)
    except Exception as error:  # a probe that fails is that backend's reason, plug-ins included
        reason = f"probing {name} on {context.device} raised {type(error).__name__}: {error}"
        return BackendReport(name, False, reason, (reason,))


def context_of(device: object, gate_dir: object, model_config: object) -> ProbeContext:
    """What a probe is asked about, from what users pass."""
    return ProbeContext(
        device=device_name(device),
        gate_dir=None if gate_dir is None else Path(os.fspath(gate_dir)),  # pyright: ignore
        dims=None if model_config is None else ModelDims.of(model_config),
    )


def device_name(device: object) -> str:
    """The device that is meant; None is CUDA where there is one."""
    return environment.default_device() if device is None else str(device)
