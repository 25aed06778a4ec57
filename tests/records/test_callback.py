"""Real Trainer runs on record: sdpa, eager and triton_fa2, and runs that are not as decided."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback

from hf_attn_backends import registry, witness
from hf_attn_backends.errors import ExecutionMismatchError, RecordError
from hf_attn_backends.hf.callback import AttentionBackendCallback

LAYERS = 2


class At(TrainerCallback):
    """Does something once at an event."""

    def __init__(self, event: str, action) -> None:
        self.done = False

        def once(*_: object, **kwargs: object) -> None:
            if not self.done:
                self.done = True
                action(kwargs.get("model"))

        setattr(self, event, once)


def counts(record, phase: str) -> int:
    return sum(
        row["launches"]
        for row in record.attention_executed["by_rank"][0]
        if row["phase"] == phase and row["backend"] == record.attention_backend
    )


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_what_pytorch_really_ran_is_observed(make_model, make_trainer, events, name: str) -> None:
    callback = AttentionBackendCallback()
    make_trainer(make_model(name), [callback], gradient_accumulation_steps=3).train()
    assert events() == [("launch", "not_observed"), ("first_step", "matched"), ("end", "matched")]
    record = callback.record
    assert record.attention_executed["witness"] == "torch.profiler"
    assert counts(record, "forward") == counts(record, "backward") == LAYERS  # one micro-batch
    (rows,) = record.attention_executed["by_rank"]
    assert {row["backend"] for row in rows} == {name}
    if name == "sdpa":
        found = {(row["variant"], row["call_class"]) for row in rows}
        assert found == {("FLASH_ATTENTION", "float32/d16/causal")}


def test_sdpa_that_ran_its_math_kernel_is_recorded_as_that(make_model, make_trainer) -> None:
    callback = AttentionBackendCallback()
    trainer = make_trainer(make_model("sdpa"), [callback])
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        trainer.train()
    (rows,) = callback.record.attention_executed["by_rank"]
    assert [(row["variant"], row["launches"]) for row in rows] == [("MATH", LAYERS)]
    assert callback.record.flags["sdp_enabled"] == ["math"]


def test_the_kernels_launches_are_counted(make_model, make_trainer, gate, events, capsys) -> None:
    callback = AttentionBackendCallback()
    trainer = make_trainer(make_model("triton_fa2"), [callback], gradient_accumulation_steps=2)
    trainer.train()
    assert events() == [("launch", "not_observed"), ("first_step", "matched"), ("end", "matched")]
    record = callback.record
    micro_batches = 2 * 2
    assert counts(record, "forward") == counts(record, "backward") == LAYERS * micro_batches
    (rows,) = record.attention_executed["by_rank"]
    assert {row["call_class"] for row in rows} == {"float32/d16/causal"}
    assert {row["variant"] for row in rows} == {"triton"}
    assert all(row["in_training_steps"] == row["launches"] for row in rows)
    assert record.gate["status"] == "ok"
    assert len(record.gate["kernel_source_sha256"]) == 64
    assert record.attention_requested == "triton_fa2"
    assert record.attention_verified["decided_layers"] == LAYERS
    err = capsys.readouterr().err
    assert err.count("attention_backend=triton_fa2 (requested by argument; gate ok ") == 1
    assert "attention_verdict=matched (8 forward launches of triton_fa2 in 2 steps)" in err


def test_gradient_checkpointing_counts_the_recomputation_and_says_so(
    make_model, make_trainer, gate, capsys
) -> None:
    callback = AttentionBackendCallback()
    trainer = make_trainer(make_model("triton_fa2"), [callback], max_steps=1)
    trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
    trainer.train()
    record = callback.record
    assert (counts(record, "forward"), counts(record, "backward")) == (2 * LAYERS, LAYERS)
    assert record.flags["gradient_checkpointing"] is True
    assert "counts=gradient checkpointing: two forward launches" in capsys.readouterr().err


def test_evaluations_inside_training_are_counted_apart(make_model, make_trainer, gate) -> None:
    callback = AttentionBackendCallback()
    trainer = make_trainer(
        make_model("triton_fa2"), [callback], max_steps=1, eval_strategy="steps", eval_steps=1
    )
    trainer.train()
    (rows,) = callback.record.attention_executed["by_rank"]
    forward = next(row for row in rows if row["phase"] == "forward")
    assert forward["in_training_steps"] == LAYERS
    assert forward["launches"] == LAYERS + 3 * LAYERS  # 6 rows in batches of 2
    assert len(registry.read()[0]) == 3  # no run of its own


def test_a_model_switched_behind_the_decision_is_stopped_before_training(
    make_model, make_trainer, gate, capsys
) -> None:
    model = make_model("triton_fa2")
    model.config._attn_implementation_internal = "sdpa"
    with pytest.raises(ExecutionMismatchError) as caught:
        make_trainer(model, [AttentionBackendCallback()]).train()
    text = str(caught.value)
    assert "2 of 2 attention modules run 'sdpa', decided was 'triton_fa2'" in text
    assert "model.layers.0.self_attn" in text
    assert "attention_backend=" not in capsys.readouterr().err
    assert not registry.registry_path().exists()


def test_one_switched_layer_is_enough(make_model, make_trainer) -> None:
    model = make_model("sdpa")
    import copy

    attention = model.model.layers[1].self_attn
    attention.config = copy.deepcopy(attention.config)
    attention.config._attn_implementation_internal = "eager"
    with pytest.raises(ExecutionMismatchError, match="1 of 2 attention modules run 'eager'"):
        make_trainer(model, [AttentionBackendCallback()]).train()


def test_a_switch_through_the_selector_is_a_new_decision(make_model, make_trainer) -> None:
    model = make_model("sdpa")
    model.set_attn_implementation("eager")
    callback = AttentionBackendCallback()
    make_trainer(model, [callback], max_steps=1).train()
    assert (callback.backend, callback.record.attention_verdict) == ("eager", "matched")


@pytest.mark.parametrize("decided", ["sdpa", "eager", "triton_fa2"])
def test_a_switch_after_train_begin_is_stopped_before_a_weight_changes(
    make_model, make_trainer, gate, events, decided: str
) -> None:
    other = "eager" if decided == "sdpa" else "sdpa"

    def switch(model) -> None:
        model.config._attn_implementation_internal = other

    model = make_model(decided)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer = make_trainer(model, [AttentionBackendCallback(), At("on_step_begin", switch)])
    with pytest.raises(ExecutionMismatchError, match=f"decided to run '{decided}', and the first"):
        trainer.train()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert events() == [("launch", "not_observed"), ("interrupted", "mismatch")]


def test_a_layer_that_skips_the_kernel_is_seen_though_its_name_is_right(
    make_model, make_trainer, gate
) -> None:
    """One layer computes its attention elsewhere: names agree, launches do not."""
    model = make_model("triton_fa2")
    attention = model.model.layers[1].self_attn

    def elsewhere(hidden_states, *_: object, **__: object):
        return attention.o_proj(attention.q_proj(hidden_states)), None

    attention.forward = elsewhere
    reason = "only 1 forward launches of triton_fa2 in step 1, which needs 2"
    with pytest.raises(ExecutionMismatchError, match=reason):
        make_trainer(model, [AttentionBackendCallback()]).train()


def test_a_context_that_steers_the_model_elsewhere_is_seen(make_model, make_trainer, gate) -> None:
    from hf_attn_backends import attn_backend

    trainer = make_trainer(make_model("triton_fa2"), [AttentionBackendCallback()])
    with attn_backend("sdpa"), pytest.raises(ExecutionMismatchError, match="sdpa launched 2"):
        trainer.train()


def test_a_switch_in_the_middle_is_said_at_once_and_judged_at_the_end(
    make_model, make_trainer, gate, events, capsys, caplog
) -> None:
    def switch(model) -> None:
        model.config._attn_implementation_internal = "sdpa"

    callback = AttentionBackendCallback()
    trainer = make_trainer(make_model("triton_fa2"), [callback, At("on_step_end", switch)])
    with caplog.at_level(logging.ERROR, "hf_attn_backends"):
        trainer.train()
    assert events()[-1] == ("end", "mismatch")
    assert "attention no longer runs as decided (triton_fa2)" in caplog.text
    assert "no launch of triton_fa2 in step 2" in callback.record.attention_executed["reason"]
    err = capsys.readouterr().err
    assert "!!!!!!!!\nattention_verdict=mismatch (" in err
    assert "The results of this run are not those of triton_fa2." in err


def test_a_switch_of_pytorchs_own_in_the_middle_is_seen_in_the_live_modules(
    make_model, make_trainer, events
) -> None:
    def switch(model) -> None:
        model.config._attn_implementation_internal = "eager"

    callback = AttentionBackendCallback()
    make_trainer(make_model("sdpa"), [callback, At("on_step_end", switch)]).train()
    assert events()[-1] == ("end", "mismatch")
    reason = callback.record.attention_executed["reason"]
    assert "model.layers.0.self_attn was switched from sdpa to eager by step 2" in reason


def test_a_switch_and_back_is_not_forgotten_by_the_end(make_model, make_trainer, events) -> None:
    """Each step looks at the live modules: at the end they are all right again."""

    class ThereAndBack(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            names = {1: "eager", 2: "sdpa"}
            if state.global_step in names:
                model.config._attn_implementation_internal = names[state.global_step]

    callback = AttentionBackendCallback()
    make_trainer(make_model("sdpa"), [callback, ThereAndBack()], max_steps=3).train()
    assert events()[-1] == ("end", "mismatch")
    reason = callback.record.attention_executed["reason"]
    assert "was switched from sdpa to eager by step 2" in reason


def test_another_profiler_makes_the_run_not_observed(make_model, make_trainer, events) -> None:
    callback = AttentionBackendCallback()
    trainer = make_trainer(make_model("sdpa"), [callback])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        trainer.train()
    assert events()[-1] == ("end", "not_observed")
    assert "another profiler was active" in callback.record.attention_executed["reason"]


def test_a_model_that_the_selector_does_not_decide_on(make_trainer, events) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = LlamaForCausalLM._from_config(config, attn_implementation="eager")
    callback = AttentionBackendCallback()
    make_trainer(model, [callback], max_steps=1).train()
    record = callback.record
    assert (record.attention_backend, record.attention_origin) == ("eager", "config")
    assert record.attention_requested is None
    assert record.attention_verified["names"] == {"eager": 2}
    assert events()[-1] == ("end", "matched")
    assert {each["name"] for each in record.attention_candidates} >= {"sdpa", "triton_fa2"}


@pytest.mark.parametrize("name", ["triton_fa2", "sdpa"])
def test_evaluation_alone_is_a_run(make_model, make_trainer, gate, events, capsys, name) -> None:
    callback = AttentionBackendCallback()
    trainer = make_trainer(make_model(name), [callback])
    trainer.evaluate()
    first = callback.record
    assert (first.event, first.attention_verdict, first.flags["mode"]) == (
        "end", "matched", "evaluation",
    )  # fmt: skip
    assert counts(first, "backward") == 0
    assert counts(first, "forward") == (3 * LAYERS if name == "triton_fa2" else LAYERS)
    trainer.predict(trainer.eval_dataset)
    assert callback.record.run_id != first.run_id
    assert callback.record.attention_verdict == "matched"
    assert [event for event, _ in events()] == ["launch", "first_step", "end"] * 2
    assert capsys.readouterr().err.count("attention_requested=") == 1  # one banner


def test_an_evaluation_of_one_batch_under_sdpa_says_why_it_saw_nothing(
    make_model, make_trainer
) -> None:
    callback = AttentionBackendCallback()
    make_trainer(make_model("sdpa"), [callback], per_device_eval_batch_size=8).evaluate()
    assert callback.record.attention_verdict == "not_observed"
    assert "after its first batch" in callback.record.attention_executed["reason"]


def test_a_run_that_cannot_be_recorded_is_not_launched(
    make_model, make_trainer, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    model = make_model("sdpa")
    before = model.lm_head.weight.clone()
    callback = AttentionBackendCallback(registry=tmp_path / "file" / "registry.jsonl")
    with pytest.raises(RecordError, match="cannot be written"):
        make_trainer(model, [callback]).train()
    assert torch.equal(model.lm_head.weight, before)


def test_a_record_that_fails_later_does_not_stop_training(
    make_model, make_trainer, tmp_path: Path, caplog
) -> None:
    path = tmp_path / "elsewhere" / "registry.jsonl"

    def spoil(_: object) -> None:
        path.unlink()
        path.mkdir()

    callback = AttentionBackendCallback(registry=path)
    trainer = make_trainer(make_model("sdpa"), [callback, At("on_step_begin", spoil)])
    trainer.train()
    assert trainer.state.global_step == 2
    assert "is not on record" in caplog.text


def test_training_that_raises_is_on_record_as_interrupted(make_model, make_trainer, events) -> None:
    def fail(_: object) -> None:
        raise KeyError("a bug of the user's")

    callback = AttentionBackendCallback()
    trainer = make_trainer(make_model("sdpa"), [callback, At("on_step_end", fail)])
    with pytest.raises(KeyError):
        trainer.train()
    trainer.train()
    assert [event for event, _ in events()] == [
        "launch", "first_step", "interrupted", "launch", "first_step", "end",
    ]  # fmt: skip
    rows, _ = registry.read()
    assert len({row.run_id for row in rows}) == 2
    assert rows[2].attention_executed["reason"].startswith("a new run was begun")


def test_the_runs_own_copy_and_the_registry_say_the_same(
    make_model, make_trainer, tmp_path: Path
) -> None:
    make_trainer(make_model("sdpa"), [AttentionBackendCallback()]).train()
    chain = ("prev_sha256", "sha256")
    both = []
    for path in (registry.registry_path(), tmp_path / "out" / registry.COPY_NAME):
        assert registry.verify(path) == (3, [], [])
        rows = [row.as_row() for row in registry.read(path)[0]]
        both.append([{k: v for k, v in row.items() if k not in chain} for row in rows])
    assert both[0] == both[1]


def test_counts_are_of_this_run_alone(make_model, make_trainer, gate) -> None:
    witness.count("triton_fa2", "triton", "forward", "float32/d16/causal")
    callback = AttentionBackendCallback()
    make_trainer(make_model("triton_fa2"), [callback], max_steps=1).train()
    assert counts(callback.record, "forward") == LAYERS


def test_a_compiled_model_is_judged_by_a_step_that_compiled_nothing(
    make_model, make_trainer
) -> None:
    """The step that compiles runs every operator on fake tensors too: it is no evidence."""
    callback = AttentionBackendCallback()
    trainer = make_trainer(
        make_model("sdpa", num_hidden_layers=1), [callback], max_steps=3,
        torch_compile=True, torch_compile_backend="aot_eager",
    )  # fmt: skip
    trainer.train()
    record = callback.record
    assert record.attention_verdict == "matched"
    assert counts(record, "forward") == 1
    assert record.attention_executed["reason"].endswith("of step 2")
    assert record.flags["compile"] == "default"


def test_launches_inside_a_compiled_graph_are_counted_as_they_run(
    make_model, make_trainer, gate
) -> None:
    callback = AttentionBackendCallback()
    trainer = make_trainer(
        make_model("triton_fa2", num_hidden_layers=1), [callback], max_steps=3,
        torch_compile=True, torch_compile_backend="aot_eager",
    )  # fmt: skip
    trainer.train()
    record = callback.record
    assert record.attention_verdict == "matched"
    assert (counts(record, "forward"), counts(record, "backward")) == (3, 3)
    assert "inside the compiled graph" in record.attention_executed["reading"]


def test_lora_over_a_frozen_base(make_model, make_trainer, gate) -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2)
    model = peft.get_peft_model(make_model("triton_fa2"), lora)
    callback = AttentionBackendCallback()
    make_trainer(model, [callback], max_steps=1).train()
    record = callback.record
    assert (record.attention_verdict, record.attention_verified["decided_layers"]) == ("matched", 2)
    assert record.model["model_type"] == "mistral"
    assert (counts(record, "forward"), counts(record, "backward")) == (LAYERS, LAYERS)
