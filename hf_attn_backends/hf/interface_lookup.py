"""Whether a model class calls the attention function that `attn_implementation` names."""

from __future__ import annotations

import functools
import inspect
import re
import sys

from hf_attn_backends.hf import hooks

_ATTENTION_CLASS = re.compile(r"^class \w*Attention\w*\(", re.MULTILINE)
_LOOKS_UP = re.compile(r"ALL_ATTENTION_FUNCTIONS(\.get_interface\(|\.get\(|\[)")


@functools.lru_cache(maxsize=1024)
def looks_up_interface(cls: type) -> bool:
    """Whether a model class, as far as its source tells, calls the registered function.

    True for a class that says so (`_supports_attention_backend`), for modules without attention of
    their own (composites, whose parts are asked one by one), and where no source can be read.
    """
    if getattr(cls, "_supports_attention_backend", False):
        return True
    models = (parent for parent in cls.__mro__ if hasattr(parent, hooks.CORRECT))
    names = {parent.__module__ for parent in models} - {hooks.BASE_MODULE}
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


def never_looks_up(cls: type) -> str:
    """The reason against a class that `looks_up_interface` finds wanting."""
    return (
        f"{cls.__name__} computes attention in its own code and never calls the function "
        "registered under attn_implementation, so another attention than the one asked for would "
        "run, with a mask that was not made for it"
    )
