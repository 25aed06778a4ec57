"""Mistral's way through the selector: every value of `attn_implementation`, None included.

`install` brings the same hook to any model family. Mistral gets it when transformers imports its
modelling code, and its configuration also asks when `config._attn_implementation` is written
directly on a model that lives (which passes every check of transformers by).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from hf_attn_backends import selection
from hf_attn_backends.errors import BackendRefusedError, compose
from hf_attn_backends.hf import decisions, hooks

_PROPERTY = "_attn_implementation"


def install(cls: type) -> None:
    """Route a `PreTrainedModel` class and its subclasses through the selector; idempotent."""
    hooks.install(cls, choose)


def uninstall(cls: type) -> None:
    """Restore a class to what it was before `install`."""
    hooks.uninstall(cls)


def choose(model: Any, value: str | None) -> tuple[str, Callable[[str], None]]:
    """The policy: what the selector answers for one value, with this model's dimensions.

    Args:
        model: At construction it has neither parameters nor a device, only its configuration.
        value: What was asked for; None for transformers' default. Within one load the inner model
            is asked again, with what the outer one was answered.

    Returns:
        The name to go on with, and what keeps the decision once transformers has accepted it.

    Raises:
        SelectionError: The refusal, with every reason.
    """
    config = model.config
    decision = decide(value, config)
    before = decisions.decision_of(config)
    if before is not None and value == before.resolved == decision.resolved:
        decision = before  # the request is what was asked first

    def keep(result: str) -> None:
        if result != decision.resolved.removeprefix("paged|") and result != decision.resolved:
            if value is not None:
                reason = f"transformers would run '{result}' instead, without being asked to"
                raise BackendRefusedError(
                    compose(
                        f"attn_implementation='{value}' for {type(model).__name__}",
                        [reason],
                        works=f'attn_implementation="{result}"',
                    ),
                    [reason],
                )
            decisions.remember(
                model,
                dataclasses.replace(
                    decision,
                    resolved=result,
                    reasons=(*decision.reasons, f"transformers fell back to '{result}'"),
                ),
            )
            return
        if result != decision.resolved:  # transformers 5.24 takes the prefix paged| off
            decisions.remember(model, dataclasses.replace(decision, resolved=result))
            return
        decisions.remember(model, decision)

    return decision.resolved, keep


def decide(value: str | None, config: Any) -> selection.Decision:
    """Ask the selector about one value, with the dimensions of one configuration."""
    origin = "default" if value is None else "argument"
    return selection.decide(value, origin=origin, model_config=config)


def watch_config(config_class: type) -> None:
    """Let direct writes of `config._attn_implementation` ask too; idempotent.

    Only where a model was built from that configuration object: before, the construction asks.
    """
    if _watched(config_class):
        return
    inherited = _inherited_property(config_class)

    def write(config: Any, value: Any) -> None:
        own = value.get("") if isinstance(value, dict) else value
        before = decisions.decision_of(config)
        if before is None or own is None or own == before.resolved or not _watched(config_class):
            inherited.fset(config, value)  # type: ignore[misc]
            return
        decision = decide(own, config)
        answer = decision.resolved
        inherited.fset(  # type: ignore[misc]
            config, {**value, "": answer} if isinstance(value, dict) else answer
        )
        decisions.remember(config, decision)

    watching = property(inherited.fget, write, inherited.fdel, inherited.__doc__)
    _watchers[config_class] = watching
    setattr(config_class, _PROPERTY, watching)


def unwatch_config(config_class: type) -> None:
    """Restore the inherited property."""
    if _watched(config_class):
        delattr(config_class, _PROPERTY)
    _watchers.pop(config_class, None)


_watchers: dict[type, property] = {}


def _watched(config_class: type) -> bool:
    ours = _watchers.get(config_class)
    return ours is not None and config_class.__dict__.get(_PROPERTY) is ours


def _inherited_property(config_class: type) -> property:
    for cls in config_class.__mro__:
        found = cls.__dict__.get(_PROPERTY)
        if isinstance(found, property):
            return found
    raise AttributeError(f"{config_class.__name__} has no property {_PROPERTY}")
