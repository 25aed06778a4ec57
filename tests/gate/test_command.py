"""`hf-attn gate`: what the options name, what is printed, the exit code."""

from __future__ import annotations

import json

import pytest
import torch

from hf_attn_backends import gate
from hf_attn_backends.errors import GateError
from hf_attn_backends.gate.command import asked_classes
from hf_attn_backends.gate.grid import default_grid
from hf_attn_backends.kernels.visibility import KINDS


def arguments(*words: str):
    import argparse

    from hf_attn_backends.gate import command

    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(list(words))


@pytest.mark.parametrize(
    ("words", "want"),
    [
        (["--head-dim", "112", "--dtype", "bfloat16"], {f"bfloat16/d112/{k}" for k in KINDS}),
        (
            ["--head-dim", "24", "--head-dim", "40", "--dtype", "float16", "--visibility", "full"],
            {"float16/d24/full", "float16/d40/full"},
        ),
        (
            ["--dtype", "bfloat16", "--visibility", "dense"],
            {"bfloat16/d64/dense", "bfloat16/d128/dense"},
        ),
        (
            [
                "--head-dim",
                "24",
                "--dtype",
                "float32",
                "--visibility",
                "full",
                "--feature",
                "softcap+sinks",
                "--feature",
                "dropout",
            ],
            {"float32/d24/full+sinks+softcap", "float32/d24/full+dropout"},
        ),
        (
            ["--dtype", "bfloat16", "--visibility", "window", "--feature", "value_dim"],
            {"bfloat16/d64/window+value_dim", "bfloat16/d128/window+value_dim"},
        ),
    ],
)
def test_options_name_classes(words, want, tmp_path):
    args = arguments("--gate-dir", str(tmp_path), *words)
    assert {str(one) for one in asked_classes(args, "cpu")} == want


def test_a_feature_that_cannot_be_measured(capsys):
    with pytest.raises(SystemExit):
        arguments("--feature", "bias")
    assert "a feature must be one of dropout, sinks, softcap, value_dim" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["float32/d24/window", "bfloat16/d80/causal+sinks+softcap"])
def test_the_command_of_a_refusal_measures_that_class(name, tmp_path):
    words = gate.extend_command(name, device="cpu").split()[2:]
    args = arguments("--gate-dir", str(tmp_path), *words)
    assert [str(one) for one in asked_classes(args, "cpu")] == [name]


def test_a_plain_run_restores_what_was_covered_before(tmp_path, measured, monkeypatch):
    gate.run_gate("cpu", classes=["float32/d112/full"], gate_dir=tmp_path)
    monkeypatch.setattr(gate, "kernel_source_hash", lambda: "1" * 64)
    args = arguments("--gate-dir", str(tmp_path))
    asked = {str(one) for one in asked_classes(args, "cpu")}
    assert "float32/d112/full" in asked
    assert len(asked) == len(default_grid("cpu")) + 1


def cli(capsys, *words: str):
    from hf_attn_backends.cli import main

    code = main(["gate", *words])
    return code, *capsys.readouterr()


def test_command_measures_then_finds_it_proven(tmp_path, measured, capsys):
    words = ("--device", "cpu", "--gate-dir", str(tmp_path), "--head-dim", "16")
    words += ("--dtype", "float32", "--visibility", "full")
    code, out, _ = cli(capsys, *words)
    assert code == 0
    for part in ("float32/d16/full", "triton", "1.0e-03  50%", "passed", "cpu.json"):
        assert part in out
    code, out, _ = cli(capsys, *words)
    assert code == 0
    assert "already covers all 1 classes" in out
    assert measured.seen == ["float32/d16/full"]
    code, out, _ = cli(capsys, *words, "--force", "--json")
    assert code == 0
    assert json.loads(out)["classes"]["float32/d16/full"]["status"] == "passed"


def test_command_fails_with_every_failure(tmp_path, measured, capsys):
    measured.fail("float32/d16/full")
    words = ("--device", "cpu", "--gate-dir", str(tmp_path), "--head-dim", "16")
    words += ("--dtype", "float32", "--visibility", "full")
    code, out, _ = cli(capsys, *words)
    assert code == 1
    assert "FAILED" in out
    assert "dk has max error 1.0 over its budget 0.1" in out
    assert "no artifact was written" in out
    code, out, _ = cli(capsys, *words, "--json")
    assert code == 1
    assert json.loads(out)["failures"]


@pytest.mark.parametrize("device", ["tpu", "mps", "", "cuda:x", "nonsense"])
def test_a_device_that_has_no_gate_is_refused_before_anything_is_measured(device, measured, capsys):
    code, _, err = cli(capsys, "--device", device)
    assert code == 1
    assert f"device must be cpu, cuda or cuda:N, got '{device}'" in err
    assert not measured.seen


@pytest.mark.parametrize("words", [("--head-dim", "0"), ("--head-dim", "-3"), ("--jobs", "-1")])
def test_numbers_out_of_range_are_refused_by_the_parser(words, capsys):
    with pytest.raises(SystemExit) as caught:
        arguments(*words)
    assert caught.value.code == 2
    assert "must be at least" in capsys.readouterr().err


def test_an_unwritable_folder_is_an_error_and_no_traceback(tmp_path, measured, capsys):
    (tmp_path / "file").write_text("")
    words = ("--device", "cpu", "--head-dim", "16", "--gate-dir", str(tmp_path / "file" / "gate"))
    code, _, err = cli(capsys, *words)
    assert code == 1
    assert "cannot be written" in err
    assert not measured.seen


def test_what_is_proven_needs_no_lock(tmp_path, measured, monkeypatch):
    """A home that is shared read-only serves whatever it already vouches for."""
    gate.run_gate("cpu", classes=["float32/d16/full"], gate_dir=tmp_path)

    def refuse(*_: object, **__: object):
        raise PermissionError("read-only")

    monkeypatch.setattr("hf_attn_backends.gate.run.FileLock.acquire", refuse)
    assert gate.run_gate("cpu", classes=["float32/d16/full"], gate_dir=tmp_path).reused
    with pytest.raises(GateError, match="read-only"):
        gate.run_gate("cpu", classes=["float32/d24/full"], gate_dir=tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_command_without_the_device(capsys):
    code, _, err = cli(capsys, "--device", "cuda")
    assert code == 1
    assert "no CUDA device" in err
