"""What a run's record says before its first step: the decision, the live model, the machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_attn_backends import environment, provenance
from hf_attn_backends.backends.dims import ModelDims
from hf_attn_backends.hf import decisions as decided
from hf_attn_backends.hf import ranks
from hf_attn_backends.hf.live_modules import (
    LiveLayer,
    base_model,
    check_against_decisions,
    implementations,
    live_layers,
)

#: torch.compile modes that capture CUDA graphs, whose replays run no Python and are not counted.
_GRAPH_MODES = frozenset({"reduce-overhead", "max-autotune"})
_UNSAID = "unknown: the configuration does not say"


@dataclass(frozen=True, slots=True)
class LaunchFacts:
    """One rank's facts.

    Attributes:
        backend: The backend that the run is about.
        fields: The record's keys that do not depend on the run's identity.
        layers: The live attention modules.
        must_launch: Modules that have to launch the backend in every micro-batch.
        replays: Whether captured CUDA graphs may hide launches from the witness.
    """

    backend: str
    fields: dict[str, Any]
    layers: list[LiveLayer]
    must_launch: int
    replays: bool

    @property
    def digest(self) -> dict[str, Any]:
        """What has to be the same on every rank."""
        keys = ("attention_backend", "attention_requested", "attention_origin")
        gate = self.fields["gate"] or {}
        return {
            **{key: self.fields[key] for key in keys},
            "attention_verified": self.fields["attention_verified"],
            "kernel_source_sha256": gate.get("kernel_source_sha256"),
            "versions": self.fields["versions"],
        }


def collect(model: nn.Module, args: Any, collator: Any = None, mode: str = "train") -> LaunchFacts:
    """Verify the live model against its decisions and describe the launch.

    Raises:
        ExecutionMismatchError: An attention module runs another backend than was decided for it.
    """
    every_decision = decided.decisions_of(model)
    layers = live_layers(model, every_decision)
    check_against_decisions(layers)
    base = base_model(model)
    decision = decided.decision_of(base)
    config = getattr(base, "config", None)
    backend = decision.resolved if decision else _undecided_backend(config, layers)
    governed = [layer for layer in layers if layer.decision is not None]
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    flags = _flags(model, args, collator, mode)
    fields = {
        **_decision_fields(decision, backend, device),
        "attention_verified": {
            "layers": len(layers),
            "names": implementations(layers),
            "decided_layers": len(governed),
            "ok": True,
        },
        "model": _model_facts(base, config),
        "device": environment.device_facts(device),
        "versions": environment.versions(),
        "code": {
            **environment.code_state(),
            "argv": provenance.redacted_argv(),
            "env": provenance.safe_environment(),
        },
        "flags": flags,
    }
    must = sum(layer.implementation == backend for layer in governed)
    replays = device.type == "cuda" and flags["compile"] in _GRAPH_MODES
    return LaunchFacts(backend, fields, layers, must, replays)


def reading(facts: LaunchFacts, counted: bool) -> str:
    """How the counts of this run are to be read."""
    if not counted:
        return (
            f"torch.profiler lists the operators of one micro-batch; {facts.backend} is "
            "PyTorch's own, so later steps are vouched for by the live modules only"
        )
    flags = facts.fields["flags"]
    parts = ["one forward launch a layer and micro-batch"]
    if flags["gradient_checkpointing"] is True:
        parts = ["gradient checkpointing: two forward launches a layer and micro-batch"]
    parts.append("one backward launch where a gradient is needed")
    if flags["compile"] is not False:
        parts.append("counted inside the compiled graph as it runs")
    if facts.replays:
        parts.append("replays of captured CUDA graphs are not seen, so counts are a lower bound")
    if ranks.world()[1] > 1:
        parts.append("each rank counts its own")
    return "; ".join(parts)


def _undecided_backend(config: Any, layers: list[LiveLayer]) -> str:
    """The backend of a model that no decision was made for: what its language model says."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    said = getattr(text, "_attn_implementation", None)
    seen = implementations(layers)
    return str(said or (max(seen, key=lambda name: seen[name]) if seen else "unknown: no config"))


def _decision_fields(decision: Any, backend: str, device: torch.device) -> dict[str, Any]:
    from hf_attn_backends import selection

    if decision is not None:
        reports, reasons = decision.candidates, decision.reasons
        requested, origin, gate = decision.requested, decision.origin, decision.gate
    else:
        reports = tuple(selection.probe_backends(device=device).values())
        reasons = ("not a model that the selector decides on: read from the live configuration",)
        requested, origin, gate = None, "config", None
    return {
        "attention_requested": requested,
        "attention_origin": origin,
        "attention_backend": backend,
        "attention_reason": "; ".join(reasons),
        "attention_candidates": [each.as_dict() for each in reports]
        or "unknown: the decision was made without a probe",
        "gate": {"status": "ok", **gate} if isinstance(gate, Mapping) else None,
    }


def _model_facts(base: nn.Module, config: Any) -> dict[str, Any]:
    dims = ModelDims.of(config) if config is not None else ModelDims()
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in base.parameters()})
    return {
        "id": getattr(config, "_name_or_path", None) or "unknown: built from a configuration",
        "revision": getattr(config, "_commit_hash", None) or "unknown: not loaded from the Hub",
        "model_type": dims.model_type or f"unknown: {type(base).__name__} has no model_type",
        "head_dim": dims.head_dim or _UNSAID,
        "n_heads": dims.heads or _UNSAID,
        "n_kv_heads": dims.kv_heads or _UNSAID,
        "sliding_window": dims.sliding_window,
        "dtype": "+".join(dtypes) or "unknown: the model has no parameters",
    }


def _flags(model: nn.Module, args: Any, collator: Any, mode: str) -> dict[str, Any]:
    collator = getattr(collator, "data_collator", collator)  # inside Trainer's column remover
    named = None if collator is None else getattr(collator, "__name__", type(collator).__name__)
    # Layers hold the flag of what they do; the arguments say only what was asked for.
    checkpointing = any(getattr(each, "gradient_checkpointing", False) for each in model.modules())
    enabled = {
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "mem_efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),
        "cudnn": torch.backends.cuda.cudnn_sdp_enabled(),
        "math": torch.backends.cuda.math_sdp_enabled(),
    }
    return {
        "mode": mode,
        "compile": _compile_mode(model, args),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "gradient_checkpointing": checkpointing,
        "packing": "Flattening" in named
        if named is not None and named.startswith("DataCollator")
        else f"unknown: {named or 'a collator that is not visible'} does not say",
        "sdp_enabled": [name for name, on in enabled.items() if on] or ["none"],
    }


def _compile_mode(model: nn.Module, args: Any) -> str | bool:
    """False, or torch.compile's mode."""
    if getattr(args, "torch_compile", False):
        return getattr(args, "torch_compile_mode", None) or "default"
    compiled = any(
        hasattr(each, "_orig_mod") or getattr(each, "_compiled_call_impl", None) is not None
        for each in model.modules()
    )
    return "unknown mode" if compiled else False
