"""select_attn_implementation without the gate: defaults, refusals, spellings, the decision."""

from __future__ import annotations

import json
import logging
import types

import pytest

from hf_attn_backends import environment, selection
from hf_attn_backends.backends import AttentionBackend, AttentionBackendFactory
from hf_attn_backends.errors import BackendRefusedError, GateError, UnknownBackendError
from hf_attn_backends.selection import (
    ALL_BACKENDS,
    banner_value,
    decide,
    probe_backends,
    select_attn_implementation,
)


def test_none_is_sdpa_even_with_a_passing_gate_and_is_logged(write_gate, gate_dir, caplog):
    write_gate("float32/d64/causal")
    assert select_attn_implementation("triton_fa2", device="cpu", gate_dir=gate_dir) == "triton_fa2"
    caplog.clear()
    assert select_attn_implementation(None, device="cpu", gate_dir=gate_dir) == "sdpa"
    logged = [r for r in caplog.records if r.name == "hf_attn_backends.selection"]
    assert len(logged) == 1
    assert logged[0].levelno == logging.INFO
    assert "None -> sdpa" in logged[0].getMessage()
    assert "never selected on its own" in logged[0].getMessage()


@pytest.mark.parametrize("name", ALL_BACKENDS)
def test_an_unavailable_backend_raises_with_the_probes_reason(name, gate_dir):
    report = probe_backends("cpu", gate_dir)[name]
    if report.available:
        assert select_attn_implementation(name, device="cpu", gate_dir=gate_dir) == name
        return
    with pytest.raises(RuntimeError) as caught:
        select_attn_implementation(name, device="cpu", gate_dir=gate_dir)
    assert len(report.reason) >= 40
    assert report.reason in str(caught.value)
    assert all(reason in str(caught.value) for reason in report.refusals)
    assert f"'{name}'" in str(caught.value)


@pytest.mark.parametrize(
    ("typo", "nearest"),
    [("spda", "sdpa"), ("triton_fa3", "triton_fa2"), ("flash_atention_2", "flash_attention_2"),
     ("eagre", "eager"), ("flex", "flex_attention"), ("atuo", "auto")],
)  # fmt: skip
def test_a_typo_raises_with_the_nearest_name(typo, nearest):
    with pytest.raises(UnknownBackendError, match=f"unknown backend '{typo}'") as caught:
        select_attn_implementation(typo, device="cpu")
    assert f"did you mean '{nearest}'?" in str(caught.value)
    assert isinstance(caught.value, RuntimeError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("junk", ["", "   ", 5, ["sdpa"], "qqqqqq"])
def test_what_is_no_name_is_unknown(junk):
    with pytest.raises(UnknownBackendError, match="unknown backend"):
        select_attn_implementation(junk, device="cpu")


@pytest.mark.parametrize(
    ("asked", "resolved"),
    [("SDPA", "sdpa"), ("Flex-Attention", "flex_attention"), ("paged|sdpa", "paged|sdpa"),
     ("auto", "auto"), ("kernels-community/flash-attn2", "kernels-community/flash-attn2"),
     ("org/repo@v2:fn", "org/repo@v2:fn"), ({"": "eager", "vision": "sdpa"}, "eager"),
     ({"vision": "eager"}, "sdpa")],
)  # fmt: skip
def test_spellings_and_names_that_pass_through(asked, resolved):
    decision = decide(asked, device="cpu")
    assert decision.resolved == resolved
    assert all(decision.reasons)
    assert not decision.substituted
    if "/" in resolved:
        assert "hub" in decision.reasons[0]
        assert "not gated" in decision.reasons[0]


def test_flash_names_that_are_not_installed_are_refused():
    for name in ("flash_attention_2", "flash_attention_3", "flash_attention_4"):
        with pytest.raises(BackendRefusedError, match="not installed"):
            select_attn_implementation(name, device="cpu")


def test_names_that_others_registered_with_transformers_pass_through():
    modeling_utils = pytest.importorskip("transformers.modeling_utils")
    with pytest.raises(UnknownBackendError):
        decide("my_own_attention", device="cpu")
    functions = modeling_utils.AttentionInterface
    functions.register("my_own_attention", lambda *a, **k: None)
    try:
        decision = decide("my_own_attention", device="cpu")
        assert decision.resolved == "my_own_attention"
        assert "not gated" in decision.reasons[0]
    finally:
        functions._global_mapping.pop("my_own_attention")


def test_continuous_batching_asks_the_gate_like_any_request(write_gate, gate_dir):
    """The prefix changes nothing but the name: transformers 5.17 needs it."""
    with pytest.raises(GateError, match="equivalence gate"):
        select_attn_implementation("paged|triton_fa2", device="cpu", gate_dir=gate_dir)
    write_gate("float32/d64/causal")
    decision = decide("paged|triton_fa2", device="cpu", gate_dir=gate_dir)
    assert decision.resolved == "paged|triton_fa2"
    assert decision.gate is not None
    with pytest.raises(BackendRefusedError, match="head_dim"):
        select_attn_implementation(
            "paged|triton_fa2",
            device="cpu",
            gate_dir=gate_dir,
            model_config=types.SimpleNamespace(head_dim=8),
        )


def test_a_plug_in_is_for_single_calls():
    @AttentionBackendFactory.register("tiny")
    class Tiny(AttentionBackend):
        name = "tiny"

        def forward(self, query, key, value, call, **kwargs):
            return query

    try:
        assert probe_backends("cpu")["tiny"].available
        with pytest.raises(BackendRefusedError, match="attn_implementation='auto'"):
            select_attn_implementation("tiny", device="cpu")
    finally:
        AttentionBackendFactory.unregister("tiny")


def test_the_decision_carries_every_candidate_and_is_strict_json(gate_dir):
    decision = decide("sdpa", origin="config", device="cpu", gate_dir=gate_dir)
    assert (decision.requested, decision.origin, decision.gate) == ("sdpa", "config", None)
    assert {report.name for report in decision.candidates} >= set(ALL_BACKENDS)
    document = json.loads(json.dumps(decision.as_dict(), allow_nan=False))
    assert document["candidates"][0]["reason"]
    assert decide(None, device="cpu", origin="config").origin == "default"


def test_the_origin_is_in_the_refusal():
    with pytest.raises(RuntimeError, match="from the config"):
        decide("flash_attention_2", origin="config", device="cpu")


def test_banner_value_names_backend_origin_gate_and_device(write_gate, gate_dir):
    path = write_gate("float32/d64/causal")
    assert path.exists()
    where = environment.device_facts("cpu")["name"]
    value = banner_value("triton_fa2", device="cpu", gate_dir=gate_dir)
    digest = decide("triton_fa2", device="cpu", gate_dir=gate_dir).gate["artifact_sha256"]
    assert value == f"triton_fa2 (requested by argument; gate ok {digest[:8]}…; cpu {where})"
    assert banner_value(None, device="cpu") == f"sdpa (nothing requested; cpu {where})"
    decision = decide("SDPA", origin="config", device="cpu")
    assert banner_value(decision, device="cpu").startswith("sdpa (requested SDPA by config;")
    with pytest.raises(RuntimeError):
        banner_value("flash_attention_2", device="cpu")


def test_the_public_names_are_there():
    assert selection.TRITON_FA2_GATE_MODULE == "hf_attn_backends.gate"
    assert ALL_BACKENDS == (
        "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention",
        "triton_fa2", "triton_decode", "flashmla",
    )  # fmt: skip
