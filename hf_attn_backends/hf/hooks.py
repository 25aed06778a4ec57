"""How a model class is made to ask before it takes an attention implementation.

Two methods of a `PreTrainedModel` class see every value: `_check_and_adjust_attn_implementation`
(construction and `set_attn_implementation`, None, `paged|...` and hub kernels included) and
`get_correct_attn_implementation` (sub-models of a composite). `install` sets both on one class;
`uninstall` restores exactly what was there, also where others patched before or after. Models of
the Hugging Face team use the same two methods for the same purpose (HRM-Text).
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

CHECK = "_check_and_adjust_attn_implementation"
CORRECT = "get_correct_attn_implementation"
BASE_MODULE = "transformers.modeling_utils"
"""Where `PreTrainedModel` is; `support` has its hook."""
METHODS = {CHECK: "attn_implementation", CORRECT: "requested_attention"}
"""The methods, and the name of the argument that each is asked about."""

_MARK = "__hf_attn_backends_hook__"


Commit = Callable[[str], None]
"""Called with what transformers made of the answer, once it has accepted it."""


class Policy(Protocol):
    """What a hook asks about one value, before transformers sees it."""

    def __call__(self, model: Any, value: str | None) -> tuple[str | None, Commit | None]:
        """Raise, or give the value to go on with and what to do when it was accepted."""
        ...


class _Hook:
    """The state of one replaced method.

    Attributes:
        function: The replacement itself. A wrapper made with `functools.wraps` copies the marks of
            what it wraps, so that the mark alone does not say whose a function is.
        had: What stood in the class's own `__dict__` before, or None where it was inherited.
        active: False once uninstalled: a hook that somebody wrapped passes everything on.
    """

    __slots__ = ("active", "function", "had")

    def __init__(self, had: Any) -> None:
        self.function: Callable | None = None
        self.had = had
        self.active = True


_hooks: weakref.WeakKeyDictionary[type, list[_Hook]] = weakref.WeakKeyDictionary()
_busy = threading.local()


@contextmanager
def _entered(policy: Policy, model: Any) -> Iterator[bool]:
    """Whether this is the outermost hook of one policy around one model."""
    inside: set[tuple[int, int]] = _busy.__dict__.setdefault("inside", set())
    key = (id(policy), id(model))
    if key in inside:
        yield False
        return
    inside.add(key)
    try:
        yield True
    finally:
        inside.discard(key)


def install(cls: type, policy: Policy) -> None:
    """Make a model class ask `policy` about every attention implementation; idempotent.

    Args:
        cls: A `PreTrainedModel` class; its subclasses inherit the hook.
        policy: Asked once per value, by the outermost of the hooked methods.
    """
    for hook in _hooks.setdefault(cls, []):
        hook.active = True
    for name in METHODS:
        current = cls.__dict__.get(name)
        if _hook_of(current) is None:
            hook = _make(cls, name, current, policy)
            _hooks[cls].append(hook)
            setattr(cls, name, hook.function)


def uninstall(cls: type) -> None:
    """Restore both methods of a class; a hook that somebody wrapped is switched off instead."""
    hooks = _hooks.get(cls, [])
    for hook in hooks:
        hook.active = False
    for name in METHODS:
        hook = _hook_of(cls.__dict__.get(name))
        if hook is None:
            continue
        if hook.had is None:
            delattr(cls, name)
        else:
            setattr(cls, name, hook.had)
        if hook in hooks:
            hooks.remove(hook)


def installed(cls: type) -> bool:
    """Whether a hook of ours is at work in both methods of a class."""
    hooks = [_hook_of(cls.__dict__.get(name)) for name in METHODS]
    return all(hook is not None and hook.active for hook in hooks)


def _hook_of(method: Any) -> _Hook | None:
    hook = getattr(method, "__dict__", {}).get(_MARK)
    return hook if hook is not None and hook.function is method else None


def _make(cls: type, name: str, current: Any, policy: Policy) -> _Hook:
    state = _Hook(current)

    def following(self: Any) -> Callable:
        # `super`, not the function that was inherited at install time: a base class that is
        # patched later is still asked
        return getattr(super(cls, self), name) if current is None else current.__get__(self)

    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not state.active:
            return following(self)(*args, **kwargs)
        with _entered(policy, self) as outermost:
            if not outermost:
                return following(self)(*args, **kwargs)
            value, args = (args[0], args[1:]) if args else (kwargs.pop(METHODS[name]), ())
            answer, commit = policy(self, value)
            result = following(self)(answer, *args, **kwargs)
            if commit is not None:
                commit(result)
            return result

    functools.update_wrapper(hook, getattr(cls, name))
    if current is None:
        del hook.__dict__["__wrapped__"]  # inherited: not wrapped, asked through super
    hook.__dict__[_MARK] = state  # over the mark of a hooked parent, which was copied
    state.function = hook
    return state
