"""Peers that are called through their packages or torch.compile, without a GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from hf_attn_backends.bench import arms, timing
from hf_attn_backends.bench.arm import Arm, Unavailable
from hf_attn_backends.bench.measure import measure
from hf_attn_backends.bench.peer_arms import repeatable
from hf_attn_backends.bench.verify import errors_of, over_budget, truth_of
from hf_attn_backends.bench.workload import Workload

WORK = Workload(
    batch=2, seq_len=33, heads=4, kv_heads=2, head_dim=16, dtype=torch.float32, device="cpu"
)
ON_GPU = dataclasses.replace(WORK, device="cuda")


@pytest.fixture
def package(monkeypatch):
    """Install a module that holds a function; returns the installer."""

    def install(name: str, function) -> None:
        path = ""
        for part in name.split("."):
            path = f"{path}.{part}".lstrip(".")
            module = ModuleType(path)
            module.__path__ = []
            monkeypatch.setitem(sys.modules, path, module)
        if function is not None:
            module.flash_attn_func = function

    return install


def flash(query, key, value, *, causal, wrong=False):
    """flash-attn's convention: `[B, S, heads, D]`, output and log-sum-exp."""
    query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    out = F.scaled_dot_product_attention(
        query, key, value, is_causal=causal and not wrong, enable_gqa=True
    )
    return out.transpose(1, 2), None


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("flash_attention_2", "flash_attn"),
        ("flash_attention_3", "flash_attn_interface"),
        ("flash_attention_4", "flash_attn.cute"),
    ],
)
def test_a_flash_package_is_called_in_its_layout_forward_and_backward(package, name, module):
    package(module, flash)
    arm = arms.arm_for(name, ON_GPU)
    assert arm.backward
    assert arm.source.startswith(module)
    inputs = WORK.inputs()
    truth = truth_of(WORK, inputs, arms.arm_for("sdpa", WORK))
    errors = errors_of(arm, WORK, inputs, truth)
    assert list(errors) == ["out", "dq", "dk", "dv"]
    assert not over_budget(errors, truth)


def test_a_wrong_flash_package_is_over_budget(package):
    package("flash_attn.cute", lambda *args, causal: flash(*args, causal=causal, wrong=True))
    inputs = WORK.inputs()
    truth = truth_of(WORK, inputs, arms.arm_for("sdpa", WORK))
    said = over_budget(
        errors_of(arms.arm_for("flash_attention_4", ON_GPU), WORK, inputs, truth), truth
    )
    assert any("out" in text and "(rms)" in text for text in said)


def test_the_forward_only_wheel_has_no_backward(package):
    package("flash_attn_interface", None)  # importable, without the function
    package("fa3_fwd_interface", flash)
    arm = arms.arm_for("flash_attention_3", ON_GPU)
    assert not arm.backward
    assert arm.source == "fa3_fwd_interface (fa3-fwd of unknown version)"


def test_what_is_not_there_says_what_the_import_said(package):
    package("flash_attn", None)
    with pytest.raises(Unavailable, match=r"flash_attn: AttributeError.*flash_attn_func"):
        arms.arm_for("flash_attention_2", ON_GPU)
    with pytest.raises(Unavailable, match=r"flash_attn\.cute: ModuleNotFoundError"):
        arms.arm_for("flash_attention_4", ON_GPU)


def compiled_attention(context) -> Arm:
    """Attention whose compiled backward owns what its forward saved."""

    def plain(query, key, value):
        key, value = (t.repeat_interleave(2, 1) for t in (key, value))
        scores = (query @ key.mT) * query.shape[-1] ** -0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(hidden, -math.inf).softmax(-1) @ value

    torch._dynamo.reset()
    return Arm("eager", torch.compile(plain, backend="aot_eager"), context=context)


def test_a_compiled_backward_is_timed_after_it_was_verified(monkeypatch):
    arm = compiled_attention(repeatable)
    monkeypatch.setitem(arms._MAKERS, "eager", lambda name, work: arm)
    rows = measure(WORK, ["eager"], phases=("forward", "backward"), budget_s=0.01)
    assert [row.timing.reason.partition(" of ")[0] for row in rows] == ["median"] * 2
    assert rows[1].timing.ms > 0


@pytest.mark.parametrize("context", [contextlib.nullcontext, repeatable])
def test_only_repeatable_takes_a_second_backward_after_a_first_that_freed(context):
    """The default is what made the arm NaN: it fails here as it did there."""
    arm = compiled_attention(context)
    leaves = [t.requires_grad_() for t in WORK.inputs()[:3]]
    with arm.context():
        torch.autograd.grad(arm.attend(*leaves).sum(), leaves)
        out = arm.attend(*leaves).sum()
        refused = contextlib.nullcontext()
        if context is not repeatable:
            refused = pytest.raises(RuntimeError, match="donated buffers")
        with refused:
            first, second = (
                torch.autograd.grad(out, leaves, retain_graph=True)[0] for _ in range(2)
            )
            assert torch.equal(first, second)


class _Event:
    """Counts calls instead of time."""

    clock = 0

    def __init__(self, enable_timing: bool):
        self.at = None

    def record(self):
        self.at = _Event.clock

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return end.at - self.at


@pytest.mark.parametrize(("mode", "calls"), [("graph", 1), ("graph_warm", 3)])
def test_only_a_warm_replay_has_replays_before_it_that_are_not_timed(monkeypatch, mode, calls):
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(timing, "_FLUSH_BYTES", 8)
    done = []

    def call():
        done.append("a")
        _Event.clock += 1

    times = timing._round_on_gpu({"a": timing.Turn(call)}, "cpu", mode)
    assert times == {"a": 1}
    assert len(done) == calls
    assert timing.L2[mode] == {"graph": "cold", "graph_warm": "warm"}[mode]
