"""What the attention modules of a live model say they run, whatever anybody decided before.

transformers reads `module.config._attn_implementation` in every forward pass of every layer, so
this is read there, from each module's own configuration object: a value that was written behind
the selector's back shows here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from hf_attn_backends.errors import ExecutionMismatchError, compose


@dataclass(frozen=True, slots=True)
class LiveLayer:
    """One attention module.

    Attributes:
        name: Its path in the model.
        implementation: What its configuration says now.
        decision: The decision that governs it, or None (a model that the selector does not know).
        config: The configuration object that its forward pass reads.
    """

    name: str
    implementation: str
    decision: Any
    config: Any = field(default=None, repr=False, compare=False)

    def now(self) -> str:
        """What its configuration says at this moment."""
        return str(self.config._attn_implementation)


def base_model(model: nn.Module) -> nn.Module:
    """The transformers model inside PEFT, DDP, FSDP or torch.compile wrappers."""
    from transformers import PreTrainedModel

    return next((each for each in model.modules() if isinstance(each, PreTrainedModel)), model)


def live_layers(model: nn.Module, decisions: Mapping[str, Any] | None = None) -> list[LiveLayer]:
    """Every attention module of a model.

    Args:
        model: The model, wrapped or not.
        decisions: As `decisions.decisions_of(model)` gives them: by the path of the sub-model
            that a decision was made for. The nearest one above a module governs it.
    """
    found: list[tuple[bool, LiveLayer]] = []
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        implementation = getattr(config, "_attn_implementation", None)
        is_attention = "Attention" in type(module).__name__
        if is_attention and implementation and not hasattr(module, "set_attn_implementation"):
            decision = _governing(decisions or {}, name)
            layer = LiveLayer(name, str(implementation), decision, config)
            found.append((hasattr(module, "is_causal"), layer))
    # Attention functions read `module.is_causal`; a module without it only wraps one that has it.
    reads = any(has for has, _ in found)
    return [layer for has, layer in found if has or not reads]


def implementations(layers: list[LiveLayer]) -> dict[str, int]:
    """How many attention modules run which implementation."""
    return dict(Counter(layer.implementation for layer in layers))


def check_against_decisions(layers: list[LiveLayer]) -> None:
    """Raise unless every governed module runs what was decided for it.

    Raises:
        ExecutionMismatchError: Names the decision and the modules that say otherwise.
    """
    strays: dict[tuple[str, str], list[str]] = {}
    for layer in layers:
        if layer.decision is not None and layer.implementation != layer.decision.resolved:
            key = (layer.decision.resolved, layer.implementation)
            strays.setdefault(key, []).append(layer.name)
    if not strays:
        return
    reasons = [
        f"{len(names)} of {len(layers)} attention modules run {seen!r}, decided was {decided!r} "
        f"({', '.join(names[:3])}{', …' if len(names) > 3 else ''})"
        for (decided, seen), names in strays.items()
    ]
    decided = next(iter(strays))[0]
    raise ExecutionMismatchError(
        compose(
            "the live model is not what was decided at loading",
            reasons,
            works="the decision, or a new one: both go through set_attn_implementation",
            fix=f"model.set_attn_implementation({decided!r}) before Trainer.train(), and no "
            "writes to config._attn_implementation",
        )
    )


def _governing(decisions: Mapping[str, Any], name: str) -> Any:
    """The decision made for the nearest sub-model around a module."""
    around = [path for path in decisions if path == "" or name.startswith(f"{path}.")]
    return decisions[max(around, key=len)] if around else None
