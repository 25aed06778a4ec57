"""Registration with transformers: names, masks and hooks; now, or when transformers is imported.

transformers imports its parts lazily, and importing them here would cost seconds. So each part is
fitted when it is imported, by post-import hooks, and at once where it already was.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import wrapt

from hf_attn_backends.errors import RegistrationError, compose
from hf_attn_backends.hf import paged_routing

NAMES = ("triton_fa2", "triton_decode", "auto")
_REGISTERED = (*NAMES, *(paged_routing.PREFIX + name for name in NAMES))

_OURS = "__hf_attn_backends__"
lock = threading.RLock()
"""Held while transformers is changed."""
_active = False
_armed = False


def register() -> None:
    """Make our names valid in transformers and route Mistral through the selector; idempotent.

    Raises:
        RegistrationError: transformers holds a foreign value under one of our names.
    """
    global _active, _armed
    with lock:
        for module, (check, _, _) in _PARTS.items():
            if module in sys.modules:
                check(sys.modules[module])
        _active = True
        for module, (_, fit, _) in _PARTS.items():
            if _armed:
                if module in sys.modules:
                    fit(sys.modules[module])
            else:
                wrapt.register_post_import_hook(_when_active(fit), module)
        _armed = True


def unregister() -> None:
    """Restore transformers to what it was before `register`; idempotent.

    Classes that were patched are restored too; `register` brings Mistral's gate back, and `patch`
    that of others.

    What other code put on top of ours stays; ours then does nothing below it.
    """
    global _active
    with lock:
        _active = False
        for module, (_, _, undo) in reversed(_PARTS.items()):
            if module in sys.modules:
                undo(sys.modules[module])


def registered() -> bool:
    """Whether `register` was called, and `unregister` not since."""
    return _active


def _when_active(fit: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    def hook(module: ModuleType) -> None:
        with lock:
            if _active:
                fit(module)

    return hook


def _functions(kind: str) -> dict[str, Any]:
    """Our function for each name; made once, so that registering twice puts the same value."""
    if kind not in _made:
        if kind == "attention":
            make = importlib.import_module("hf_attn_backends.hf.adapter").attention_function
            made = {name: make(name) for name in NAMES}
            over_pages = importlib.import_module("hf_attn_backends.hf.paged").over_pages
            paged = {paged_routing.PREFIX + name: over_pages(name, made[name]) for name in NAMES}
            _made[kind] = made | paged
        else:  # continuous batching makes no masks
            mask = importlib.import_module("hf_attn_backends.hf.masks").visibility_mask
            _made[kind] = dict.fromkeys(NAMES, mask)
        for function in _made[kind].values():
            setattr(function, _OURS, True)
    return _made[kind]


_made: dict[str, dict[str, Any]] = {}


def _owned(value: Any) -> bool:
    """Whether a registered value is ours; by its mark, so that a re-import is still ours."""
    return getattr(value, _OURS, False) is True


def _check_interface(interface: Any, shared: Any) -> None:
    """Raise where one of our names is taken by somebody else."""
    mapping = interface._global_mapping
    for name in _REGISTERED:
        held = mapping.get(name)
        if held is None and shared is not None:
            held = shared._local_mapping.get(name)
        if held is not None and not _owned(held):
            raise RegistrationError(
                compose(
                    f"register() could not put '{name}' into transformers' {interface.__name__}",
                    [f"it already holds {held!r} under that name, which is not ours"],
                    fix=f"{interface.__name__}._global_mapping.pop('{name}'), then register()",
                )
            )


def _put(interface: Any, kind: str) -> None:
    for name, function in _functions(kind).items():
        interface.register(name, function)


def _take(interface: Any) -> None:
    for name in _REGISTERED:
        if _owned(interface._global_mapping.get(name)):
            del interface._global_mapping[name]


def _check_attention(module: Any) -> None:
    _check_interface(module.AttentionInterface, module.ALL_ATTENTION_FUNCTIONS)


def _fit_attention(module: Any) -> None:
    _check_attention(module)
    _put(module.AttentionInterface, "attention")
    importlib.import_module("hf_attn_backends.hf.support").install(module.PreTrainedModel)


def _undo_attention(module: Any) -> None:
    importlib.import_module("hf_attn_backends.hf.gated_loading").uninstall_all()
    _take(module.AttentionInterface)
    importlib.import_module("hf_attn_backends.hf.support").uninstall(module.PreTrainedModel)


def _check_masks(module: Any) -> None:
    _check_interface(module.AttentionMaskInterface, module.ALL_MASK_ATTENTION_FUNCTIONS)


def _fit_masks(module: Any) -> None:
    _check_masks(module)
    _put(module.AttentionMaskInterface, "mask")


def _undo_masks(module: Any) -> None:
    _take(module.AttentionMaskInterface)


def _fit_mistral(module: Any) -> None:
    loading = importlib.import_module("hf_attn_backends.hf.gated_loading")
    loading.install(module.MistralPreTrainedModel)


def _fit_batching(module: Any) -> None:
    paged_routing.fit(module, NAMES)


def _nothing(module: Any) -> None:
    """Neither Mistral's classes nor continuous batching hold names, so there is nothing to check;
    and Mistral's gate is lifted with every other.
    """


_PARTS: dict[str, tuple[Callable, Callable, Callable]] = {
    "transformers.masking_utils": (_check_masks, _fit_masks, _undo_masks),
    "transformers.modeling_utils": (_check_attention, _fit_attention, _undo_attention),
    "transformers.models.mistral.modeling_mistral": (_nothing, _fit_mistral, _nothing),
    **dict.fromkeys(paged_routing.MODULES, (_nothing, _fit_batching, paged_routing.undo)),
}
