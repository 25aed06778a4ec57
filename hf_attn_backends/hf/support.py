"""What holds for every model class, patched family or not, once one of our names is asked for.

transformers accepts a registered name for any model, also for the classes that never look it up:
their own attention then runs, with a mask that was built for somebody else. Those are refused at
load here. And a composite's `set_attn_implementation` that is refused half-way is undone.
"""

from __future__ import annotations

import functools
from typing import Any

from hf_attn_backends.errors import AttentionBackendError, BackendRefusedError, compose
from hf_attn_backends.hf import decisions, gated_loading, hooks, interface_lookup
from hf_attn_backends.hf.register import NAMES

_MISSING = object()


def choose(model: Any, value: str | None) -> tuple[str | None, hooks.Commit | None]:
    """The policy on `PreTrainedModel`: the selector's where it was asked for, else refusals alone.

    Classes that are gated ask by a hook of their own, before this one; here it is their parts, and
    every model where `PreTrainedModel` itself is gated.
    """
    refuse_unsupported(model, value)
    if gated_loading.all_gated() or gated_loading.is_part(model.config):
        return gated_loading.choose(model, value)
    return value, None


def refuse_unsupported(model: Any, value: str | None) -> None:
    """Refuse our names where they cannot do what is asked, whatever the family."""
    plain = value.removeprefix("paged|") if isinstance(value, str) else value
    if plain not in NAMES:
        return
    reasons = []
    if not interface_lookup.looks_up_interface(type(model)):
        reasons.append(interface_lookup.never_looks_up(type(model)))
    if getattr(model.config, "output_attentions", None):
        reasons.append(
            "its configuration has output_attentions=True, and the attention weights are never "
            "formed, so an empty tuple would be returned"
        )
    if reasons:
        asked = f"attn_implementation='{value}' for {type(model).__name__}"
        works = 'attn_implementation="eager"'
        raise BackendRefusedError(compose(asked, reasons, works=works), reasons)


def _refuse_unchanged(model: Any, value: Any) -> None:
    """Refuse where transformers only warned that it cannot switch this class at run time."""
    now = model.config._attn_implementation
    plain = value.removeprefix("paged|") if isinstance(value, str) else value
    if plain not in NAMES or now.removeprefix("paged|") == plain:
        return
    reason = (
        f"transformers cannot switch {type(model).__name__} at run time (it finds no call of "
        f"ALL_ATTENTION_FUNCTIONS.get_interface in the class's source) and would go on with '{now}'"
    )
    raise BackendRefusedError(
        compose(
            f"set_attn_implementation('{value}')",
            [reason],
            works=f"loading the model anew with attn_implementation='{value}'",
        ),
        [reason],
    )


class _Undoing:
    """`set_attn_implementation` of the base class, undone where we refuse a part of it."""

    def __init__(self) -> None:
        self.active = False
        self.had: Any = None
        self.function: Any = None

    def install(self, cls: type) -> None:
        """Wrap the method; idempotent."""
        self.active = True
        if self.function is not None and cls.__dict__.get("set_attn_implementation") is (
            self.function
        ):
            return
        had = self.had = cls.__dict__["set_attn_implementation"]

        @functools.wraps(had)
        def set_attn_implementation(model: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return had(model, *args, **kwargs)
            before = _state_of(model)
            try:
                result = had(model, *args, **kwargs)
                _refuse_unchanged(model, args[0] if args else kwargs["attn_implementation"])
            except AttentionBackendError:
                _restore(before)
                raise
            return result

        self.function = set_attn_implementation
        cls.set_attn_implementation = set_attn_implementation  # type: ignore[attr-defined]

    def uninstall(self, cls: type) -> None:
        """Put the method back; if somebody wrapped ours, it does nothing from now on."""
        self.active = False
        if self.function is not None and cls.__dict__.get("set_attn_implementation") is (
            self.function
        ):
            cls.set_attn_implementation = self.had  # type: ignore[attr-defined]
            self.function = self.had = None


_undoing = _Undoing()


def install(base: type) -> None:
    """Hook `PreTrainedModel`; idempotent."""
    hooks.install(base, choose)
    _undoing.install(base)


def uninstall(base: type) -> None:
    """Restore `PreTrainedModel`."""
    _undoing.uninstall(base)
    hooks.uninstall(base)


_FIELDS = ("_attn_implementation_internal", "_attn_was_changed")


def _state_of(model: Any) -> tuple[list[tuple[Any, dict[str, Any]]], Any]:
    """Every configuration in a model with its two fields, and the decisions."""
    configs: dict[int, Any] = {}

    def add(config: Any) -> None:
        if config is None or id(config) in configs or not hasattr(config, "sub_configs"):
            return
        configs[id(config)] = config
        for name in config.sub_configs:
            add(getattr(config, name, None))

    for module in model.modules():
        add(getattr(module, "config", None))
    fields = [
        (config, {name: vars(config).get(name, _MISSING) for name in _FIELDS})
        for config in configs.values()
    ]
    return fields, decisions.snapshot(model)


def _restore(before: tuple[list[tuple[Any, dict[str, Any]]], Any]) -> None:
    fields, kept = before
    for config, values in fields:
        for name, value in values.items():
            if value is not _MISSING:
                vars(config)[name] = value
            else:
                vars(config).pop(name, None)
    decisions.restore(kept)
