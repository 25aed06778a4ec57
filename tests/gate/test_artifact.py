"""The artifact: accepted when nothing changed, refused with its own reason for everything else."""

from __future__ import annotations

import json
import os

import pytest

from hf_attn_backends import environment, gate
from hf_attn_backends.call import CallClass
from hf_attn_backends.errors import GateError, GateInvalidError
from hf_attn_backends.gate import sources, writer

SHAPES = [{"dtype": "torch.bfloat16", "head_dim": 64, "visibility": ["full", "causal"]}]


def test_written_and_read_back(written, tmp_path):
    artifact = gate.require("cpu", tmp_path)
    assert artifact.path == written == gate.artifact_path("cpu", tmp_path)
    assert artifact.coverage == {"bfloat16/d64/full", "bfloat16/d64/causal"}
    assert artifact.covers(CallClass("bfloat16", 64, "causal"))
    assert artifact.covers("bfloat16/d64/full")
    assert not artifact.covers("bfloat16/d64/window")
    assert not artifact.covers("bfloat16/d64/causal+softcap")
    assert not artifact.covers(CallClass("float16", 64, "causal"))
    assert artifact.head_dims() == artifact.head_dims("bfloat16") == {64}
    assert artifact.head_dims("float32") == artifact.head_dims(features="softcap") == set()
    assert artifact.kernel_source_sha256 == gate.kernel_source_hash()
    assert artifact.environment == environment.fingerprint("cpu")
    assert artifact.tolerances == {"rule": "2x"}
    assert artifact.created.endswith("Z")
    assert [p.name for p in tmp_path.iterdir()] == ["cpu.json"]  # no temporary file is left


def test_default_folder_is_in_the_home(home):
    path = gate.write_equivalence_gate(tolerances={}, shapes_covered=[])
    assert path == home / "gate" / "cpu.json"
    assert gate.require("cpu").coverage == frozenset()


@pytest.mark.parametrize("shapes", [[(4, 32, 512, 128)], [[1, 2]], [{"seq": 5}], ()])
def test_plain_user_data_states_no_head_dim(tmp_path, shapes):
    gate.write_equivalence_gate(
        tolerances={"bfloat16": {"atol": 1e-2}}, shapes_covered=shapes, gate_dir=tmp_path
    )
    artifact = gate.require("cpu", tmp_path)
    assert artifact.head_dims() == set()
    assert artifact.shapes_covered == json.loads(json.dumps(list(shapes)))


def test_coverage_and_results(tmp_path):
    found = {"variants": {"triton": {"tensors": {"dq": {"ratio": 0.5}, "dk": {"ratio": 0.1}}}}}
    gate.write_equivalence_gate(
        tolerances={}, shapes_covered=SHAPES, gate_dir=tmp_path,
        coverage=[CallClass("float32", 80, "full"), "float16/d96/dense"],
        results={"float32/d80/full": found},
    )  # fmt: skip
    artifact = gate.require("cpu", tmp_path)
    assert artifact.coverage == {"float32/d80/full", "float16/d96/dense"}
    assert artifact.classes["float32/d80/full"]["variants"] == found["variants"]
    assert artifact.max_ratios() == {"dq": 0.5, "dk": 0.1}
    summary = artifact.summary()
    assert summary["status"] == "ok"
    assert summary["head_dims"] == {"float16": [96], "float32": [80]}
    assert summary["artifact_sha256"] == artifact.sha256
    assert json.dumps(summary)


@pytest.mark.parametrize("bad", [{"atol": float("nan")}, {"atol": float("inf")}, {"f": object()}])
def test_only_strict_json_is_written(tmp_path, bad):
    with pytest.raises(GateInvalidError, match="not JSON"):
        gate.write_equivalence_gate(tolerances=bad, shapes_covered=[], gate_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_artifact(written, tmp_path, monkeypatch):
    before = written.read_text()

    def broken(*args):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(GateError, match="disk full"):
        gate.write_equivalence_gate(tolerances={"x": 1}, shapes_covered=[], gate_dir=tmp_path)
    assert written.read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == ["cpu.json"]


def test_device_kind_carries_the_capability(monkeypatch, tmp_path):
    monkeypatch.setattr(environment.driver, "gpus",
                        lambda: (environment.driver.Gpu("H", (9, 0)),))  # fmt: skip
    assert gate.device_kind("cuda:0") == "cuda-sm90"
    assert gate.artifact_path("cuda", tmp_path).name == "cuda-sm90.json"
    gate.write_equivalence_gate(tolerances={}, shapes_covered=[], gate_dir=tmp_path, device="cuda")
    assert gate.require("cuda", tmp_path).device == "cuda-sm90"


def test_every_file_of_the_kernels_counts(tmp_path, monkeypatch):
    """A changed byte, a new file and a renamed file change the digest; a cache does not."""
    counted = {path.name for path in sources.kernel_sources()}
    assert {
        "ops.py",
        "visibility.py",
        "forward_kernels.py",
        "reference.py",
        "budgets.py",
    } <= counted
    package = tmp_path / "package"
    for path in sources.kernel_sources():
        copy = package / path.relative_to(sources._PACKAGE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    original = gate.kernel_source_hash()
    monkeypatch.setattr(sources, "_PACKAGE", package)
    assert gate.kernel_source_hash() == original
    seen = {original}
    for change in (
        lambda: (package / "kernels/visibility.py").write_text("# other"),
        lambda: (package / "kernels/triton/new.py").write_text(""),
        lambda: (package / "kernels/triton/new.py").rename(package / "kernels/triton/newer.py"),
        lambda: (package / "reference.py").write_text(""),
    ):
        change()
        assert gate.kernel_source_hash() not in seen
        seen.add(gate.kernel_source_hash())
    cache = package / "kernels" / "__pycache__"
    cache.mkdir()
    (cache / "ops.cpython-311.pyc").write_bytes(b"1")
    assert gate.kernel_source_hash() in seen
    assert len(original) == 64


def test_writing_makes_calls_ask_anew(tmp_path, monkeypatch):
    import sys
    import types

    asked = []
    proof = types.SimpleNamespace(forget=lambda: asked.append(1))
    monkeypatch.setitem(sys.modules, "hf_attn_backends.backends.proof", proof)
    path = gate.write_equivalence_gate(tolerances={}, shapes_covered=[], gate_dir=tmp_path)
    writer.withdraw(path)
    assert len(asked) == 2
    assert not path.exists()


def test_commands():
    assert gate.extend_command(112) == "hf-attn gate --head-dim 112"
    assert gate.extend_command(112, "bfloat16") == "hf-attn gate --head-dim 112 --dtype bfloat16"
    assert (
        gate.extend_command(CallClass("float16", 80, "dense"), device="cuda:1")
        == "hf-attn gate --device cuda --head-dim 80 --dtype float16 --visibility dense"
    )
    assert gate.extend_command("float16/d80/full").endswith("--visibility full")
    assert gate.extend_command(64, features="softcap").endswith("--head-dim 64 --feature softcap")
    assert gate.gate_command("cuda:1", "/g") == "hf-attn gate --device cuda --gate-dir /g"


def test_class_names_are_read_back():
    for name in ("bfloat16/d128/causal", "float32/d80/dense+sinks+softcap"):
        assert str(gate.parse_class(name)) == name
    with pytest.raises(GateInvalidError, match="bfloat16/d128/causal"):
        gate.parse_class("bfloat16-128")


@pytest.mark.parametrize(
    "item",
    [
        {"dtype": "float33", "head_dim": 16, "visibility": "full"},
        {"dtype": "float32", "head_dim": "x", "visibility": "full"},
        {"dtype": "float32", "head_dim": 0, "visibility": "full"},
        {"dtype": "float32", "head_dim": 16, "visibility": ["full", "zigzag"]},
        {"dtype": "float32", "head_dim": 16, "visibility": "full", "features": "magic"},
    ],
)
def test_coverage_of_what_does_not_exist_is_refused(item, tmp_path):
    with pytest.raises(GateInvalidError, match="must"):
        gate.write_equivalence_gate(tolerances={}, shapes_covered=[item], gate_dir=tmp_path)
    assert not list(tmp_path.glob("*.json"))


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(GateError, match="cannot be written") as caught:
        gate.write_equivalence_gate(
            tolerances={}, shapes_covered=[], gate_dir=tmp_path / "file" / "gate"
        )
    assert "HF_ATTN_HOME" in str(caught.value)
    assert "Not a directory" in str(caught.value)
