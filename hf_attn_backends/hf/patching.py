"""`patch` and `unpatch`: gated loading for model classes beside Mistral's, as their users ask."""

from __future__ import annotations

from typing import Any, TypeVar

from hf_attn_backends.errors import RegistrationError, compose
from hf_attn_backends.hf import gated_loading, interface_lookup, register

Class = TypeVar("Class", bound=type)


def patch(model_class: Class) -> Class:
    """Route the loading of a model class through the selector, as Mistral's is; idempotent.

    From then on every value of `attn_implementation` for the class and its subclasses (None and
    dicts included, through `from_pretrained`, `from_config`, the auto classes,
    `set_attn_implementation` and a direct write to the configuration) is served as it was asked
    for, or refused with every reason, what the gate covers and the model's head_dim among them.
    The parts of a composite are asked about one by one. `unpatch` or `unregister` restores it.

    Args:
        model_class: A class of transformers' `PreTrainedModel`. The class that a whole family
            inherits from (`LlamaPreTrainedModel`) covers every head of it; `PreTrainedModel`
            itself covers every model.

    Returns:
        The same class, so that it decorates a class of one's own.

    Raises:
        RegistrationError: It is not such a class, its attention never calls the function that
            `attn_implementation` names, or `unregister` was called.
    """
    reasons = _obstacles(model_class)
    if reasons:
        raise RegistrationError(
            compose(
                f"patch({_name(model_class)}) is refused",
                [reason for reason, _ in reasons],
                fix=next((fix for _, fix in reasons if fix), None),
            )
        )
    with register.lock:
        gated_loading.install(model_class)
    return model_class


def unpatch(model_class: type) -> None:
    """Restore a class to what it was before `patch`; idempotent.

    What a class that it inherits from was patched with stays. Mistral's own can be unpatched too,
    until `register` is called again.

    Raises:
        RegistrationError: It is no model class.
    """
    reason, fix = _not_a_model_class(model_class)
    if reason is not None:
        raise RegistrationError(
            compose(f"unpatch({_name(model_class)}) is refused", [reason], fix=fix)
        )
    with register.lock:
        gated_loading.uninstall(model_class)


def _obstacles(model_class: Any) -> list[tuple[str, str | None]]:
    """Why a class cannot be patched: every reason, with what removes it."""
    found: list[tuple[str, str | None]] = []
    reason, fix = _not_a_model_class(model_class)
    if reason is not None:
        found.append((reason, fix))
    elif not interface_lookup.looks_up_interface(model_class):
        found.append((interface_lookup.never_looks_up(model_class), None))
    if not register.registered():
        reason = "the names of this package are not registered with transformers at the moment"
        found.append((reason, "hf_attn_backends.register()"))
    return found


def _not_a_model_class(model_class: Any) -> tuple[str | None, str | None]:
    """What a value is instead of a model class, and what to patch; None for a model class."""
    from transformers.modeling_utils import PreTrainedModel

    wanted = "transformers' PreTrainedModel"
    if isinstance(model_class, PreTrainedModel):
        return f"it is an instance of {wanted}, not a class", "patch(type(model)), then load it"
    if not isinstance(model_class, type):
        return f"it is a {type(model_class).__name__}, not a class of {wanted}", None
    if hasattr(model_class, "_model_mapping"):
        family = "the class of the family, such as LlamaPreTrainedModel"
        reason = f"it is an auto class, which builds models of many families: patch {family}"
        return reason, None
    if not issubclass(model_class, PreTrainedModel):
        return f"it does not inherit from {wanted}", None
    return None, None


def _name(value: Any) -> str:
    if isinstance(value, type):
        return value.__name__
    return repr(value) if isinstance(value, str) else f"a {type(value).__name__}"
