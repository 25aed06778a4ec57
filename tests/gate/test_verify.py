"""An artifact is accepted when nothing changed, and refused with its own reason otherwise."""

from __future__ import annotations

import json
import os

import pytest

from hf_attn_backends import environment, gate
from hf_attn_backends.errors import (
    GateError,
    GateInvalidError,
    GateMissingError,
    GateStaleError,
)
from hf_attn_backends.gate.artifact import canonical_digest

SHAPES = [{"dtype": "torch.bfloat16", "head_dim": 64, "visibility": ["full", "causal"]}]


def refusal(kind: type[GateError], folder, device: str = "cpu") -> str:
    with pytest.raises(kind) as caught:
        gate.require(device, folder)
    assert type(caught.value) is kind
    assert isinstance(caught.value, RuntimeError)
    return str(caught.value)


def edit(path, change, *, sign: bool = True) -> None:
    """Change the document; with `sign`, make its own digest right again."""
    document = json.loads(path.read_text())
    change(document)
    if sign:
        document["sha256"] = canonical_digest(document)
    path.write_text(json.dumps(document))


def test_missing(tmp_path):
    text = refusal(GateMissingError, tmp_path)
    assert "equivalence gate" in text
    assert "hf-attn gate --device cpu" in text
    assert str(tmp_path / "cpu.json") in text


def test_missing_for_this_kind_of_device(written, tmp_path):
    """A CPU artifact never blesses a GPU."""
    text = refusal(GateMissingError, tmp_path, "cuda")
    assert "another device kind (cpu) proves nothing about cuda" in text


def test_foreign_device(written, tmp_path):
    written.rename(gate.artifact_path("cuda", tmp_path))
    text = refusal(GateInvalidError, tmp_path, "cuda")
    assert "was measured on cpu, this device is cuda" in text


@pytest.mark.parametrize("keep", [0.0, 0.5, 0.99])
def test_truncated(written, tmp_path, keep):
    text = written.read_text()
    written.write_text(text[: int(len(text) * keep)])
    assert "truncated or not JSON" in refusal(GateInvalidError, tmp_path)


def test_not_a_number_is_not_json(written, tmp_path):
    written.write_text(written.read_text().replace('"2x"', "NaN"))
    assert "the token NaN is not JSON" in refusal(GateInvalidError, tmp_path)


def test_other_json(written, tmp_path):
    written.write_text("[1, 2]")
    assert "not a gate artifact" in refusal(GateInvalidError, tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable(written, tmp_path):
    written.chmod(0)
    assert "cannot be read" in refusal(GateInvalidError, tmp_path)


def test_a_folder_in_its_place(tmp_path):
    gate.artifact_path("cpu", tmp_path).mkdir()
    assert "cannot be read" in refusal(GateInvalidError, tmp_path)


def test_hand_edited(written, tmp_path):
    edit(written, lambda d: d["classes"].update({"float32/d8/full": {}}), sign=False)
    text = refusal(GateInvalidError, tmp_path)
    assert "was edited" in text
    assert "--force" in text


@pytest.mark.parametrize(
    ("schema", "reason"),
    [(2, "schema 2, this version reads 1"), ("1", "got '1'"), (None, "got None"), (True, "True")],
)
def test_other_schema(written, tmp_path, schema, reason):
    edit(written, lambda d: d.update(schema=schema))
    assert reason in refusal(GateInvalidError, tmp_path)


def test_missing_field(written, tmp_path):
    edit(written, lambda d: d.pop("environment"))
    assert "'environment' is missing" in refusal(GateInvalidError, tmp_path)


def test_changed_source_names_both_digests_and_the_command(written, tmp_path, monkeypatch):
    then = gate.kernel_source_hash()
    monkeypatch.setattr(gate, "kernel_source_hash", lambda: "0" * 64)
    text = refusal(GateStaleError, tmp_path)
    assert "kernel source changed" in text
    assert then in text
    assert "0" * 64 in text
    assert "hf-attn gate --device cpu" in text
    monkeypatch.undo()
    assert gate.require("cpu", tmp_path)  # no verdict was remembered


@pytest.mark.parametrize("part", ["torch", "triton", "python", "platform", "numpy"])
def test_each_changed_part_of_the_environment_is_named(written, tmp_path, monkeypatch, part):
    then = environment.fingerprint("cpu")
    monkeypatch.setattr(environment, "fingerprint", lambda device: {**then, part: "other"})
    text = refusal(GateStaleError, tmp_path)
    assert f"environment changed: {part} was {then[part]!r}" in text
    assert "is 'other' now" in text
    assert text.count("environment changed") == 1
    assert "kernel source changed" not in text


@pytest.mark.parametrize(
    ("variable", "value", "part"),
    [("DISABLE_PTXAS_OPT", "1", "DISABLE_PTXAS_OPT was 'unset'"),
     ("TRITON_INTERPRET", "1", "interpreter was 'off'")],
)  # fmt: skip
def test_a_codegen_variable_counts_on_a_gpu(tmp_path, monkeypatch, variable, value, part):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    gate.write_equivalence_gate(tolerances={}, shapes_covered=[], gate_dir=tmp_path, device="cuda")
    monkeypatch.setenv(variable, value)
    assert part in refusal(GateStaleError, tmp_path, "cuda")
    monkeypatch.delenv(variable)
    assert gate.require("cuda", tmp_path)


def test_every_reason_at_once(written, tmp_path, monkeypatch):
    then = environment.fingerprint("cpu")
    monkeypatch.setattr(gate, "kernel_source_hash", lambda: "0" * 64)
    monkeypatch.setattr(
        environment, "fingerprint", lambda device: {**then, "torch": "9", "gpu": "new"}
    )
    text = refusal(GateStaleError, tmp_path)
    for reason in ("kernel source changed", "torch was", "gpu was 'unset'"):
        assert reason in text


@pytest.mark.parametrize(
    ("classes", "says"),
    [
        (
            {"nonsense": {}},
            "a call class must be written like bfloat16/d128/causal, got 'nonsense'",
        ),
        ({"float33/d16/full": {}}, "its dtype must be one of"),
        ({"float32/d-4/full": {}}, "its head_dim must be at least 1"),
        ({"float32/d16/zigzag": {}}, "its visibility must be one of"),
        ({"float32/d16/full+magic": {}}, "its features must be"),
        ({"float32/d16/full": 3}, "what it says of float32/d16/full is no mapping"),
        (
            {"float32/d16/full": {"dtype": "float32", "head_dim": 128, "visibility": "full"}},
            "what it says of float32/d16/full is of another class",
        ),
    ],
)
def test_classes_that_are_none(written, tmp_path, classes, says):
    """Signed or not: a reader of the file must not stumble over what is in it."""
    edit(written, lambda document: document.update(classes=classes))
    assert says in refusal(GateInvalidError, tmp_path)


def test_a_link_to_nowhere_is_no_other_device(tmp_path):
    (tmp_path / "cpu.json").symlink_to(tmp_path / "nowhere")
    assert "another device" not in refusal(GateMissingError, tmp_path)


def test_commands_quote_what_a_shell_would_split(tmp_path):
    folder = tmp_path / "a folder"
    text = refusal(GateMissingError, folder)
    assert f"hf-attn gate --device cpu --gate-dir '{folder}'" in text
    command = gate.extend_command(112, "bfloat16", device="cpu", gate_dir=folder)
    assert command.endswith(f"--gate-dir '{folder}'")
