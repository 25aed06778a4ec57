"""register() and unregister(): idempotent, exact, also among other people's patches."""

from __future__ import annotations

import copy
import functools

import pytest
from transformers import MistralConfig, modeling_utils
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import (
    ALL_ATTENTION_FUNCTIONS,
    AttentionInterface,
    PreTrainedModel,
)
from transformers.models.mistral.modeling_mistral import MistralForCausalLM, MistralPreTrainedModel

import hf_attn_backends
from hf_attn_backends.errors import BackendRefusedError, RegistrationError
from hf_attn_backends.hf import hooks

NAMES = ("triton_fa2", "triton_decode", "auto")
METHODS = (*hooks.METHODS, "set_attn_implementation")


def _state():
    classes = (PreTrainedModel, MistralPreTrainedModel, MistralForCausalLM)
    return {
        "attention": dict(AttentionInterface._global_mapping),
        "masks": dict(AttentionMaskInterface._global_mapping),
        "classes": [{m: cls.__dict__.get(m) for m in METHODS} for cls in classes],
        "config": MistralConfig.__dict__.get("_attn_implementation"),
    }


@pytest.fixture(autouse=True)
def _registered_afterwards():
    yield
    for interface in (AttentionInterface, AttentionMaskInterface):
        for name in NAMES:
            interface._global_mapping.pop(name, None)
    hf_attn_backends.register()


@pytest.fixture
def bare():
    """transformers without us."""
    hf_attn_backends.unregister()
    return _state()


def test_twice_is_once():
    before = _state()
    hf_attn_backends.register()
    hf_attn_backends.register()
    assert _state() == before
    assert {*NAMES} <= set(before["attention"])
    assert hooks.installed(MistralPreTrainedModel)
    assert hooks.installed(PreTrainedModel)


def test_unregister_restores_exactly_and_again(bare):
    assert not {*NAMES} & {*bare["attention"], *bare["masks"]}
    for cls, methods in zip(
        (PreTrainedModel, MistralPreTrainedModel), bare["classes"], strict=False
    ):
        for name, method in methods.items():
            if method is not None:
                assert method.__module__ == "transformers.modeling_utils", (cls, name)
    assert bare["classes"][1] == dict.fromkeys(METHODS)
    assert bare["config"] is None
    hf_attn_backends.register()
    assert _state() != bare
    hf_attn_backends.unregister()
    hf_attn_backends.unregister()
    assert _state() == bare


def test_without_us_the_name_is_unknown_again(bare, models):
    with pytest.raises(ValueError, match="triton_fa2"):
        MistralForCausalLM._from_config(models.config(), attn_implementation="triton_fa2")
    model = MistralForCausalLM._from_config(models.config())
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("interface", [AttentionInterface, AttentionMaskInterface])
def test_a_foreign_value_is_an_error_and_nothing_is_done(bare, interface):
    interface.register("triton_fa2", print)
    with pytest.raises(RegistrationError, match="already holds") as raised:
        hf_attn_backends.register()
    assert interface.__name__ in str(raised.value)
    del interface._global_mapping["triton_fa2"]
    assert _state() == bare


def test_a_foreign_local_value_is_an_error_only_where_ours_is_not_below(bare):
    ALL_ATTENTION_FUNCTIONS["triton_fa2"] = print
    try:
        with pytest.raises(RegistrationError):
            hf_attn_backends.register()
        del ALL_ATTENTION_FUNCTIONS["triton_fa2"]
        hf_attn_backends.register()
        ALL_ATTENTION_FUNCTIONS["triton_fa2"] = print  # DeepSpeed puts a wrapper over ours so
        hf_attn_backends.register()
    finally:
        ALL_ATTENTION_FUNCTIONS._local_mapping.pop("triton_fa2", None)


def test_a_foreign_value_that_came_later_stays(bare):
    hf_attn_backends.register()
    AttentionInterface.register("triton_fa2", print)
    hf_attn_backends.unregister()
    assert AttentionInterface._global_mapping.pop("triton_fa2") is print
    assert _state() == bare


def _somebody_elses(cls, name, seen, wraps):
    had = getattr(cls, name)

    def theirs(self, value, *args, **kwargs):
        seen.append(value)
        return had(self, value, *args, **kwargs)

    theirs = functools.wraps(had)(theirs) if wraps else theirs
    own = cls.__dict__.get(name)
    setattr(cls, name, theirs)

    def restore():
        if own is None:
            delattr(cls, name)
        else:
            setattr(cls, name, own)

    return theirs, restore


@pytest.mark.parametrize("wraps", [True, False])
@pytest.mark.parametrize("cls", [MistralPreTrainedModel, PreTrainedModel])
@pytest.mark.parametrize("theirs_first", [True, False])
def test_stacked_with_another_patch(bare, models, cls, wraps, theirs_first):
    seen: list = []
    if not theirs_first:
        hf_attn_backends.register()
    theirs, restore = _somebody_elses(cls, hooks.CHECK, seen, wraps)
    hf_attn_backends.register()
    hf_attn_backends.register()
    with pytest.raises(BackendRefusedError, match="head_dim"):
        MistralForCausalLM._from_config(models.config(), attn_implementation="flashmla")
    model = MistralForCausalLM._from_config(models.config())
    assert seen
    assert model.config._attn_implementation == "sdpa"
    assert hf_attn_backends.decision_of(model).requested is None

    hf_attn_backends.unregister()
    assert cls.__dict__[hooks.CHECK] is theirs  # theirs is there as it was, and ours is silent
    with pytest.raises(ValueError, match="flashmla"):
        MistralForCausalLM._from_config(models.config(), attn_implementation="flashmla")
    plain = MistralForCausalLM._from_config(models.config())
    assert hf_attn_backends.decision_of(plain) is None
    hf_attn_backends.register()
    with pytest.raises(BackendRefusedError, match="head_dim"):
        MistralForCausalLM._from_config(models.config(), attn_implementation="flashmla")
    hf_attn_backends.unregister()
    restore()
    hf_attn_backends.unregister()
    assert _state()["classes"][0] == bare["classes"][0] or not theirs_first


def test_the_same_hook_for_any_family(models):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaPreTrainedModel

    from hf_attn_backends.hf import gated_loading

    config = LlamaConfig(**{k: v for k, v in models.config().to_dict().items() if k in (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "num_key_value_heads", "head_dim")})  # fmt: skip
    gated_loading.install(LlamaPreTrainedModel)
    try:
        with pytest.raises(BackendRefusedError, match="head_dim"):
            LlamaForCausalLM._from_config(copy.deepcopy(config), attn_implementation="flashmla")
        model = LlamaForCausalLM._from_config(config)
        assert hf_attn_backends.decision_of(model).resolved == "sdpa"
    finally:
        gated_loading.uninstall(LlamaPreTrainedModel)
    assert not {*hooks.METHODS} & set(LlamaPreTrainedModel.__dict__)


def test_switching_at_run_time_still_reads_the_models_source():
    # transformers greps the module's source, which a post-import hook's loader must not hide
    for name in ("_can_set_attn_implementation_cached_value",):
        if name in MistralForCausalLM.__dict__:
            delattr(MistralForCausalLM, name)
    assert MistralForCausalLM._can_set_attn_implementation()
    assert modeling_utils.__spec__ is not None
