"""What the sm_90 variant refuses, and that each reason is named."""

from __future__ import annotations

import pytest
import torch

from hf_attn_backends.errors import CallRefusedError
from hf_attn_backends.kernels.hopper import limits
from hf_attn_backends.kernels.hopper.forward import launch_forward, refusals
from hf_attn_backends.kernels.visibility import CAUSAL, FULL, Visibility


def qkv(m=5, n=7, d=64, dtype=torch.bfloat16):
    return [torch.zeros(2, h, s, d, dtype=dtype) for h, s in ((4, m), (2, n), (2, n))]


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(limits, "environment_refusals", lambda device: [])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(
    "visibility",
    [FULL, CAUSAL, Visibility(causal=True, window=3), Visibility(intervals=torch.zeros(2, 5, 2))],
)
def test_the_fast_classes_are_served(hopper, dtype, d, visibility):
    assert refusals(*qkv(d=d, dtype=dtype), visibility, 0.1) == []


def test_both_memory_orders_are_served(hopper):
    q, k, v = (
        torch.zeros(2, s, h, 64).bfloat16().transpose(1, 2) for s, h in ((5, 4), (7, 2), (7, 2))
    )
    assert refusals(q, k, v, FULL) == []
    packed = torch.zeros(2, 5, 8, 64).bfloat16().transpose(1, 2)
    assert refusals(packed[:, :4], packed[:, 4:6], packed[:, 6:], FULL) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda q, k, v: (q.float(), k.float(), v.float()), "dtype must be"),
        (lambda q, k, v: (q[..., :32], k[..., :32], v[..., :32]), "head_dim must be"),
        (lambda q, k, v: (q, k, v[..., :32]), "head_dim must be"),
        (lambda q, k, v: (q.mT.contiguous().mT, k, v), "query must be contiguous"),
        (lambda q, k, v: (q, k[:, :1].expand(2, 2, 7, 64), v), "key must have strides"),
        (lambda q, k, v: (q, k, q.new_zeros(2, 2, 7, 68)[..., :64]), "value must have str"),
        (lambda q, k, v: (torch.zeros(2 * 4 * 5 * 64 + 1).bfloat16()[1:].view(2, 4, 5, 64), k, v),
         "query must begin"),
    ],
)  # fmt: skip
def test_what_the_copy_engine_cannot_read_is_refused(hopper, change, words):
    found = refusals(*change(*qkv()), FULL)
    assert any(reason.startswith(words) for reason in found)


def test_a_dimension_of_one_element_may_have_any_stride(hopper):
    q = torch.zeros(64 * 9).bfloat16().as_strided((1, 1, 5, 64), (3, 0, 64, 1))
    k = torch.zeros(1, 1, 7, 64).bfloat16()
    assert refusals(q, k, k, FULL) == []
    assert limits.safe_strides(q) == [64, 64, 64, 1]


def test_dense_masks_and_scales_are_refused(hopper):
    dense = Visibility(dense=torch.ones(1, 1, 5, 7, dtype=torch.bool))
    assert "got dense" in refusals(*qkv(), dense)[0]
    assert "scale" in refusals(*qkv(), FULL, 0.0)[0]
    assert "scale" in refusals(*qkv(), FULL, -1.0)[0]


def test_without_a_hopper_device_every_reason_is_named():
    q, k, v = qkv(dtype=torch.float32)
    with pytest.raises(CallRefusedError) as caught:
        launch_forward(q, k, v, FULL, -1.0)
    assert len(caught.value.args[0].splitlines()) >= 4
    for words in ("CUDA device", "dtype", "scale"):
        assert words in str(caught.value)


def test_other_triton_versions_are_refused(monkeypatch):
    monkeypatch.setattr(limits.triton, "__version__", "3.7.1")
    assert "3.7.1" in limits.environment_refusals(torch.device("cpu"))[0]
