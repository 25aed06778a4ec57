"""Ablations are arms of the benchmark: named, parsed or refused, and never the product's."""

from __future__ import annotations

import dataclasses
import math

import pytest

from hf_attn_backends.bench import ablations, benchmark_backends_with_reasons
from hf_attn_backends.bench.arms import arm_for
from hf_attn_backends.bench.measure import measure
from hf_attn_backends.bench.workload import Workload
from hf_attn_backends.errors import BenchmarkError

ON_GPU = Workload(batch=1, seq_len=512, heads=4, kv_heads=2, device="cuda")


def test_settings_become_arms_beside_the_kernel_as_it_is():
    assert ablations.ablation_names([]) == []
    assert ablations.ablation_names(["turns=0"]) == ["hopper_forward", "hopper_forward:turns=0"]


def test_an_arm_changes_the_fields_that_it_names():
    from hf_attn_backends.kernels.hopper.forward import DEFAULT

    plain = arm_for("hopper_forward", ON_GPU)
    changed = arm_for("hopper_forward:turns=0;l2_bytes=4096", ON_GPU)
    assert plain.source == str(DEFAULT)
    without = type(DEFAULT.turns)(0)
    assert changed.source == str(dataclasses.replace(DEFAULT, turns=without, l2_bytes=4096))
    assert not changed.backward


@pytest.mark.parametrize(
    ("setting", "says"),
    [("nonsense=0", "known: turns"), ("turns=off", "must be a number, got 'off'")],
)
def test_what_cannot_be_changed_is_refused(setting, says):
    with pytest.raises(BenchmarkError, match=says):
        arm_for(f"hopper_forward:{setting}", ON_GPU)


def test_on_a_cpu_it_is_nan_with_the_reason():
    found = benchmark_backends_with_reasons(
        ["hopper_forward"], batch=1, seq_len=32, heads=2, kv_heads=1, head_dim=16, device="cpu"
    )
    assert math.isnan(found["hopper_forward"][0])
    assert "CUDA tensors only" in found["hopper_forward"][1]


@pytest.mark.gpu
def test_an_ablation_is_verified_and_timed():
    names = ablations.ablation_names(["turns=0"])
    for row in measure(ON_GPU, names, budget_s=0.05):
        assert row.timing.ms > 0, row.timing.reason
        assert row.errors["out"]["max"] > 0
