"""Which backend is in force: contexts, the environment variable, and what counts as a backend."""

from __future__ import annotations

import os
from contextlib import ContextDecorator
from contextvars import ContextVar
from enum import StrEnum
from functools import lru_cache

import torch

from hf_attn_backends.backends import tracing
from hf_attn_backends.backends.base import AttentionBackend
from hf_attn_backends.backends.factory import backend_of, shared
from hf_attn_backends.backends.names import ALL_BACKENDS, AUTO, ENVIRONMENT_VARIABLE, parse
from hf_attn_backends.backends.planning import DEFAULT_ORDER
from hf_attn_backends.errors import InvalidCallError

ATTN_BACKEND = StrEnum("ATTN_BACKEND", {name.upper(): name for name in ALL_BACKENDS})
ATTN_BACKEND.__doc__ = "The package's backends, by name; members are strings."

BackendLike = str | AttentionBackend | type[AttentionBackend]

# None in place of a backend is `auto`: back to the environment and the default order.
_stack: ContextVar[tuple[AttentionBackend | None, ...]] = ContextVar("attn_backend", default=())


class attn_backend(ContextDecorator):
    """Run the calls in this scope under one backend, explicitly.

    Takes an enum member, a name, a class or an instance; `auto` goes back to per-call dispatch.
    Holds in this thread or task only, nests, is restored on exceptions, and the same object may be
    entered again inside itself. Whether the backend can serve is asked by each call, not on entry.

    Raises:
        UnknownBackendError: No backend has that name.
    """

    def __init__(self, backend: BackendLike) -> None:
        self.backend = as_backend(backend, "context")

    def __enter__(self) -> attn_backend:
        stack = (*_stack.get(), self.backend)
        _stack.set(stack)
        tracing.mirror(stack)
        return self

    def __exit__(self, *exception: object) -> None:
        stack = _stack.get()[:-1]
        _stack.set(stack)
        tracing.mirror(stack)


def get_backend(use_default: bool = True) -> AttentionBackend | None:
    """The backend in force: the context's, else the environment's, else the default's.

    A backend equals its name, so `get_backend() == "sdpa"` reads as one would expect.

    Args:
        use_default: Without context and environment, return what serves an ordinary call by
            default; False: return None.

    Raises:
        UnknownBackendError: `HF_ATTN_BACKEND` names no backend.
    """
    stack = _stack.get()
    found = stack[-1] if stack else None
    if found is None:
        asked = os.environ.get(ENVIRONMENT_VARIABLE)
        found = as_backend(asked, "environment") if asked else None
    if found is None and use_default:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        found = next(
            backend
            for backend in map(backend_of, DEFAULT_ORDER)
            if not backend.machine_refusals(device)
        )
    return found


in_context = _stack.get
"""The contexts of this thread or task, the innermost last; None is `auto`."""


def as_backend(backend: BackendLike, origin: str) -> AttentionBackend | None:
    """The instance that is meant by an enum member, a name, a class or an instance; None: auto."""
    if isinstance(backend, AttentionBackend):
        return backend
    if isinstance(backend, str):
        held = shared(backend)
        if held is None and parse(backend).plain == AUTO:
            return None
        return held or backend_of(str(backend), origin)
    if isinstance(backend, type) and issubclass(backend, AttentionBackend):
        return _instance(backend)
    raise InvalidCallError(
        f"backend must be a name, an AttentionBackend class or an instance, got {backend!r}"
    )


@lru_cache(maxsize=64)
def _instance(backend: type[AttentionBackend]) -> AttentionBackend:
    return backend()
