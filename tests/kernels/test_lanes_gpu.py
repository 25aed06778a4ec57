"""Lanes: the same results as the launches that they stand for, in every variant."""

import threading

import pytest
import torch

from hf_attn_backends.kernels import counted
from hf_attn_backends.kernels.ops import triton_attention, triton_attention_with_lse
from hf_attn_backends.kernels.visibility import CAUSAL, FULL, Visibility

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _no_lanes(monkeypatch):
    monkeypatch.setattr(counted, "_lanes", {})


def needs_hopper(variant="hopper"):
    if variant == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the hopper variant is for capability 9.0")


def draw(m, n, batch=2):
    return [
        torch.randn(batch, length, heads, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        for heads, length in ((8, m), (2, n), (2, n))
    ]


def rows(batch, m, n):
    found = torch.zeros(batch, m, 2, dtype=torch.int32, device="cuda")
    found[..., 1] = torch.randint(0, n + 1, (batch, m), device="cuda")
    return Visibility(intervals=found)


SCALARS = {"full": FULL, "causal": CAUSAL, "window": Visibility(causal=True, window=40)}
CASES = [
    (variant, kind)
    for variant in ("hopper", "triton", "decode")
    for kind in ("full", "causal", "window", "intervals", "dense")
    if kind != "dense" or variant == "triton"
]


@pytest.mark.parametrize(("variant", "kind"), CASES)
def test_other_values_of_one_layout(variant, kind):
    needs_hopper(variant)
    m = 1 if variant == "decode" else 200

    def visibility():
        if kind == "dense":
            return Visibility(dense=torch.rand(2, 1, m, 300, device="cuda") > 0.4)
        return SCALARS.get(kind) or rows(2, m, 300)

    calls = [(draw(m, 300), visibility()) for _ in range(4)]
    got = [triton_attention_with_lse(*tensors, vis, variant=variant) for tensors, vis in calls]
    (lane,) = counted._lanes.values()
    assert lane.variant == variant
    assert lane.launch.__name__ == "launch"  # bound, and no call of the plain launch
    for (tensors, vis), (out, lse) in zip(calls, got, strict=True):
        counted._lanes.clear()
        want = triton_attention_with_lse(*tensors, vis, variant=variant)
        assert torch.equal(out, want[0])
        assert torch.equal(lse, want[1])
        assert out.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("variant", ["hopper", "triton", "decode"])
def test_a_thread_that_never_called_cuda(variant):
    """Its memory comes out of the cache, so that the launch is the first that needs a context."""
    needs_hopper(variant)
    m = 1 if variant == "decode" else 200
    tensors, found = draw(m, 300), []
    want = [triton_attention(*tensors, CAUSAL, variant=variant) for _ in range(3)][-1].clone()
    torch.cuda.synchronize()
    thread = threading.Thread(
        target=lambda: found.append(triton_attention(*tensors, CAUSAL, variant=variant))
    )
    thread.start()
    thread.join()
    assert torch.equal(found[0], want)


def test_intervals_for_every_sample_and_for_each():
    needs_hopper()
    tensors = draw(150, 150)
    for batch in (1, 2) * 4:
        visibility = rows(batch, 150, 150)
        out = triton_attention(*tensors, visibility, variant="hopper")
        counted._lanes, kept = {}, counted._lanes
        want = triton_attention(*tensors, visibility, variant="hopper")
        counted._lanes = kept
        assert torch.equal(out, want)


def test_gradients_through_a_lane():
    needs_hopper()
    leaves = [tensor.requires_grad_() for tensor in draw(130, 130)]
    runs = [
        torch.autograd.grad(triton_attention(*leaves, CAUSAL, variant="hopper").sum(), leaves[1:])
        for _ in range(4)
    ]
    for one, two in zip(runs[0], runs[-1], strict=True):
        assert torch.equal(one, two)  # dK and dV are deterministic


def test_a_captured_graph():
    needs_hopper()
    tensors = draw(256, 256)
    for _ in range(3):
        triton_attention(*tensors, CAUSAL, variant="hopper")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = triton_attention(*tensors, CAUSAL, variant="hopper")
    tensors[0].copy_(torch.randn_like(tensors[0]))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, triton_attention(*tensors, CAUSAL, variant="hopper"))
