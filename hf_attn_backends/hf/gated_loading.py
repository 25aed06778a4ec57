"""Loading through the selector: every value of `attn_implementation` for a gated model class.

None and dicts included, at construction (`from_pretrained`, `from_config`, the class itself) and
at `set_attn_implementation`. Mistral's classes are gated when transformers imports them, others by
`patch`. What a composite of a gated class holds (a vision tower, a text model of another family)
is asked about likewise, with its own dimensions, though its class is not gated.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

from hf_attn_backends.errors import BackendRefusedError, compose
from hf_attn_backends.hf import config_watch, decisions, hooks

_gated: list[type] = []  # in the order of their installation
_owners: dict[int, tuple[weakref.ref, type]] = {}  # by a part's configuration: whose part it is


def install(cls: type) -> None:
    """Route a `PreTrainedModel` class and its subclasses through the selector; idempotent."""
    if cls not in _gated:
        _gated.append(cls)
    if not _is_base(cls):
        hooks.install(cls, choose)
    config_class = getattr(cls, "config_class", None)
    if config_class is not None:
        config_watch.watch(config_class)


def uninstall(cls: type) -> None:
    """Restore a class, and its configuration's, to what they were before `install`; idempotent."""
    if cls not in _gated:
        return
    _gated.remove(cls)
    if not _is_base(cls):
        hooks.uninstall(cls)
    config_class = getattr(cls, "config_class", None)
    if config_class is not None and not any(
        getattr(other, "config_class", None) is config_class for other in _gated
    ):
        config_watch.unwatch(config_class)


def uninstall_all() -> None:
    """Restore every class, the last one first."""
    for cls in reversed(_gated.copy()):
        uninstall(cls)


def is_gated(cls: type) -> bool:
    """Whether a model class, or one that it inherits from, is gated."""
    return any(parent in _gated for parent in cls.__mro__)


def all_gated() -> bool:
    """Whether `PreTrainedModel` itself is gated, and so every model."""
    return any(_is_base(cls) for cls in _gated)


def is_part(config: Any) -> bool:
    """Whether a configuration belongs to a composite of a gated class."""
    found = _owners.get(id(config))
    return found is not None and found[0]() is config and is_gated(found[1])


def choose(model: Any, value: str | None) -> tuple[str | None, Callable[[str], None]]:
    """The policy: what the selector answers for one value, with this model's dimensions.

    Args:
        model: At construction it has neither parameters nor a device, only its configuration.
        value: What was asked for; None for transformers' default. Within one load the inner model
            is asked again, with what the outer one was answered.

    Returns:
        The name to go on with, and what keeps the decision once transformers has accepted it. None
        stays None, for a family may have a default of its own, unless SDPA would leave something
        out that the model needs: then it is eager.

    Raises:
        SelectionError: The refusal, with every reason.
    """
    config = model.config
    _own_parts(config, type(model))
    decision = config_watch.decide(value, config)
    if value is None and (reasons := _against_sdpa(config)):
        decision = dataclasses.replace(
            decision, resolved="eager", reasons=(*decision.reasons, *reasons)
        )
    before = decisions.decision_of(config)
    if before is not None and value == before.resolved == decision.resolved:
        decision = before  # the request is what was asked first

    def keep(result: str) -> None:
        resolved, reasons = decision.resolved, decision.reasons
        if result not in (resolved, resolved.removeprefix("paged|")):
            if value is not None:
                reason = f"transformers would run '{result}' instead, without being asked to"
                asked = f"attn_implementation='{value}' for {type(model).__name__}"
                works = f'attn_implementation="{result}"'
                raise BackendRefusedError(compose(asked, [reason], works=works), [reason])
            reasons = (*reasons, f"transformers fell back to '{result}'")
        if result == resolved:
            decisions.remember(model, decision)
        else:  # the default's fallback; or 5.24, which takes the prefix paged| off
            kept = dataclasses.replace(decision, resolved=result, reasons=reasons)
            decisions.remember(model, kept)

    stays = value is None and decision.resolved == "sdpa"
    return (None if stays else decision.resolved), keep


def _against_sdpa(config: Any) -> tuple[str, ...]:
    """Why SDPA, transformers' default, cannot serve a model; transformers 5.17 drops a softcap."""
    try:
        config_watch.decide("sdpa", config)
    except BackendRefusedError as refused:
        return refused.reasons
    return ()


def _is_base(cls: type) -> bool:
    """Whether a class is `PreTrainedModel`; its hook is there already, and asks `all_gated`."""
    return cls.__module__ == hooks.BASE_MODULE


def _own_parts(config: Any, owner: type) -> None:
    """Note whose parts the configurations inside a composite one are, at any depth."""
    for _, part in config_watch.parts(config):
        if not is_part(part):
            key = id(part)

            def forget(dead: weakref.ref, key: int = key) -> None:
                if key in _owners and _owners[key][0] is dead:
                    del _owners[key]

            _owners[key] = (weakref.ref(part, forget), owner)
        _own_parts(part, owner)
