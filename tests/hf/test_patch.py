"""`patch`: gated loading for a model class of any family, and its exact undoing."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.modeling_utils import PreTrainedModel
from transformers.models.bloom.modeling_bloom import BloomPreTrainedModel
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3PreTrainedModel
from transformers.models.gemma2.modeling_gemma2 import Gemma2PreTrainedModel
from transformers.models.gemma3.modeling_gemma3 import Gemma3PreTrainedModel
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssPreTrainedModel
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaPreTrainedModel
from transformers.models.mistral.modeling_mistral import MistralForCausalLM, MistralPreTrainedModel
from transformers.models.siglip.modeling_siglip import SiglipPreTrainedModel
from transformers.models.t5gemma.modeling_t5gemma import T5GemmaPreTrainedModel

import hf_attn_backends
from hf_attn_backends import decision_of, patch, unpatch
from hf_attn_backends.errors import (
    AttentionBackendError,
    BackendRefusedError,
    GateMissingError,
    RegistrationError,
    UnknownBackendError,
)
from hf_attn_backends.hf import config_watch, decisions, gated_loading, hooks

SMALL = {
    "vocab_size": 61, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": None, "max_position_embeddings": 64,
}  # fmt: skip
VISION = {
    "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1, "patch_size": 4,
    "num_attention_heads": 4, "image_size": 8, "vision_use_head": False,
}  # fmt: skip
TOUCHED = (
    LlamaPreTrainedModel, LlamaForCausalLM, Gemma2PreTrainedModel, Gemma3PreTrainedModel,
    GptOssPreTrainedModel, MistralPreTrainedModel, PreTrainedModel, SiglipPreTrainedModel,
    T5GemmaPreTrainedModel,
)  # fmt: skip


def state():
    """Everything that a patch may put into classes, with the identity of what is there."""
    names = (*hooks.METHODS, "set_attn_implementation")
    found = {(cls, name): cls.__dict__.get(name) for cls in TOUCHED for name in names}
    for cls in TOUCHED:
        if cls.config_class is not None:
            found[cls.config_class] = cls.config_class.__dict__.get("_attn_implementation")
    return found


@pytest.fixture(autouse=True)
def _as_before():
    hf_attn_backends.register()
    before = state()
    yield
    for cls in TOUCHED:
        if cls is not MistralPreTrainedModel:
            unpatch(cls)
    hf_attn_backends.register()
    now = state()  # registering again makes hooks anew
    assert {key: now[key] is None for key in now} == {key: before[key] is None for key in before}


def config(family="llama", **over):
    return AutoConfig.for_model(family, **{**SMALL, **over})


def image_config(**vision):
    return AutoConfig.for_model(
        "gemma3",
        text_config={**SMALL, "model_type": "gemma3_text"},
        vision_config={**VISION, **vision}, mm_tokens_per_image=4, image_token_index=60,
    )  # fmt: skip


def load(cfg, attention=None, auto=AutoModelForCausalLM):
    with torch.device("meta"):
        return auto.from_config(copy.deepcopy(cfg), attn_implementation=attention)


def test_before_it_a_llama_is_not_gated(home):
    model = load(config(), "triton_fa2")  # no gate: transformers takes the name for any model
    assert decision_of(model) is None


def test_served_as_asked_or_refused(gated, home):
    assert patch(LlamaPreTrainedModel) is LlamaPreTrainedModel
    with pytest.raises(GateMissingError, match="equivalence gate"):
        load(config(), "triton_fa2")
    with pytest.raises(BackendRefusedError, match="head_dim"):
        load(config(), "flash-mla", AutoModel)
    with pytest.raises(UnknownBackendError, match="triton_fa2"):
        load(config(), "triton_fa")
    model = load(config())
    assert (decision_of(model).requested, decision_of(model).resolved) == (None, "sdpa")
    with pytest.raises(GateMissingError):
        model.set_attn_implementation("triton_fa2")
    with pytest.raises(GateMissingError):
        model.config._attn_implementation = "triton_fa2"
    assert model.config._attn_implementation == decision_of(model).resolved == "sdpa"


@pytest.mark.parametrize("auto", ["AutoModel", "AutoModelForCausalLM",
                                  "AutoModelForSequenceClassification"])  # fmt: skip
def test_every_head_and_the_coverage_of_its_head_dim(gated, auto):
    patch(LlamaPreTrainedModel)
    auto = getattr(transformers, auto)
    model = load(config(), "triton_fa2", auto)
    assert decision_of(model) is decision_of(model.base_model)
    assert decision_of(model).resolved == model.config._attn_implementation == "triton_fa2"
    with pytest.raises(AttentionBackendError, match="--head-dim 48"):
        load(config(head_dim=48), "triton_fa2", auto)


def test_from_pretrained(gated, tmp_path):
    LlamaForCausalLM(config()).save_pretrained(tmp_path)
    patch(LlamaPreTrainedModel)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="triton_fa2")
    assert decision_of(model).requested == "triton_fa2"
    with pytest.raises(UnknownBackendError):
        AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="triton_fa")
    assert decision_of(AutoModelForCausalLM.from_pretrained(tmp_path)).resolved == "sdpa"


def test_one_head_alone_and_a_subclass_as_a_decorator(home):
    patch(LlamaForCausalLM)
    with pytest.raises(GateMissingError):
        load(config(), "triton_fa2")
    assert decision_of(load(config(), "triton_fa2", AutoModel)) is None  # another class
    unpatch(LlamaForCausalLM)

    @patch
    class Mine(LlamaForCausalLM):
        pass

    with pytest.raises(GateMissingError):
        Mine._from_config(config(), attn_implementation="triton_fa2")
    assert decision_of(load(config(), "triton_fa2")) is None
    unpatch(Mine)
    assert not {*hooks.METHODS} & set(vars(Mine))


def test_idempotent_and_undone_once(home):
    before = state()
    for _ in range(2):
        patch(LlamaPreTrainedModel)
    once = state()
    patch(LlamaPreTrainedModel)
    assert state() == once != before
    for _ in range(2):
        unpatch(LlamaPreTrainedModel)
        assert state() == before
    assert decision_of(load(config(), "triton_fa2")) is None


def test_two_classes_with_one_configuration(home):
    patch(LlamaPreTrainedModel)
    patch(LlamaForCausalLM)
    unpatch(LlamaForCausalLM)
    model = load(config())  # the family's class is patched still
    with pytest.raises(GateMissingError):
        model.config._attn_implementation = "triton_fa2"
    with pytest.raises(GateMissingError):
        load(config(), "triton_fa2")


def test_unregister_restores_and_register_brings_mistral_back(models, home):
    hf_attn_backends.unregister()
    bare = state()
    hf_attn_backends.register()
    for cls in (LlamaPreTrainedModel, Gemma3PreTrainedModel, PreTrainedModel):
        patch(cls)
    hf_attn_backends.unregister()
    assert state() == bare
    assert not gated_loading._gated
    with pytest.raises(RegistrationError, match=r"(?s)not registered.*register\(\)"):
        patch(LlamaPreTrainedModel)
    hf_attn_backends.register()
    assert decision_of(load(config(), "triton_fa2")) is None  # asked for anew, or not at all
    with pytest.raises(GateMissingError):
        MistralForCausalLM._from_config(models.config(), attn_implementation="triton_fa2")


def test_mistral_can_be_unpatched(models, home):
    unpatch(MistralPreTrainedModel)
    model = MistralForCausalLM._from_config(models.config(), attn_implementation="triton_fa2")
    assert decision_of(model) is None
    patch(MistralPreTrainedModel)
    with pytest.raises(GateMissingError):
        MistralForCausalLM._from_config(models.config(), attn_implementation="triton_fa2")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("LlamaForCausalLM", "it is a str"), (torch.nn.Linear, "does not inherit from"),
        (AutoModelForCausalLM, "auto class, which builds models of many families"),
        (None, "it is a NoneType"), (transformers.LlamaConfig, "does not inherit from"),
    ],
)  # fmt: skip
def test_what_is_no_model_class(value, reason):
    with pytest.raises(RegistrationError, match=reason):
        patch(value)
    with pytest.raises(RegistrationError, match=reason):
        unpatch(value)


def test_an_instance_is_told_what_to_patch():
    with pytest.raises(RegistrationError, match=r"(?s)instance of.*patch\(type\(model\)\)"):
        patch(load(config()))


def test_a_class_that_never_calls_the_function():
    with pytest.raises(RegistrationError, match="never calls the function registered"):
        patch(BloomPreTrainedModel)
    assert not {*hooks.METHODS} & set(vars(BloomPreTrainedModel))


def test_every_reason_is_given():
    hf_attn_backends.unregister()
    with pytest.raises(RegistrationError, match=r"(?s)1\. .*never calls.*2\. .*not registered"):
        patch(BloomPreTrainedModel)


def test_a_family_without_sdpa_keeps_its_own_default(gated):
    patch(GptOssPreTrainedModel)
    cfg = config("gpt_oss", num_local_experts=2, num_experts_per_tok=1)
    plain = load(cfg)
    unpatch(GptOssPreTrainedModel)
    assert plain.config._attn_implementation == load(cfg).config._attn_implementation == "eager"
    assert decision_of(plain).resolved == "eager"
    assert decision_of(plain).requested is None
    assert "fell back" in decision_of(plain).reasons[-1]


def test_the_default_leaves_no_softcap_out(gated):
    patch(Gemma2PreTrainedModel)
    model = load(config("gemma2"))
    assert model.config._attn_implementation == decision_of(model).resolved == "eager"
    assert "softcap" in " ".join(decision_of(model).reasons)
    assert decision_of(model).requested is None
    for name in ("sdpa", "flashmla"):
        with pytest.raises(BackendRefusedError, match=r"(?s)would work: .*='eager'"):
            load(config("gemma2"), name)
    capless = load(config("gemma2", attn_logit_softcapping=None))
    unpatch(Gemma2PreTrainedModel)
    plain = load(config("gemma2", attn_logit_softcapping=None))
    assert capless.config._attn_implementation == plain.config._attn_implementation


@pytest.mark.parametrize(
    ("family", "feature", "over"),
    [
        ("gemma2", "softcap", {}),
        ("deepseek_v3", "value_dim", {
            "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": None,
            "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 32,
            "n_routed_experts": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        }),
    ],
)  # fmt: skip
def test_a_feature_that_the_gate_has_not_measured(home, gated, monkeypatch, family, feature, over):
    from hf_attn_backends import gate

    cls = {"gemma2": Gemma2PreTrainedModel, "deepseek_v3": DeepseekV3PreTrainedModel}[family]
    patch(cls)
    load(config(family, **over), "triton_fa2")  # the folder's artifact covers it
    monkeypatch.setenv("HF_ATTN_HOME", str(home))
    plain = {"dtype": "float32", "head_dim": 16, "visibility": ["full", "causal"]}
    gate.write_equivalence_gate(tolerances={}, shapes_covered=[plain])
    try:
        with pytest.raises(AttentionBackendError, match=f"--head-dim 16 --feature {feature}"):
            load(config(family, **over), "triton_fa2")
    finally:
        unpatch(cls)


def test_a_composite_is_asked_about_part_by_part(gated):
    patch(Gemma3PreTrainedModel)
    model = load(image_config(), "triton_fa2", AutoModelForImageTextToText)
    found = decisions.decisions_of(model)
    vision = model.model.vision_tower
    assert found[""].resolved == decision_of(vision).resolved == "triton_fa2"
    assert decision_of(vision) is not found[""]
    with pytest.raises(AttentionBackendError, match="--head-dim 20"):  # the vision tower's
        load(image_config(hidden_size=80), "triton_fa2", AutoModelForImageTextToText)
    # alone, the vision tower's family is not gated
    load(image_config(hidden_size=80).vision_config, "triton_fa2", AutoModel)


def test_a_composites_parts_one_by_one(gated):
    patch(Gemma3PreTrainedModel)
    model = load(
        image_config(), {"text_config": "triton_fa2", "vision_config": "sdpa"},
        AutoModelForImageTextToText,
    )  # fmt: skip
    text, vision = model.model.language_model, model.model.vision_tower
    assert decision_of(text).resolved == text.config._attn_implementation == "triton_fa2"
    assert decision_of(vision).resolved == vision.config._attn_implementation == "sdpa"
    for value in ("flashmla", {"vision_config": "flashmla"}):
        with pytest.raises(BackendRefusedError):
            model.set_attn_implementation(value)
        with pytest.raises(BackendRefusedError):
            model.config._attn_implementation = value
        assert decision_of(text).resolved == text.config._attn_implementation == "triton_fa2"
        assert decision_of(vision).resolved == vision.config._attn_implementation == "sdpa"
    model.set_attn_implementation({"vision_config": "triton_fa2"})
    assert decision_of(vision).resolved == vision.config._attn_implementation == "triton_fa2"
    model.config._attn_implementation = "eager"
    for part in (model, text, vision):
        assert decision_of(part).resolved == part.config._attn_implementation == "eager"


def test_a_composite_that_was_unpatched_asks_no_more(home):
    patch(Gemma3PreTrainedModel)
    model = load(image_config(), None, AutoModelForImageTextToText)
    unpatch(Gemma3PreTrainedModel)
    model.set_attn_implementation("triton_fa2")
    assert model.model.vision_tower.config._attn_implementation == "triton_fa2"


def test_parts_are_not_kept_alive(home):
    import gc

    patch(Gemma3PreTrainedModel)
    model = load(image_config(), None, AutoModelForImageTextToText)
    assert len(gated_loading._owners) >= 2
    del model
    gc.collect()
    assert not gated_loading._owners


def test_an_encoder_and_decoder(gated):
    patch(T5GemmaPreTrainedModel)
    cfg = AutoConfig.for_model("t5gemma", encoder=SMALL, decoder=SMALL, vocab_size=61)
    model = load(cfg, "triton_fa2", transformers.AutoModelForSeq2SeqLM)
    assert {one.resolved for one in decisions.decisions_of(model).values()} == {"triton_fa2"}
    odd = AutoConfig.for_model(
        "t5gemma", encoder={**SMALL, "head_dim": 48}, decoder=SMALL, vocab_size=61
    )
    with pytest.raises(AttentionBackendError, match="--head-dim 48"):
        load(odd, "triton_fa2", transformers.AutoModelForSeq2SeqLM)


def test_every_model_at_once(home):
    patch(PreTrainedModel)
    for cfg in (config(), config("qwen3"), config("gemma2")):
        with pytest.raises(GateMissingError):
            load(cfg, "triton_fa2")
        assert decision_of(load(cfg)).requested is None
    unpatch(PreTrainedModel)
    assert decision_of(load(config(), "triton_fa2")) is None


def test_a_watched_configuration_alone_is_left_alone(home):
    patch(LlamaPreTrainedModel)
    cfg = config()
    cfg._attn_implementation = "triton_fa2"
    assert cfg._attn_implementation == "triton_fa2"
    assert config_watch._watched(type(cfg))
