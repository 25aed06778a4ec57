"""What the sm_90 backward refuses beyond what the forward does."""

from __future__ import annotations

import pytest
import torch

from hf_attn_backends.errors import CallRefusedError
from hf_attn_backends.kernels.hopper import backward, limits
from hf_attn_backends.kernels.visibility import CAUSAL, FULL, Visibility


def qkv(m=5, n=7, d=64, dtype=torch.bfloat16):
    return [torch.zeros(2, h, s, d, dtype=dtype) for h, s in ((4, m), (2, n), (2, n))]


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(limits, "environment_refusals", lambda device: [])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("visibility", [FULL, CAUSAL, Visibility(causal=True, window=3)])
def test_the_fast_classes_are_served(hopper, dtype, d, visibility):
    assert backward.refusals(*qkv(d=d, dtype=dtype), visibility, 0.1) == []


def test_a_deterministic_request_is_refused_with_its_reason(hopper):
    torch.use_deterministic_algorithms(True)
    try:
        (reason,) = backward.refusals(*qkv(), CAUSAL)
    finally:
        torch.use_deterministic_algorithms(False)
    assert "dQ in the order of arrival" in reason


def test_a_call_whose_accumulator_outgrows_its_coordinates_is_refused(hopper):
    q, k, v = (torch.zeros(1, 1, 1, 64).bfloat16().expand(1, 1, 2**29, 64) for _ in range(3))
    assert any("below 2^29" in reason for reason in backward.refusals(q, k, v, CAUSAL))


def test_every_reason_is_named_in_the_error():
    q, k, v = qkv(d=80)
    out, lse = torch.zeros_like(q), torch.zeros(2, 4, 5)
    with pytest.raises(CallRefusedError) as caught:
        backward.launch_backward(out, q, k, v, out, lse, CAUSAL, 0.1)
    assert len(caught.value.reasons) >= 2
    assert all(reason in str(caught.value) for reason in caught.value.reasons)


def test_gradients_are_copied_only_where_16_bytes_cannot_be_read():
    grad = torch.zeros(2, 4, 5, 64, dtype=torch.bfloat16)
    assert backward._readable(grad) is grad
    for odd in (grad[..., ::2], torch.zeros(()).bfloat16().expand(2, 4, 5, 64)):
        copy = backward._readable(odd)
        assert limits.layout_refusals("grad_out", copy) == []
        assert torch.equal(copy, odd)
