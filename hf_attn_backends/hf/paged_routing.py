"""How continuous batching comes to take our names.

transformers' continuous batching knows two kinds of attention: those it writes masks for (eager,
SDPA), and those that read cumulative lengths and block tables, which it tells by the word "flash"
in the name. Ours are of the second kind under other names, so that transformers 5.24 refuses them,
and 5.17 swaps them for a flash implementation where one is installed. In its modules, and only
there, the question "is this flash attention?" is therefore answered with yes for our names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

PREFIX = "paged|"
"""transformers 5.17 registers the functions of continuous batching under names of their own."""

_PACKAGE = "transformers.generation.continuous_batching"
MODULES = tuple(f"{_PACKAGE}.{name}" for name in ("cache", "continuous_api", "initialization"))

_LOADERS = ("lazy_import_flash_attention", "lazy_import_paged_flash_attention")
_QUESTION = "is_flash_attention_requested"

_fitted: dict[tuple[str, str], tuple[Callable, Callable]] = {}
"""(module, attribute) -> ours, and what stood there before."""


def fit(module: ModuleType, names: tuple[str, ...]) -> None:
    """Make one module of continuous batching take our names; idempotent.

    Args:
        module: One of `MODULES`.
        names: The names, without prefix.
    """
    for attribute, make in _REPLACEMENTS.items():
        key = (module.__name__, attribute)
        had = vars(module).get(attribute)
        if had is None or (key in _fitted and had is _fitted[key][0]):
            continue
        _fitted[key] = (make(had, names, key), had)
        setattr(module, attribute, _fitted[key][0])


def undo(module: ModuleType) -> None:
    """Put back what `fit` replaced; below what others put over it, ours does nothing any more."""
    for attribute in _REPLACEMENTS:
        ours, had = _fitted.pop((module.__name__, attribute), (None, None))
        if ours is not None and vars(module).get(attribute) is ours:
            setattr(module, attribute, had)


def _ours(name: str | None, names: tuple[str, ...], key: tuple[str, str]) -> bool:
    return key in _fitted and isinstance(name, str) and name.removeprefix(PREFIX) in names


def _answer(had: Callable, names: tuple[str, ...], key: tuple[str, str]) -> Callable:
    @functools.wraps(had)
    def is_flash_attention_requested(
        config: Any = None, requested_attention_implementation: str | None = None, **kwargs: Any
    ) -> bool:
        name = requested_attention_implementation
        if name is None and config is not None:
            name = config._attn_implementation
        return _ours(name, names, key) or had(config, requested_attention_implementation, **kwargs)

    return is_flash_attention_requested


def _loader(had: Callable, names: tuple[str, ...], key: tuple[str, str]) -> Callable:
    """Continuous batching only asks whether there is a function that reads block tables."""

    @functools.wraps(had)
    def lazy_import(implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        if _ours(implementation, names, key):
            return _Present()
        return had(implementation, *args, **kwargs)

    return lazy_import


class _Present(tuple):
    """What a flash package's loader gives, with something at every place."""

    __slots__ = ()

    def __getitem__(self, _place: Any) -> Any:
        return self


_REPLACEMENTS: dict[str, Callable] = {_QUESTION: _answer, **dict.fromkeys(_LOADERS, _loader)}
