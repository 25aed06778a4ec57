"""The table of backends: ours, registered ones, and installed plug-ins.

Third parties come in by a subclass, by a bare instance, or by an entry point in the group
`hf_attn_backends.backends`. A plug-in that is broken becomes a backend that refuses, with the
error as its reason; importing the package never fails for it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

import torch
from torch import Tensor

from hf_attn_backends.backends.base import AttentionBackend
from hf_attn_backends.backends.names import ALL_BACKENDS, parse, unknown
from hf_attn_backends.call import AttentionCall
from hf_attn_backends.errors import CallRefusedError, RegistrationError, compose

ENTRY_POINTS = "hf_attn_backends.backends"

_Source = type[AttentionBackend] | AttentionBackend

_OURS = {
    "eager": ("eager", "EagerBackend"),
    "sdpa": ("sdpa", "SdpaBackend"),
    "flash_attention_2": ("flash_attention_2", "FlashAttentionBackend"),
    "flash_attention_3": ("flash_attention_3", "FlashAttention3Backend"),
    "flex_attention": ("flex_attention", "FlexBackend"),
    "triton_fa2": ("triton_fa2", "TritonFA2Backend"),
    "triton_decode": ("triton_decode", "TritonDecodeBackend"),
    "flashmla": ("flashmla", "FlashMLABackend"),
}

_registered: dict[str, _Source] = {}
_shared: dict[str, AttentionBackend] = {}
_plugins_loaded = False


class BrokenBackend(AttentionBackend):
    """Stands in for a plug-in that cannot be loaded; refuses everything, with the reason."""

    counts_itself = True

    def __init__(self, name: str, reason: str) -> None:
        self.name = name
        self.reason = reason

    def environment_refusals(self, device: torch.device) -> list[str]:
        """Why the plug-in cannot be loaded."""
        return [self.reason]

    def refusals(self, call: AttentionCall) -> list[str]:
        """Nothing of the call: `environment_refusals` has the reason."""
        return []

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall, **kwargs: Any
    ) -> Tensor:
        """Refuses, for those who call it without asking."""
        raise CallRefusedError(compose(f"{self.name} cannot serve", [self.reason]), [self.reason])


class AttentionBackendFactory:
    """Registers, creates and lists backends by name."""

    @classmethod
    def register(cls, name: str, backend: _Source | None = None) -> Any:
        """Register a subclass or an instance under a name; also a class decorator.

        Args:
            name: The backend's name; it must be free.
            backend: An `AttentionBackend` subclass or instance; left out, a decorator is returned.

        Raises:
            RegistrationError: The name is taken by another backend, or this is not a backend.
        """
        if backend is None:

            def decorate(source: type[AttentionBackend]) -> type[AttentionBackend]:
                cls.register(name, source)
                return source

            return decorate
        reasons = _registration_refusals(name, backend)
        if reasons:
            raise RegistrationError(compose(f"backend '{name}' cannot be registered", reasons))
        if _registered.get(name) is not backend:
            _shared.pop(name, None)
        _registered[name] = backend
        return backend

    @classmethod
    def unregister(cls, name: str) -> None:
        """Take a registered backend out again; ours stay."""
        _registered.pop(name, None)
        _shared.pop(name, None)

    @classmethod
    def create(cls, name: str, **kwargs: object) -> AttentionBackend:
        """Make a backend; an instance that was registered as one is returned as it is.

        Raises:
            UnknownBackendError: No backend has that name.
        """
        source = _source_of(name, "argument")
        return source(**kwargs) if isinstance(source, type) else source

    @classmethod
    def list_registered(cls) -> tuple[str, ...]:
        """Every name: ours in the table's order, then the others, sorted."""
        load_plugins()
        return (*ALL_BACKENDS, *sorted(set(_registered) - set(ALL_BACKENDS)))


def backend_of(name: str, origin: str = "argument") -> AttentionBackend:
    """The shared instance of a backend.

    Args:
        name: In any spelling that `names.parse` knows.
        origin: Where the name came from, for the error.

    Raises:
        UnknownBackendError: No backend has that name.
    """
    held = _shared.get(name)
    if held is None:
        source = _source_of(name, origin)
        held = source() if isinstance(source, type) else source
        _shared[held.name] = _shared[name] = held
    return held


def shared(name: str) -> AttentionBackend | None:
    """The shared instance if it was made already and the name is spelled exactly."""
    return _shared.get(name)


def load_plugins() -> None:
    """Load the installed plug-ins once; a broken one becomes a `BrokenBackend`."""
    global _plugins_loaded
    if _plugins_loaded:
        return
    _plugins_loaded = True
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        try:
            source = entry.load()
            if not isinstance(source, type) and not isinstance(source, AttentionBackend):
                source = source()  # a function that makes the backend
            reasons = _registration_refusals(entry.name, source)
        except Exception as error:  # any failure of foreign code is that plug-in's reason
            reasons = [f"loading it raised {type(error).__name__}: {error}"]
            source = None
        if reasons:
            reason = f"the plug-in {entry.name} ({entry.value}) is broken: {'; '.join(reasons)}"
            if entry.name not in _registered and entry.name not in ALL_BACKENDS:
                _registered[entry.name] = BrokenBackend(entry.name, reason)
        else:
            _registered[entry.name] = source  # pyright: ignore[reportArgumentType]


def _source_of(name: str, origin: str) -> _Source:
    plain = parse(name).plain if isinstance(name, str) else name
    if plain in _OURS:
        module, class_name = _OURS[plain]
        return getattr(importlib.import_module(f"hf_attn_backends.backends.{module}"), class_name)
    if plain not in _registered:
        load_plugins()
    if plain not in _registered:
        raise unknown(name, origin, AttentionBackendFactory.list_registered())
    return _registered[plain]


def _registration_refusals(name: str, source: object) -> list[str]:
    kind = source if isinstance(source, type) else type(source)
    if not issubclass(kind, AttentionBackend):
        return [f"it must be an AttentionBackend subclass or instance, got {kind.__name__}"]
    missing = sorted(getattr(kind, "__abstractmethods__", ()))
    reasons = []
    if missing:
        reasons.append(f"{kind.__name__} must implement {', '.join(missing)}")
    if name in ALL_BACKENDS:
        reasons.append("that name belongs to the package's own backend")
    elif _registered.get(name, source) is not source:
        reasons.append(f"that name is taken by {_registered[name]!r}")
    if getattr(source, "name", "") != name:
        reasons.append(f"its `name` must be '{name}', got '{getattr(source, 'name', '')}'")
    return reasons


def forget_registered() -> None:
    """Drop every registration, and have plug-ins loaded anew; for tests."""
    global _plugins_loaded
    _registered.clear()
    _shared.clear()
    _plugins_loaded = False
