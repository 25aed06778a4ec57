"""Direct writes of `config._attn_implementation` on a living model, which pass every check by.

A configuration class whose model class is gated gets a property of its own over the inherited one.
It asks the selector for the model's own part and for every part of a composite, and only where a
model was built from that configuration object: before, the construction asks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hf_attn_backends import selection
from hf_attn_backends.hf import decisions

_PROPERTY = "_attn_implementation"

_watchers: dict[type, property] = {}


def decide(value: str | None, config: Any) -> selection.Decision:
    """Ask the selector about one value, with the dimensions of one configuration."""
    origin = "default" if value is None else "argument"
    return selection.decide(value, origin=origin, model_config=config)


def parts(config: Any) -> Iterator[tuple[str, Any]]:
    """The configurations that a composite one holds, with their names; one level."""
    for name in getattr(config, "sub_configs", ()):
        part = getattr(config, name, None)
        if part is not None:
            yield name, part


def watch(config_class: type) -> None:
    """Let direct writes ask; idempotent."""
    if _watched(config_class):
        return
    inherited = _inherited(config_class)

    def write(config: Any, value: Any) -> None:
        made = _decisions(config, value) if _watched(config_class) else []
        inherited.fset(config, _answered(value, made))  # type: ignore[misc]
        for part, decision in made:
            decisions.remember(part, decision)

    watching = property(inherited.fget, write, inherited.fdel, inherited.__doc__)
    _watchers[config_class] = watching
    setattr(config_class, _PROPERTY, watching)


def unwatch(config_class: type) -> None:
    """Restore the inherited property; idempotent."""
    if _watched(config_class):
        delattr(config_class, _PROPERTY)
    _watchers.pop(config_class, None)


def _decisions(config: Any, value: Any) -> list[tuple[Any, selection.Decision]]:
    """What the selector says of a value for a configuration and its parts, where it has a say."""
    own = value.get("") if isinstance(value, dict) else value
    before = decisions.decision_of(config)
    made = []
    if before is not None and own is not None and own != before.resolved:
        made.append((config, decide(own, config)))
    for name, part in parts(config):
        if not _watched(type(part)):  # else its own property asks
            made += _decisions(part, value.get(name) if isinstance(value, dict) else value)
    return made


def _answered(value: Any, made: list[tuple[Any, selection.Decision]]) -> Any:
    """The value to write: an alias becomes the name that it stands for."""
    names = {decision.requested: decision.resolved for _, decision in made}
    if isinstance(value, dict):
        return {key: _answered(one, made) for key, one in value.items()}
    return names.get(value, value)


def _watched(config_class: type) -> bool:
    ours = _watchers.get(config_class)
    return ours is not None and config_class.__dict__.get(_PROPERTY) is ours


def _inherited(config_class: type) -> property:
    for cls in config_class.__mro__:
        found = cls.__dict__.get(_PROPERTY)
        if isinstance(found, property):
            return found
    raise AttributeError(f"{config_class.__name__} has no property {_PROPERTY}")
