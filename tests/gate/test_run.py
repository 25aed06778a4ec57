"""Running the gate: workers, merging, reuse, ranks that wait for one another, withdrawal."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import pytest

from hf_attn_backends import gate
from hf_attn_backends.call import CallClass
from hf_attn_backends.errors import GateFailedError, GateMissingError
from hf_attn_backends.gate import run, workers
from hf_attn_backends.gate.results import ClassResult, GateResult
from hf_attn_backends.reference import visible_keys


def test_default_grids_have_what_the_project_promises():
    cpu = {str(one) for one in run.default_grid("cpu")}
    assert len(cpu) == 50 + 8
    assert {"float32/d64/window+softcap", "float32/d64/causal+sinks"} <= cpu
    assert {"float32/d16/dense", "float32/d72/causal", "bfloat16/d128/window"} <= cpu
    cuda = {str(one) for one in run.default_grid("cuda")}
    assert len(cuda) == 50
    assert {"bfloat16/d96/full", "float16/d256/intervals", "float32/d128/causal"} <= cuda


def test_success_is_written_with_its_errors(tmp_path, measured):
    shown = []
    result = gate.run_gate(
        "cpu", classes=["float32/d16/full"], gate_dir=tmp_path,
        progress=lambda done, total, found: shown.append((done, total, found.name)),
    )  # fmt: skip
    assert result.check() is result
    assert shown == [(1, 1, "float32/d16/full")]
    artifact = gate.require("cpu", tmp_path)
    assert artifact.path == result.path
    assert artifact.max_ratios() == {"out": 0.5}
    assert artifact.tolerances["sdpa_factor"] == 2.0
    assert artifact.shapes_covered[0]["cases"][0]["name"] == "odd"
    assert json.dumps(result.to_dict())


def test_a_valid_artifact_is_reused_extended_and_forced(tmp_path, measured):
    gate.run_gate("cpu", classes=["float32/d16/full"], gate_dir=tmp_path)
    again = gate.run_gate("cpu", classes=["float32/d16/full"], gate_dir=tmp_path)
    assert again.reused
    assert again.passed
    assert measured.seen == ["float32/d16/full"]
    gate.run_gate("cpu", classes=["float32/d112/full"], gate_dir=tmp_path)
    artifact = gate.require("cpu", tmp_path)
    assert artifact.coverage == {"float32/d16/full", "float32/d112/full"}
    assert artifact.max_ratios() == {"out": 0.5}  # the first class kept its errors
    gate.run_gate("cpu", classes=["float32/d16/full"], gate_dir=tmp_path, force=True)
    assert len(measured.seen) == 3


def test_what_has_gone_stale_is_not_carried_over(tmp_path, measured, monkeypatch):
    gate.run_gate("cpu", classes=["float32/d112/full"], gate_dir=tmp_path)
    monkeypatch.setattr(gate, "kernel_source_hash", lambda: "1" * 64)
    gate.run_gate("cpu", classes=["float32/d16/full"], gate_dir=tmp_path)
    assert gate.require("cpu", tmp_path).coverage == {"float32/d16/full"}


def test_failure_writes_nothing_and_withdraws_what_vouched(tmp_path, measured):
    both = ["float32/d16/full", "float32/d16/causal"]
    gate.run_gate("cpu", classes=both, gate_dir=tmp_path)
    measured.fail("float32/d32/full")
    result = gate.run_gate("cpu", classes=["float32/d32/full"], gate_dir=tmp_path)
    assert not result.passed
    assert gate.require("cpu", tmp_path).coverage == set(both)  # it says nothing about d32
    with pytest.raises(GateFailedError, match="over its budget"):
        result.check()
    measured.fail("float32/d16/full")
    gate.run_gate("cpu", classes=both, gate_dir=tmp_path, force=True)
    with pytest.raises(GateMissingError):
        gate.require("cpu", tmp_path)


def test_refused_classes_are_not_covered(tmp_path, measured):
    refused = ClassResult(name="float32/d512/full", status="refused", reasons=["too wide"])
    measured.answers["float32/d512/full"] = refused
    result = gate.run_gate(
        "cpu", classes=["float32/d512/full", "float32/d16/full"], gate_dir=tmp_path
    )
    assert result.passed
    assert result.refused == ["float32/d512/full"]
    assert gate.require("cpu", tmp_path).coverage == {"float32/d16/full"}
    alone = gate.run_gate("cpu", classes=["float32/d512/full"], gate_dir=tmp_path)
    assert not alone.passed  # nothing was proven
    with pytest.raises(GateFailedError, match="too wide"):
        alone.check()


def test_sources_that_change_meanwhile_prove_nothing(tmp_path, measured, monkeypatch):
    digests = iter(["1" * 64, "2" * 64])
    monkeypatch.setattr(gate, "kernel_source_hash", lambda: next(digests))
    with pytest.raises(GateFailedError, match="source changed while"):
        gate.run_gate("cpu", classes=["float32/d16/full"], gate_dir=tmp_path)
    assert not gate.artifact_path("cpu", tmp_path).exists()


def test_a_gpu_is_not_measured_by_the_interpreter(tmp_path, measured, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(GateFailedError, match="unset TRITON_INTERPRET"):
        gate.run_gate("cuda", gate_dir=tmp_path)
    assert measured.seen == []


def test_many_ranks_measure_once(tmp_path, measured):
    """The first takes the lock; the others wait and reuse its artifact."""
    results: list[GateResult] = []
    ranks = [
        threading.Thread(
            target=lambda: results.append(
                gate.run_gate("cpu", classes=["float32/d16/full"], gate_dir=tmp_path)
            )
        )
        for _ in range(6)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert measured.seen == ["float32/d16/full"]
    assert sorted(result.reused for result in results) == [False] + [True] * 5
    assert all(result.passed for result in results)


def test_an_attend_of_ones_own_is_never_written(tmp_path, right_attend):
    result = gate.run_gate(
        "cpu", classes=["bfloat16/d16/intervals"], attend=right_attend, gate_dir=tmp_path
    )
    assert result.passed
    assert result.path is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["dk", "dv"])
def test_a_gradient_of_a_key_that_nobody_sees_fails_however_small(name, right_attend):
    """Far below any budget, and still a sign that a hidden key took part."""

    def leaking(inputs):
        found = right_attend(inputs)
        shape = (*inputs.query.shape[:3], inputs.key.shape[2])
        seen = visible_keys(*shape, inputs.query.device, visibility=inputs.visibility)
        hidden = ~seen.any(2).any(1)[:, None, :, None]  # hidden from every head
        return found._replace(**{name: getattr(found, name) + 1e-20 * hidden})

    assert gate.run_gate("cpu", classes=["float32/d16/dense"], attend=right_attend).passed
    result = gate.run_gate("cpu", classes=["float32/d16/dense"], attend=leaking)
    (found,) = result.classes.values()
    assert {(one.tensor, one.check) for one in found.failures} == {(name, "hidden keys")}


def test_the_real_thing_through_a_worker(tmp_path, monkeypatch):
    """From a process without the interpreter: the worker switches it on for the CPU."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    result = gate.run_gate("cpu", classes=["float32/d16/dense"], gate_dir=tmp_path)
    assert result.failures == []
    artifact = gate.require("cpu", tmp_path)
    found = artifact.classes["float32/d16/dense"]["variants"]["triton"]
    assert found["cases"] == 3
    assert found["deterministic"] is True
    assert found["yardsticks"] == ["sdpa"]
    assert set(found["tensors"]) == {"out", "lse", "dq", "dk", "dv"}
    for tensor in found["tensors"].values():
        assert 0 < tensor["ratio"] == tensor["error"] / tensor["budget"] < 1


def test_a_worker_that_dies_is_a_failure_with_its_last_words(monkeypatch):
    code = "import sys; sys.stdin.readline(); sys.stderr.write('one\\nCUDA is gone'); sys.exit(3)"
    start = subprocess.Popen

    def popen(command, **kwargs):
        return start([sys.executable, "-c", code], **kwargs)

    monkeypatch.setattr(workers.subprocess, "Popen", popen)
    done = []
    classes = [CallClass("float32", 16, "full"), CallClass("float32", 16, "causal")]
    results = workers.measure_in_workers(classes, "cpu", 1, done.append)
    assert len(done) == len(results) == 2
    for result in results:
        assert result.status == "failed"
        assert "exit code 3" in result.failures[0].text
        assert "CUDA is gone" in result.failures[0].text


def test_worker_environment(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert workers.worker_environment("cpu")["TRITON_INTERPRET"] == "1"
    assert "TRITON_INTERPRET" not in workers.worker_environment("cuda")
    assert workers.worker_count("cpu", 1) == 1
    assert 1 <= workers.worker_count("cuda", 50) <= 16


@pytest.mark.gpu
def test_one_class_on_the_gpu(tmp_path):
    """Compiled, both variants where there are two, within budget; offsets beyond 2^31 too."""
    result = gate.run_gate("cuda", classes=["bfloat16/d128/causal"], gate_dir=tmp_path)
    assert result.failures == []
    found = result.classes["bfloat16/d128/causal"].variants
    assert found["triton"].deterministic
    assert found["triton"].cases >= 7
    assert gate.require("cuda", tmp_path).covers("bfloat16/d128/causal")


def test_a_negative_number_of_workers_is_refused_and_measures_nothing(tmp_path):
    with pytest.raises(GateFailedError, match=r"by -1 processes.*at least 0"):
        gate.run_gate("cpu", classes=["float32/d16/full"], gate_dir=tmp_path, jobs=-1)
    assert not list(tmp_path.iterdir())
