"""Measuring on a CPU: values, reasons, a wrong kernel gets no time."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

from hf_attn_backends import cli
from hf_attn_backends.bench import (
    arms,
    benchmark_backends,
    benchmark_backends_with_reasons,
    command,
    timing,
)
from hf_attn_backends.bench.arm import Arm
from hf_attn_backends.bench.measure import Row, measure
from hf_attn_backends.bench.verify import errors_of, over_budget, truth_of
from hf_attn_backends.bench.workload import Workload, parse_shape
from hf_attn_backends.errors import BenchmarkError

SMALL = {"batch": 2, "seq_len": 65, "heads": 6, "kv_heads": 2, "head_dim": 16, "device": "cpu"}
WORK = Workload(dtype=torch.float32, **SMALL)


def test_every_default_backend_has_a_time_or_nan_with_a_reason():
    found = benchmark_backends_with_reasons(**SMALL, dtype=torch.float32, budget_s=0.02)
    assert {"FLASH_ATTENTION", "MATH", "sdpa", "eager", "triton_fa2", "flashmla"} <= set(found)
    for name, (ms, reason) in found.items():
        assert reason, name
        assert ms > 0 or math.isnan(ms), name
    for name in ("MATH", "sdpa", "eager"):
        assert 0 < found[name][0] < 1000
        assert "perf_counter" in found[name][1]
    assert math.isnan(found["EFFICIENT_ATTENTION"][0])
    assert "no EFFICIENT_ATTENTION kernel for CPU" in found["EFFICIENT_ATTENTION"][1]
    assert "interpreter" in found["triton_fa2"][1]
    assert "512" in found["flashmla"][1]


def test_without_reasons_is_names_to_milliseconds():
    found = benchmark_backends(["MATH", "CUDNN_ATTENTION"], **SMALL, budget_s=0.02)
    assert found["MATH"] > 0
    assert math.isnan(found["CUDNN_ATTENTION"])
    assert list(found) == ["MATH", "CUDNN_ATTENTION"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"heads": 5}, "heads must be a whole multiple of kv_heads, got 5 over 2"),
        ({"seq_len": 0}, "seq_len must be an integer of at least 1, got 0"),
        ({"phase": "sideways"}, "phase must be one of forward, backward, got 'sideways'"),
    ],
)
def test_bad_numbers_are_refused(change, says):
    with pytest.raises(BenchmarkError, match=says):
        benchmark_backends(["MATH"], **{**SMALL, **change})


@pytest.mark.parametrize("causal", [True, False])
def test_the_oracle_agrees_with_sdpa_in_double_and_sets_budgets(causal):
    work = Workload(dtype=torch.float32, causal=causal, **SMALL)
    inputs = work.inputs()
    sdpa = arms.arm_for("sdpa", work)
    truth = truth_of(work, inputs, sdpa)
    doubles = [t.double().requires_grad_() for t in inputs[:3]]
    out = F.scaled_dot_product_attention(*doubles, is_causal=causal, enable_gqa=True)
    grads = torch.autograd.grad(out, doubles, inputs.grad_out.double())
    group = work.heads // work.kv_heads
    first, last = out[0, :group].flatten(), out[1, group:].flatten()
    torch.testing.assert_close(truth.tensors["out"], torch.cat([first, last]).detach())
    torch.testing.assert_close(
        truth.tensors["dk"], torch.cat([grads[1][0, 0].flatten(), grads[1][1, 1].flatten()])
    )
    for by_metric in truth.budgets.values():
        assert 0 < by_metric["rms"] < by_metric["max"] < 1e-4


def _faulty(fault: str) -> Arm:
    def attend(query, key, value):
        scale = 0.9 * query.shape[-1] ** -0.5 if fault == "scale" else None
        if fault == "heads":
            key, value = key.flip(1), value.flip(1)
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True, scale=scale
        )
        if fault == "nan":
            out = out.clone()
            out[1, 0, 3] = math.nan  # outside of the samples
        if fault == "last row":
            out = torch.cat([out[:, :, :-1], out[:, :, :1]], dim=2)
        return out

    return Arm(fault, attend)


@pytest.mark.parametrize("fault", ["scale", "heads", "nan", "last row"])
def test_a_wrong_kernel_is_over_budget(fault):
    inputs = WORK.inputs()
    truth = truth_of(WORK, inputs, arms.arm_for("sdpa", WORK))
    assert over_budget(errors_of(_faulty(fault), WORK, inputs, truth), truth)
    assert not over_budget(errors_of(arms.arm_for("MATH", WORK), WORK, inputs, truth), truth)


def test_a_wrong_kernel_gets_no_time(monkeypatch):
    monkeypatch.setitem(arms._MAKERS, "eager", lambda name, work: _faulty("scale"))
    rows = measure(WORK, ["eager", "MATH"], phases=("forward", "backward"), budget_s=0.01)
    assert [row.arm for row in rows] == ["eager", "MATH"] * 2
    for row in rows:
        assert math.isnan(row.timing.ms) == (row.arm == "eager")
    assert "wrong: out is" in rows[0].timing.reason
    assert rows[1].errors["dk"]["max"] < 1e-4


def test_an_arm_that_raises_is_nan_with_its_words(monkeypatch):
    def attend(query, key, value):
        raise RuntimeError("no such\n   kernel")

    monkeypatch.setitem(arms._MAKERS, "eager", lambda name, work: Arm("eager", attend))
    (row,) = measure(WORK, ["eager"], budget_s=0.01)
    assert row.timing.reason == "RuntimeError: no such kernel"


def test_a_forward_only_arm_has_no_backward(monkeypatch):
    plain = arms.arm_for("sdpa", WORK)
    only = Arm("eager", plain.attend, backward=False)
    monkeypatch.setitem(arms._MAKERS, "eager", lambda name, work: only)
    rows = measure(WORK, ["eager"], phases=("forward", "backward"), budget_s=0.01)
    assert rows[0].timing.ms > 0
    assert math.isnan(rows[1].timing.ms)
    assert rows[1].timing.reason == "it has no backward pass"


def test_calls_take_turns():
    order = []
    turns = {n: timing.Turn(lambda n=n: order.append(n)) for n in "ab"}
    found = timing.interleaved(turns, "cpu", "wall", budget_s=0.0, least=5)
    assert order == list("ab") * 6  # one round to estimate, five that count
    assert found["a"].samples == 5
    with pytest.raises(BenchmarkError, match="no timing mode 'graph'"):
        timing.interleaved(turns, "cpu", "graph")


def test_flops_halve_for_causal_and_backward_counts_two_and_a_half():
    work = Workload(batch=1, seq_len=16384)
    assert work.flops("forward") == pytest.approx(2.199e12, rel=1e-3)
    assert work.flops("backward") == pytest.approx(2.5 * work.flops("forward"))
    assert work.tflops("forward", 1000.0) == pytest.approx(2.199, rel=1e-3)
    assert Workload(causal=False).flops("forward") == 2 * Workload().flops("forward")


def test_shapes_are_parsed_or_refused():
    assert parse_shape("2x8192") == (2, 8192)
    for text in ("8192", "x3", "2x", "axb", "-1x3"):
        with pytest.raises(BenchmarkError, match="BATCHxLENGTH"):
            parse_shape(text)


def _args(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args([*words, "--device", "cpu", "--seconds", "0.01"])


def test_command_prints_and_writes_strict_json(tmp_path, capsys, monkeypatch):
    file = tmp_path / "deep" / "rows.json"
    words = "--names MATH,EFFICIENT_ATTENTION --shapes 1x33,2x17 --heads 2 --kv-heads 1"
    words += " --head-dim 16 --backward --commit abc1234 --json"
    monkeypatch.setattr(sys, "argv", ["hf-attn", "bench", *words.split(), str(file)])
    args = _args(*words.split(), str(file))
    assert command.run(args) == 0
    said = capsys.readouterr().out
    assert "NaN EFFICIENT_ATTENTION (1x33 forward, " in said
    assert "1x33" in said
    assert "2x17" in said

    def refuse(token):
        raise AssertionError(token)

    content = json.loads(file.read_text(), parse_constant=refuse)
    assert len(content["rows"]) == 8
    by_arm = {row["arm"]: row for row in content["rows"]}
    assert by_arm["EFFICIENT_ATTENTION"]["median_ms"] is None
    assert by_arm["EFFICIENT_ATTENTION"]["reason"]
    assert by_arm["MATH"]["median_ms"] > 0
    assert by_arm["MATH"]["errors"]["dq"]["max"] > 0
    assert content["versions"]["torch"] == torch.__version__
    assert content["device"]["type"] == "cpu"
    assert str(tmp_path) not in json.dumps(content)  # no path of this machine
    assert content["code"]["commit_given"] == "abc1234"
    assert {row["l2"] for row in content["rows"]} == {"unknown: a CPU"}
    assert [c["when"] for c in content["clocks"]] == ["start", "after 1x33", "after 2x17"]


def test_peak_memory_is_printed_where_it_was_measured(capsys):
    row = Row(workload=WORK, arm="x", phase="backward", mode="graph", timing=timing.untimed("no"))
    command.print_rows([row], Console(width=150))
    assert "peak MiB" not in capsys.readouterr().out
    command.print_rows([dataclasses.replace(row, peak_mib=1234.4)], Console(width=150))
    said = capsys.readouterr().out
    assert "forward + backward: peak MiB above the inputs" in said
    assert "1,234" in said


def test_peers_are_all_listed_and_what_cannot_run_says_why(capsys):
    words = "--peers --shapes 1x33 --heads 2 --kv-heads 1 --head-dim 16"
    assert command.run(_args(*words.split())) == 0
    said = capsys.readouterr().out
    for peer in arms.PEERS:
        assert peer in said
    assert "NaN triton_fa2:hopper (1x33 forward, 1x33 backward): on a CPU" in said


def test_command_refuses_a_pin_without_a_gpu_and_unknown_names(capsys):
    with pytest.raises(BenchmarkError, match="pinned on a GPU"):
        command.run(_args("--pin"))
    assert cli.main(["bench", "--device", "cpu", "--shapes", "nope"]) == 1
    assert "BATCHxLENGTH" in capsys.readouterr().err
