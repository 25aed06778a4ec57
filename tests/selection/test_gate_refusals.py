"""triton_fa2 and the gate: absent module, no artifact, stale, edited; nothing is remembered."""

from __future__ import annotations

import json
import sys

import pytest

import hf_attn_backends
from hf_attn_backends import environment, gate, selection
from hf_attn_backends.errors import (
    GateError,
    GateInvalidError,
    GateMissingError,
    GateNotImplementedError,
    GateStaleError,
)
from hf_attn_backends.selection import decide, probe_backends, select_attn_implementation

KERNELS = ("triton_fa2", "triton_decode")


def select(gate_dir, name="triton_fa2", **more):
    return select_attn_implementation(name, device="cpu", gate_dir=gate_dir, **more)


@pytest.mark.parametrize("name", KERNELS)
def test_without_an_artifact_refused_with_one_returned_in_one_process(name, write_gate, gate_dir):
    with pytest.raises(GateMissingError, match="equivalence gate") as caught:
        select(gate_dir, name)
    assert "hf-attn gate --device cpu" in str(caught.value)
    path = write_gate()
    assert select(gate_dir, name) == name
    report = probe_backends("cpu", gate_dir)[name]
    assert report.available
    assert "equivalence gate vouches" in report.reason
    assert ("split-KV decode kernel" in report.reason) == (name == "triton_decode")
    path.unlink()
    with pytest.raises(GateMissingError):
        select(gate_dir, name)


def test_a_changed_source_names_both_digests_and_the_command(write_gate, gate_dir, monkeypatch):
    write_gate()
    before, after = gate.kernel_source_hash(), "f" * 64
    monkeypatch.setattr(gate, "kernel_source_hash", lambda: after)
    with pytest.raises(GateStaleError, match="kernel source changed") as caught:
        select(gate_dir)
    assert before in str(caught.value)
    assert after in str(caught.value)
    assert "hf-attn gate" in str(caught.value)
    monkeypatch.undo()
    assert select(gate_dir) == "triton_fa2"


@pytest.mark.parametrize("parts", [["torch"], ["triton"], ["python", "torch"]])
def test_each_changed_part_of_the_environment_is_named(parts, write_gate, gate_dir, monkeypatch):
    write_gate()
    real = environment.fingerprint("cpu")
    changed = {part: f"other-{part}" for part in parts}
    monkeypatch.setattr(environment, "fingerprint", lambda device: {**real, **changed})
    with pytest.raises(GateStaleError) as caught:
        select(gate_dir)
    for part in parts:
        assert f"environment changed: {part} was {real[part]!r}" in str(caught.value)
        assert f"other-{part}" in str(caught.value)
    others = set(real) - set(parts)
    assert not any(f"environment changed: {part} " in str(caught.value) for part in others)


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (lambda text: text[: len(text) // 2], "truncated"),
        (lambda text: text.replace('"factor": 2.0', '"factor": 9.0'), "edited"),
        (lambda text: json.dumps({**json.loads(text), "schema": 99}), "schema 99"),
        (lambda text: text.replace('"device": "cpu"', '"device": "cuda-sm90"'), "edited"),
    ],
)
def test_an_artifact_that_cannot_be_trusted_is_refused_with_its_reason(
    spoil, word, write_gate, gate_dir
):
    path = write_gate()
    spoiled = spoil(path.read_text())
    assert spoiled != path.read_text()
    path.write_text(spoiled)
    with pytest.raises(GateInvalidError, match=word):
        select(gate_dir)


def test_an_artifact_of_another_device_proves_nothing(write_gate, gate_dir):
    path = write_gate()
    document = json.loads(path.read_text())
    assert document["device"] == "cpu"
    report = probe_backends("cuda", gate_dir)["triton_fa2"]
    assert any(
        "no equivalence gate was run for cuda" in reason
        and "(cpu) proves nothing about cuda" in reason
        for reason in report.refusals
    )
    with pytest.raises(RuntimeError, match="proves nothing about cuda"):
        select_attn_implementation("triton_fa2", device="cuda", gate_dir=gate_dir)


@pytest.mark.parametrize("holder", [selection, hf_attn_backends, "sys.modules"])
def test_an_absent_gate_module_is_not_yet_implemented(holder, monkeypatch, write_gate, gate_dir):
    write_gate()
    if holder == "sys.modules":
        monkeypatch.setitem(sys.modules, "hf_attn_backends.gate", None)
    else:
        name = "TRITON_FA2_GATE_MODULE"
        monkeypatch.setattr(holder, name, "hf_attn_backends.no_such_gate", raising=False)
    with pytest.raises(GateNotImplementedError, match="not yet implemented"):
        select(gate_dir)
    assert "not yet implemented" in probe_backends("cpu", gate_dir)["triton_fa2"].reason
    assert select_attn_implementation(None, device="cpu", gate_dir=gate_dir) == "sdpa"
    monkeypatch.undo()
    assert select(gate_dir) == "triton_fa2"


def test_a_gate_module_of_ones_own_is_asked(monkeypatch, gate_dir):
    class Own:
        @staticmethod
        def require(device=None, gate_dir=None):
            raise GateMissingError("the equivalence gate of the house says no")

    monkeypatch.setitem(sys.modules, "own_gate", Own)
    monkeypatch.setattr(selection, "TRITON_FA2_GATE_MODULE", "own_gate")
    with pytest.raises(GateMissingError, match="of the house"):
        select(gate_dir)


class TestCoverage:
    """A model's head_dim against what the artifact covers, at load."""

    config = staticmethod(
        lambda head_dim, dtype=None: {
            "head_dim": head_dim,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "dtype": dtype,
        }
    )

    def test_a_covered_head_dim_is_served(self, write_gate, gate_dir):
        write_gate("float32/d64/causal", "bfloat16/d128/causal")
        for config in (self.config(64), self.config(128, "bfloat16"), self.config(128, "float32")):
            decision = decide("triton_fa2", device="cpu", gate_dir=gate_dir, model_config=config)
            assert decision.resolved == "triton_fa2"
            assert decision.gate["head_dims"] == {"bfloat16": [128], "float32": [64]}

    @pytest.mark.parametrize(
        ("head_dim", "dtype", "command"),
        [
            (112, "bfloat16", "--head-dim 112 --dtype bfloat16"),
            (64, "bfloat16", "--head-dim 64 --dtype bfloat16"),  # covered in float32 alone
            (112, None, "--head-dim 112"),
        ],
    )
    def test_another_is_refused_with_the_command(
        self, head_dim, dtype, command, write_gate, gate_dir
    ):
        write_gate("float32/d64/causal", "bfloat16/d128/causal")
        with pytest.raises(GateError, match=f"head_dim {head_dim}") as caught:
            select(gate_dir, model_config=self.config(head_dim, dtype))
        assert command in str(caught.value)

    def test_an_artifact_that_states_none_defers_to_the_calls(self, write_gate, gate_dir):
        write_gate()
        decision = decide(
            "triton_fa2", device="cpu", gate_dir=gate_dir, model_config=self.config(64)
        )
        assert "each call will be checked" in decision.reasons[0]

    def test_structure_comes_first_and_everything_is_collected(self, gate_dir):
        with pytest.raises(RuntimeError) as caught:
            select(gate_dir, model_config=self.config(320))
        text = str(caught.value)
        assert 0 < text.index("head_dim 320") < text.index("equivalence gate")
