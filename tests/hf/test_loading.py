"""Every way to name an implementation for a Mistral goes through the selector, and is kept."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, MistralForCausalLM

from hf_attn_backends import decision_of, selection
from hf_attn_backends.errors import (
    AttentionBackendError,
    BackendRefusedError,
    GateError,
    GateMissingError,
    UnknownBackendError,
)
from hf_attn_backends.hf import decisions

HEADS = (
    "AutoModel",
    "AutoModelForCausalLM",
    "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification",
    "AutoModelForQuestionAnswering",
)


@pytest.fixture
def asked(monkeypatch):
    """Every request that reaches the selector."""
    seen: list = []
    decide = selection.decide

    def recording(requested, **kw):
        seen.append(requested)
        return decide(requested, **kw)

    monkeypatch.setattr(selection, "decide", recording)
    return seen


@pytest.mark.parametrize("auto", HEADS)
def test_from_config_with_every_head(models, gated, asked, auto):
    model = getattr(transformers, auto).from_config(
        models.config(), attn_implementation="triton_fa2"
    )
    assert asked[0] == "triton_fa2"
    decision = decision_of(model)
    assert (decision.requested, decision.resolved, decision.origin) == (
        "triton_fa2", "triton_fa2", "argument",
    )  # fmt: skip
    assert decision.gate
    assert model.config._attn_implementation == "triton_fa2"
    inner = model.base_model
    assert decision_of(inner) is decision


@pytest.mark.parametrize("auto", HEADS)
def test_nothing_requested_is_sdpa_and_kept_as_such(models, gated, asked, auto):
    model = getattr(transformers, auto).from_config(models.config())
    assert asked[0] is None
    assert model.config._attn_implementation == "sdpa"
    decision = decision_of(model)
    assert (decision.requested, decision.resolved, decision.origin) == (None, "sdpa", "default")
    assert decision_of(model.base_model).requested is None


def test_from_pretrained_and_back_without_a_trace(models, gated, tmp_path):
    first = models.build(models.config(), "triton_fa2")
    first.save_pretrained(tmp_path)
    written = (tmp_path / "config.json").read_text()
    assert "triton" not in written
    assert "hf_attn" not in written
    assert not [key for key in json.loads(written) if "attn_impl" in key or "decision" in key]
    assert decision_of(AutoModelForCausalLM.from_pretrained(tmp_path)).resolved == "sdpa"
    again = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="triton_fa2")
    assert decision_of(again).resolved == again.config._attn_implementation == "triton_fa2"
    by_config = AutoConfig.from_pretrained(tmp_path, attn_implementation="triton_fa2")
    third = MistralForCausalLM.from_pretrained(tmp_path, config=by_config)
    assert decision_of(third).requested == "triton_fa2"
    with pytest.raises(UnknownBackendError, match="triton_fa2"):
        AutoModel.from_pretrained(tmp_path, attn_implementation="triton_fa")


def test_a_dict_of_implementations(models, gated, asked):
    model = MistralForCausalLM._from_config(models.config(), attn_implementation={"": "triton_fa2"})
    assert asked[0] == "triton_fa2"
    assert decision_of(model).resolved == "triton_fa2"
    model.set_attn_implementation({"": "eager"})
    assert decision_of(model).resolved == model.config._attn_implementation == "eager"


def test_a_value_in_config_json_is_asked_about_too(models, gated, tmp_path):
    models.build(models.config(), "eager").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "attn_implementation": "flashmla"}))
    with pytest.raises(BackendRefusedError, match="head_dim"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "spelling",
    [
        "flashmla", "flash_mla", "Flash-MLA", "paged|flashmla", "kernels-community/flash-mla",
        "kernels-community/flash-mla@main:flash_mla", "deepseek-ai/FlashMLA",
    ],
)  # fmt: skip
@pytest.mark.parametrize("way", ["load", "set"])
def test_flashmla_in_any_spelling_and_twice(models, gated, spelling, way):
    model = models.build(models.config(), "eager")

    def ask():
        if way == "set":
            model.set_attn_implementation(spelling)
        else:
            MistralForCausalLM._from_config(models.config(), attn_implementation=spelling)

    for _ in range(2):  # transformers 5.17 takes a hub kernel that failed once for loaded
        with pytest.raises(BackendRefusedError, match="head_dim"):
            ask()
        assert model.config._attn_implementation == "eager"
        assert decision_of(model).resolved == "eager"


def test_without_a_gate_loading_is_refused(models, home):
    with pytest.raises(GateMissingError, match="equivalence gate"):
        MistralForCausalLM._from_config(models.config(), attn_implementation="triton_fa2")
    model = MistralForCausalLM._from_config(models.config())
    with pytest.raises(GateMissingError):
        model.set_attn_implementation("triton_fa2")
    assert model.config._attn_implementation == decision_of(model).resolved == "sdpa"


def test_a_head_dim_outside_the_coverage_is_refused_with_the_command(models, gated):
    config = models.config(head_dim=48)
    with pytest.raises(AttentionBackendError) as refused:
        MistralForCausalLM._from_config(config, attn_implementation="triton_fa2")
    assert isinstance(refused.value, (GateError, BackendRefusedError))
    text = str(refused.value)
    assert "48" in text
    assert "hf-attn gate" in text
    assert "--head-dim 48" in text


def test_set_attn_implementation_updates_every_view_of_the_decision(models, gated):
    model = models.build(models.config(), "eager")
    inner = model.model
    model.set_attn_implementation("triton_fa2")
    assert decision_of(model).resolved == decision_of(inner).resolved == "triton_fa2"
    assert model.model.layers[0].self_attn.config._attn_implementation == "triton_fa2"
    model.set_attn_implementation("auto")
    assert decision_of(inner).resolved == "auto"
    model.set_attn_implementation("sdpa")
    assert decision_of(model).requested == "sdpa"


def test_a_direct_write_on_a_living_model_is_asked_about(models, gated, home):
    model = models.build(models.config(), "eager")
    with pytest.raises(GateMissingError):
        model.config._attn_implementation = "triton_fa2"
    with pytest.raises(BackendRefusedError):
        model.config._attn_implementation = "flash-mla"
    assert model.config._attn_implementation == decision_of(model).resolved == "eager"
    model.config._attn_implementation = "sdpa"
    assert model.config._attn_implementation == decision_of(model).resolved == "sdpa"


def test_a_configuration_without_a_model_is_left_alone(models, home):
    config = models.config()
    config._attn_implementation = "triton_fa2"  # no gate: refused when a model is built
    assert config._attn_implementation == "triton_fa2"
    with pytest.raises(GateMissingError):
        MistralForCausalLM(config)


def test_user_subclasses_and_names_that_others_registered(models, gated, monkeypatch):
    from transformers import AttentionInterface

    class Mine(MistralForCausalLM):
        pass

    assert decision_of(Mine(models.config())).resolved == "sdpa"
    monkeypatch.setitem(AttentionInterface._global_mapping, "my_attention", print)
    model = Mine._from_config(models.config(), attn_implementation="my_attention")
    assert decision_of(model).resolved == model.config._attn_implementation == "my_attention"


def test_the_decision_goes_with_a_deep_copy_and_then_its_own_way(models, gated):
    model = models.build(models.config(), "triton_fa2")
    twin = copy.deepcopy(model)
    assert decision_of(twin) == decision_of(model)
    twin.set_attn_implementation("eager")
    assert decision_of(twin).resolved == decision_of(twin.model).resolved == "eager"
    assert decision_of(model).resolved == "triton_fa2"


def test_a_pickled_model_knows_nothing_of_us(models, gated, tmp_path):
    model = models.build(models.config(), "eager")
    path = tmp_path / "model.pkl"
    path.write_bytes(pickle.dumps(model))
    code = (
        "import pickle, sys, transformers\n"
        f"model = pickle.load(open({str(path)!r}, 'rb'))\n"
        "assert not [m for m in sys.modules if m.startswith('hf_attn_backends')]\n"
        "print(model.config._attn_implementation)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "eager", done.stderr[-800:]
    assert decision_of(pickle.loads(path.read_bytes())) is None


def test_configurations_are_not_kept_alive(models):
    import gc

    gc.collect()
    before = len(decisions._by_config)
    model = MistralForCausalLM(models.config())
    assert len(decisions._by_config) == before + 1
    del model
    gc.collect()
    assert len(decisions._by_config) == before


def test_peft_model_shows_the_decision_and_can_be_switched(models, gated):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        models.build(models.config(), "triton_fa2"), LoraConfig(target_modules=["q_proj"])
    )
    assert decision_of(model).resolved == "triton_fa2"
    model.set_attn_implementation("eager")
    assert decision_of(model).resolved == "eager"


def _llava(models, text):
    from transformers import CLIPVisionConfig, LlavaConfig

    return LlavaConfig(
        text_config=text,
        vision_config=CLIPVisionConfig(
            hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            image_size=16, patch_size=4, projection_dim=32,
        ),
        image_token_index=60, image_token_id=60, vision_feature_layer=-1,
    )  # fmt: skip


def test_a_composite_with_mistral_inside(models, gated):
    from transformers import AutoModelForImageTextToText

    config = _llava(models, models.config())
    model = AutoModelForImageTextToText.from_config(
        copy.deepcopy(config),
        attn_implementation={"text_config": "triton_fa2", "vision_config": "eager"},
    )
    text = model.model.language_model
    assert text.config._attn_implementation == decision_of(text).resolved == "triton_fa2"
    assert decision_of(model) is decision_of(text)
    assert decisions.decisions_of(model) == {"model.language_model": decision_of(text)}
    with pytest.raises(BackendRefusedError):
        AutoModelForImageTextToText.from_config(
            copy.deepcopy(config), attn_implementation={"text_config": "flashmla"}
        )


def test_a_refusal_leaves_a_composite_as_it_was(models, gated, home):
    from transformers import AutoModelForImageTextToText

    config = _llava(models, models.config())
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    parts = (model, model.model.language_model, model.model.vision_tower)
    for _ in range(2):
        with pytest.raises(GateMissingError):
            model.set_attn_implementation("triton_fa2")
        assert [part.config._attn_implementation for part in parts] == ["eager"] * 3
        assert not any("_attn_was_changed" in vars(part.config) for part in parts)
        assert decision_of(model).resolved == "eager"
    model.set_attn_implementation("sdpa")
    assert [part.config._attn_implementation for part in parts] == ["sdpa"] * 3
    assert decision_of(model).resolved == "sdpa"


@pytest.mark.parametrize("family", ["bloom", "xglm", "gpt_neo", "falcon", "openai-gpt"])
@pytest.mark.parametrize("name", ["triton_fa2", "auto"])
def test_a_class_that_never_looks_the_name_up_is_refused(family, name):
    config = AutoConfig.for_model(family)
    for key in ("n_layer", "num_layers", "num_hidden_layers"):
        if hasattr(config, key) and family != "gpt_neo":
            setattr(config, key, 1)
    with (
        torch.device("meta"),
        pytest.raises(BackendRefusedError, match="never calls the function registered"),
    ):
        AutoModel.from_config(config, attn_implementation=name)


@pytest.mark.parametrize("name", ["triton_fa2", "auto"])
@pytest.mark.parametrize("family", ["mistral", "llama"])
def test_attention_weights_asked_for_in_the_configuration_are_refused(family, name, gated):
    """transformers looks for this contradiction only where the configuration is written to."""
    config = AutoConfig.for_model(
        family, num_hidden_layers=1, hidden_size=64, num_attention_heads=4, head_dim=16,
        output_attentions=True,
    )  # fmt: skip
    with torch.device("meta"), pytest.raises(BackendRefusedError, match="output_attentions=True"):
        AutoModelForCausalLM.from_config(config, attn_implementation=name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with pytest.raises(BackendRefusedError, match="never formed"):
        model.set_attn_implementation(name)
    assert model.config._attn_implementation == "eager"


def test_families_without_a_hook_of_their_own_take_the_name(gated):
    for family in ("llama", "bert", "llava", "bart", "qwen3"):
        config = AutoConfig.for_model(family)
        cls = transformers.AutoModel._model_mapping[type(config)]
        from hf_attn_backends.hf.interface_lookup import looks_up_interface

        assert looks_up_interface(cls), family


def test_the_name_of_continuous_batching_is_decided_like_ours(models, gated, monkeypatch, tmp_path):
    from transformers import LlamaForCausalLM

    model = models.build(models.config(), "triton_fa2")
    model.set_attn_implementation("paged|triton_fa2")
    now = model.config._attn_implementation
    assert now in ("triton_fa2", "paged|triton_fa2")  # transformers 5.24 takes the prefix off
    decision = decision_of(model)
    assert decision.requested in (now, "paged|triton_fa2")
    assert (decision.resolved, decision.gate is not None) == (now, True)
    llama = AutoConfig.for_model(
        "llama", hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, vocab_size=16,
    )  # fmt: skip
    made = LlamaForCausalLM._from_config(llama, attn_implementation="paged|triton_fa2")
    assert made.config._attn_implementation == now
    monkeypatch.setenv("HF_ATTN_HOME", str(tmp_path))
    with pytest.raises(GateError, match="equivalence gate"):
        models.build(models.config(), "paged|triton_fa2")


def test_what_transformers_would_swap_in_quietly_is_refused(models, gated, monkeypatch):
    from transformers.modeling_utils import PreTrainedModel

    def swap(self, value, *args, **kwargs):
        return "eager" if value in (None, "sdpa") else value

    monkeypatch.setattr(PreTrainedModel, "_check_and_adjust_attn_implementation", swap)
    with pytest.raises(BackendRefusedError, match="would run 'eager' instead"):
        MistralForCausalLM._from_config(models.config(), attn_implementation="sdpa")
    decision = decision_of(MistralForCausalLM._from_config(models.config()))
    assert decision.resolved == "eager"
    assert "fell back" in decision.reasons[-1]


def test_a_class_that_cannot_be_switched_is_refused_and_not_only_warned_about(models, gated):
    model = models.build(models.config(), "eager")
    cls = type(model)
    before = cls._can_set_attn_implementation()
    cls._can_set_attn_implementation_cached_value = False  # as in a REPL, without a source
    try:
        with pytest.raises(BackendRefusedError, match="would go on with 'eager'"):
            model.set_attn_implementation("triton_fa2")
        assert model.config._attn_implementation == decision_of(model).resolved == "eager"
    finally:
        cls._can_set_attn_implementation_cached_value = before
    model.set_attn_implementation("triton_fa2")
    assert decision_of(model).resolved == "triton_fa2"


def test_the_hooked_methods_take_their_argument_by_name_too(models, gated):
    model = models.build(models.config(), "eager")
    assert model.get_correct_attn_implementation(requested_attention="triton_fa2") == "triton_fa2"
    answer = model._check_and_adjust_attn_implementation(
        attn_implementation="sdpa", is_init_check=False
    )
    assert answer == "sdpa"
    with pytest.raises(BackendRefusedError, match="head_dim"):
        model.get_correct_attn_implementation(requested_attention="flashmla")
