"""On the device that was pinned: the baseline is reproduced within a factor of two."""

from __future__ import annotations

import math

import pytest
import torch

from hf_attn_backends.bench import benchmark_backends, load_baseline, verdict
from hf_attn_backends.bench.arms import SDPA_KERNELS
from hf_attn_backends.bench.baselines import LENGTHS, WORKLOAD, baseline_path

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def baseline():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    name = torch.cuda.get_device_name()
    if not baseline_path(name).exists():
        pytest.skip(f"no baseline is pinned for {name}; the pinned numbers are another device's")
    return load_baseline("cuda")


@pytest.mark.parametrize("length", LENGTHS)
def test_the_pinned_times_are_reproduced(baseline, length):
    measured = benchmark_backends(
        SDPA_KERNELS, batch=WORKLOAD["batch"], seq_len=length, device="cuda"
    )
    for kernel, pinned_ms in baseline.median_ms[str(length)].items():
        judged = verdict(measured[kernel], pinned_ms)
        if judged.kind == "nan->value" and torch.__version__ != baseline.torch:
            continue  # a newer torch that can do more has its own verdict, and is no failure
        assert judged.kind == "ok", f"{kernel} at {length}: {judged}"


def test_triton_fa2_is_timed_beside_sdpa():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    found = benchmark_backends(["FLASH_ATTENTION", "triton_fa2"], seq_len=1024, device="cuda")
    assert not any(math.isnan(ms) for ms in found.values()), found
    assert found["triton_fa2"] < 3 * found["FLASH_ATTENTION"]
