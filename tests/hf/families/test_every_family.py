"""Every family of the table under `triton_fa2`, in fp32 on the CPU and in bf16 on a GPU."""

from __future__ import annotations

import pytest
import torch
from family_check import measure, refusal_of
from family_configs import CPU, GPU
from family_inputs import CASES
from family_table import FAMILIES, REFUSALS


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", FAMILIES)
def test_in_float32(covered_home, kernel_device, monkeypatch, name, case):
    covered_home(CPU, "float32", kernel_device, monkeypatch)
    assert not measure(FAMILIES[name], case, CPU, device=kernel_device).problems


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", FAMILIES)
def test_in_bfloat16(covered_home, monkeypatch, name, case):
    covered_home(GPU, "bfloat16", "cuda", monkeypatch)
    assert not measure(FAMILIES[name], case, GPU, torch.bfloat16, "cuda").problems


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_with_the_reason(covered_home, monkeypatch, name):
    covered_home(CPU, "float32", "cpu", monkeypatch)
    assert refusal_of(REFUSALS[name])
