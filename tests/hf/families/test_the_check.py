"""The comparison can fail: faults in front of the kernel, and another attention in its place."""

from __future__ import annotations

import pytest
import torch
from family_check import measure
from family_configs import CPU, GPU
from family_table import FAMILIES

from hf_attn_backends.hf import adapter
from hf_attn_backends.kernels.visibility import Visibility


@pytest.fixture
def covered(covered_home, kernel_device, monkeypatch):
    covered_home(CPU, "float32", kernel_device, monkeypatch)
    return kernel_device


def scale(query, key, value, visibility, options):
    return query * 1.0001, key, value, visibility, options


def window(query, key, value, visibility, options):
    wider = Visibility(causal=True, window=visibility.window + 1)
    return query, key, value, wider, options


def row(query, key, value, visibility, options):
    rows = visibility.intervals.clone()
    rows[0, -1, 0] += 1  # the last real row
    return query, key, value, Visibility(intervals=rows), options


def heads(query, key, value, visibility, options):
    return query, key.flip(1), value.flip(1), visibility, options


def chunk(query, key, value, visibility, options):
    if visibility.intervals is None:
        return query, key, value, visibility, options
    rows = visibility.intervals.clone()
    rows[..., 0] = (rows[..., 0] - GPU.window // 4).clamp(min=0)
    return query, key, value, Visibility(intervals=rows), options


def wide(query, key, value, visibility, options):
    wider = Visibility(causal=True, window=visibility.window + GPU.window // 4)
    return query, key, value, wider, options


def large_sinks(query, key, value, visibility, options):
    return query, key, value, visibility, {**options, "sinks": options["sinks"] + 2}


def sinks(query, key, value, visibility, options):
    return query, key, value, visibility, {**options, "sinks": options["sinks"] * 1.001}


def softcap(query, key, value, visibility, options):
    return query, key, value, visibility, {**options, "softcap": options["softcap"] * 1.001}


FAULTS = {
    "scale": ("llama", "whole", scale), "window": ("mistral", "whole", window),
    "row": ("modernbert", "padded", row), "heads": ("qwen3", "whole", heads),
    "sinks": ("gpt_oss", "padded", sinks), "softcap": ("gemma2", "whole", softcap),
}  # fmt: skip
COARSE = {
    "window": ("mistral", "whole", wide), "heads": ("qwen3", "whole", heads),
    "chunk": ("llama4", "whole", chunk), "sinks": ("gpt_oss", "whole", large_sinks),
}  # fmt: skip


def put(monkeypatch, change):
    run_call = adapter.run_call

    def faulty(backend, query, key, value, visibility, **options):
        query, key, value, visibility, options = change(query, key, value, visibility, options)
        return run_call(backend, query, key, value, visibility, **options)

    monkeypatch.setattr(adapter, "run_call", faulty)


def check(found, share):
    assert found.share > share
    assert len(found.problems) == 1
    assert "of its budget" in found.problems[0]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(covered, monkeypatch, fault):
    name, case, change = FAULTS[fault]
    put(monkeypatch, change)
    check(measure(FAMILIES[name], case, CPU, device=covered), share=10)


@pytest.mark.gpu
@pytest.mark.parametrize("fault", COARSE)
def test_a_coarse_fault_is_seen_in_bfloat16(covered_home, monkeypatch, fault):
    name, case, change = COARSE[fault]
    covered_home(GPU, "bfloat16", "cuda", monkeypatch)
    put(monkeypatch, change)
    check(measure(FAMILIES[name], case, GPU, torch.bfloat16, "cuda"), share=1)


@pytest.mark.parametrize("other", ["eager", "sdpa"])
def test_another_attention_in_its_place_is_seen(covered, other):
    found = measure(FAMILIES["llama"], "whole", CPU, device=covered, backend=other)
    assert found.share <= 1  # its figures are good
    assert [problem.split(" of ")[0] for problem in found.problems] == [
        "forward launches", "backward launches",
    ]  # fmt: skip
