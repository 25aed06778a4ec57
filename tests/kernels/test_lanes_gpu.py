"""Lanes of the hopper variant: the same results as the launch that they stand for."""

import pytest
import torch

from hf_attn_backends.kernels import counted
from hf_attn_backends.kernels.ops import triton_attention, triton_attention_with_lse
from hf_attn_backends.kernels.visibility import CAUSAL, FULL, Visibility

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _hopper(monkeypatch):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the hopper variant is for capability 9.0")
    monkeypatch.setattr(counted, "_lanes", {})


def draw(m, n, batch=2):
    return [
        torch.randn(batch, length, heads, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        for heads, length in ((8, m), (2, n), (2, n))
    ]


def rows(batch, m, n):
    found = torch.zeros(batch, m, 2, dtype=torch.int32, device="cuda")
    found[..., 1] = torch.randint(0, n + 1, (batch, m), device="cuda")
    return Visibility(intervals=found)


@pytest.mark.parametrize("kind", ["full", "causal", "window", "intervals"])
def test_other_values_of_one_layout(kind):
    scalars = {"full": FULL, "causal": CAUSAL, "window": Visibility(causal=True, window=40)}
    calls = [(draw(200, 300), scalars.get(kind) or rows(2, 200, 300)) for _ in range(3)]
    got = [triton_attention_with_lse(*tensors, vis, variant="hopper") for tensors, vis in calls]
    assert len(counted._lanes) == 1
    for (tensors, vis), (out, lse) in zip(calls, got, strict=True):
        counted._lanes.clear()
        want = triton_attention_with_lse(*tensors, vis, variant="hopper")
        assert torch.equal(out, want[0])
        assert torch.equal(lse, want[1])
        assert out.transpose(1, 2).is_contiguous()


def test_intervals_for_every_sample_and_for_each():
    tensors = draw(150, 150)
    for batch in (1, 2, 1, 2):
        visibility = rows(batch, 150, 150)
        out = triton_attention(*tensors, visibility, variant="hopper")
        counted._lanes, kept = {}, counted._lanes
        want = triton_attention(*tensors, visibility, variant="hopper")
        counted._lanes = kept
        assert torch.equal(out, want)


def test_gradients_through_a_lane():
    leaves = [tensor.requires_grad_() for tensor in draw(130, 130)]
    runs = [
        torch.autograd.grad(triton_attention(*leaves, CAUSAL, variant="hopper").sum(), leaves[1:])
        for _ in range(2)
    ]
    for one, two in zip(*runs, strict=True):
        assert torch.equal(one, two)  # dK and dV are deterministic


def test_a_captured_graph():
    tensors = draw(256, 256)
    for _ in range(2):
        triton_attention(*tensors, CAUSAL, variant="hopper")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = triton_attention(*tensors, CAUSAL, variant="hopper")
    tensors[0].copy_(torch.randn_like(tensors[0]))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, triton_attention(*tensors, CAUSAL, variant="hopper"))
