"""Where triton_fa2 is put in transformers and in its tests, for `peer_suite_plugin.py`."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import re
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest

OURS = "triton_fa2"
NARROWEST = 16
ITSELF = re.compile("assisted_decoding_matches|prompt_lookup_decoding_matches")
STAND_INS = ("datasets",)  # imported by test modules of pipelines, which are not run


def put_back(test: Callable) -> Callable:
    """In place of the decorator `require_flash_attn`: undo the skips that stand below it."""
    while getattr(test, "__unittest_skip__", False) and hasattr(test, "__wrapped__"):
        test = test.__wrapped__  # type: ignore[attr-defined]
    return test


def take_the_place_of_sdpa() -> None:
    """Let the name "sdpa" mean triton_fa2 in the interfaces of attention and of masks."""
    modeling = importlib.import_module("transformers.modeling_utils")
    masking = importlib.import_module("transformers.masking_utils")
    for interface in (modeling.AttentionInterface, masking.AttentionMaskInterface):
        interface.register("sdpa", interface._global_mapping[OURS])


@contextlib.contextmanager
def in_the_place_of_eager(test_class: Any) -> Iterator[None]:
    """Let "eager" mean triton_fa2 too, without attention weights, while one test runs.

    For the tests of assisted decoding: they compare a model with itself, and ask for eager only
    because they look at the weights.
    """
    modeling = importlib.import_module("transformers.modeling_utils")
    masking = importlib.import_module("transformers.masking_utils")
    with pytest.MonkeyPatch.context() as patch:
        for interface in (modeling.AttentionInterface, masking.AttentionMaskInterface):
            mapping = interface._global_mapping
            patch.setitem(mapping, "eager", mapping[OURS])
        patch.setattr(test_class, "has_attentions", False, raising=False)
        yield


def load_instead_of_flash(replacement: str) -> None:
    """Have every load that asks for "flash_attention_2" ask for `replacement`."""
    base = importlib.import_module("transformers.modeling_utils").PreTrainedModel

    def renamed(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: renamed(one) for key, one in value.items()}
        return replacement if value == "flash_attention_2" else value

    def wrapped(function: Callable) -> Callable:
        @functools.wraps(function)
        def load(*args: Any, **kwargs: Any) -> Any:
            if "attn_implementation" in kwargs:
                kwargs["attn_implementation"] = renamed(kwargs["attn_implementation"])
            return function(*(renamed(one) if isinstance(one, str) else one for one in args),
                            **kwargs)  # fmt: skip

        return load

    for name in ("from_pretrained", "_from_config"):
        setattr(base, name, classmethod(wrapped(base.__dict__[name].__func__)))
    base.set_attn_implementation = wrapped(base.set_attn_implementation)


def widen(test_class: Any) -> None:
    """Give tiny models of a test class heads of at least 16, the least that Triton multiplies.

    By the method that transformers' own tests of flash and flex attention widen them with, and in
    both roles; models that are wide enough stay as they are.
    """
    set_up = test_class.setUp

    @functools.wraps(set_up)
    def widened(test: Any) -> None:
        set_up(test)
        prepare = getattr(
            getattr(test, "model_tester", None), "prepare_config_and_inputs_for_common", None
        )
        if prepare is None:
            return

        def prepared() -> tuple[Any, Any]:
            config, inputs = prepare()
            if _narrow(config):
                config = _widened(config, test._prepare_config_headdim)
            return config, inputs

        test.model_tester.prepare_config_and_inputs_for_common = prepared

    test_class.setUp = widened


def _widened(config: Any, widen_all: Callable[[Any, int], Any]) -> Any:
    """A copy with wider heads; an encoder beside a decoder keeps the widths that both share."""
    names = getattr(config, "sub_configs", ())
    if not names or not getattr(config, "is_encoder_decoder", False):
        return widen_all(config, NARROWEST)
    config = copy.deepcopy(config)
    for name in names:
        inner: Any = getattr(config, name, None)
        if getattr(inner, "head_dim", None):
            inner.head_dim = max(NARROWEST, inner.head_dim)
    return config


def _narrow(config: Any) -> bool:
    """Whether a configuration or one inside it has heads of fewer than `NARROWEST`."""
    heads = getattr(config, "num_attention_heads", None)
    width = getattr(config, "head_dim", None)
    if width is None and isinstance(heads, int):
        width = (getattr(config, "hidden_size", None) or NARROWEST * heads) // heads
    inner = (getattr(config, name, None) for name in getattr(config, "sub_configs", ()))
    return (width or NARROWEST) < NARROWEST or any(_narrow(one) for one in inner)


def stand_in(name: str) -> None:
    """Let `import name` work where the package is absent; whatever is called of it skips."""
    try:
        importlib.import_module(name)
    except ImportError:
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)

        def attribute(wanted: str) -> Callable:
            if wanted.startswith("__"):
                raise AttributeError(wanted)
            return lambda *args, **kwargs: pytest.skip(f"{name} is not installed")

        module.__getattr__ = attribute  # type: ignore[method-assign]
        sys.modules[name] = module


def open_to_ours(cls: type) -> None:
    """Mark a class and all below it as able to run sdpa where they look up their attention.

    gpt-oss and others say no because SDPA lacks softcap or sinks, which triton_fa2 has.
    """
    if getattr(cls, "_supports_attention_backend", False):
        cls._supports_sdpa = True  # type: ignore[attr-defined]
    for below in cls.__subclasses__():
        open_to_ours(below)
