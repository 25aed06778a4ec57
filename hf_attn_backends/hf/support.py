"""What holds for every model class, patched family or not, once one of our names is asked for.

transformers accepts a registered name for any model, also for the classes that never look it up:
their own attention then runs, with a mask that was built for somebody else. Those are refused at
load here. And a composite's `set_attn_implementation` that is refused half-way is undone.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from typing import Any

from hf_attn_backends.errors import AttentionBackendError, BackendRefusedError, compose
from hf_attn_backends.hf import decisions, hooks
from hf_attn_backends.hf.register import NAMES

_ATTENTION_CLASS = re.compile(r"^class \w*Attention\w*\(", re.MULTILINE)
_LOOKS_UP = re.compile(r"ALL_ATTENTION_FUNCTIONS(\.get_interface\(|\.get\(|\[)")
_BASE_MODULE = "transformers.modeling_utils"
_MISSING = object()


def refuse_unsupported(model: Any, value: str | None) -> tuple[str | None, None]:
    """The policy on `PreTrainedModel`: refuse our names where they would not be looked up."""
    plain = value.removeprefix("paged|") if isinstance(value, str) else value
    if plain not in NAMES:
        return value, None
    name = type(model).__name__
    if not looks_up_interface(type(model)):
        reason = (
            f"{name} computes attention in its own code and never calls the function registered "
            "under attn_implementation, so another attention than the one asked for would run, "
            "with a mask that was not made for it"
        )
        raise BackendRefusedError(
            compose(
                f"attn_implementation='{value}' for {name}",
                [reason],
                works='attn_implementation="eager"',
            ),
            [reason],
        )
    return value, None


@functools.lru_cache(maxsize=1024)
def looks_up_interface(cls: type) -> bool:
    """Whether a model class, as far as its source tells, calls the registered function.

    True for a class that says so (`_supports_attention_backend`), for modules without attention of
    their own (composites, whose parts are asked one by one), and where no source can be read.
    """
    if getattr(cls, "_supports_attention_backend", False):
        return True
    models = (parent for parent in cls.__mro__ if hasattr(parent, hooks.CORRECT))
    names = {parent.__module__ for parent in models} - {_BASE_MODULE}
    sources = [source for name in names if (source := _source_of(name)) is not None]
    if any(_LOOKS_UP.search(source) for source in sources):
        return True
    return not any(_ATTENTION_CLASS.search(source) for source in sources)


def _source_of(module_name: str) -> str | None:
    module = sys.modules.get(module_name)
    if module is None:
        return None
    try:
        return inspect.getsource(module)
    except (OSError, TypeError):
        return None


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
    hooks.install(base, refuse_unsupported)
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
