"""The sm_90 backward against the oracle, on the device."""

from __future__ import annotations

import random

import pytest
import torch

from hf_attn_backends.errors import CallRefusedError
from hf_attn_backends.kernels.visibility import CAUSAL, FULL, Visibility
from hf_attn_backends.reference import attention_reference, attention_reference_grads

pytestmark = pytest.mark.gpu

CLASSES = [(dtype, dim) for dtype in (torch.bfloat16, torch.float16) for dim in (64, 128)]
LAYOUTS = ("bhsd", "bshd", "padded")
SHAPES = [(4, 2, 256, 256), (6, 2, 333, 333), (4, 1, 129, 515), (3, 3, 515, 129), (8, 2, 1, 700)]


@pytest.fixture(scope="module")
def backward():
    from hf_attn_backends.kernels.hopper import backward as module

    if module.refusals(*tensors(1, 1, 1, 8, 8, 64, torch.bfloat16, "bhsd")[:3], FULL):
        pytest.skip("needs a Hopper device and a tested Triton")
    return module


def tensors(batch, heads, kv_heads, m_len, n_len, dim, dtype, layout):
    def one(h, s):
        if layout == "bshd":
            return torch.randn(batch, s, h, dim, device="cuda", dtype=dtype).transpose(1, 2)
        if layout == "padded":
            wide = torch.randn(batch, h, s + 3, dim + 8, device="cuda", dtype=dtype)
            return wide[:, :, 1 : s + 1, :dim]
        return torch.randn(batch, h, s, dim, device="cuda", dtype=dtype)

    return one(heads, m_len), one(kv_heads, n_len), one(kv_heads, n_len), one(heads, m_len)


def random_intervals(batch, m_len, n_len):
    """Any intervals, empty and reversed ones, ends beyond the keys."""
    start = torch.randint(0, n_len, (batch, m_len), device="cuda")
    length = torch.randint(-2, n_len + 4, (batch, m_len), device="cuda")
    return torch.stack([start, start + length], -1).int()


def packed_intervals(m_len, n_len, cuts):
    """Causal inside documents, one row of batch for all."""
    last = torch.arange(m_len, device="cuda") + (n_len - m_len)
    start = torch.zeros_like(last)
    for cut in cuts:
        start = torch.where(last >= cut, cut, start)
    return torch.stack([start, last + 1], -1).clamp(0, n_len).int()[None]


def compare(backward, q, k, v, grad, visibility, scale):
    """Poison what the gradients will be allocated from, run twice, compare with the oracle."""
    out, lse = attention_reference(q, k, v, visibility=visibility, scale=scale, dtype=torch.float32)
    out = out.to(q.dtype)
    want = attention_reference_grads(
        q, k, v, grad, visibility=visibility, scale=scale, dtype=torch.float32
    )
    poison = [torch.full((q.numel() * 4,), torch.nan, device="cuda") for _ in range(2)]
    del poison
    first = backward.launch_backward(grad, q, k, v, out, lse, visibility, scale)
    again = backward.launch_backward(grad, q, k, v, out, lse, visibility, scale)
    assert all(torch.equal(one, two) for one, two in zip(first[1:], again[1:], strict=True))
    ulp = torch.finfo(q.dtype).eps
    hidden = (lse == float("-inf"))[..., None]
    for name, got, expected in zip(("dq", "dk", "dv"), first, want[2:5], strict=True):
        assert got.transpose(1, 2).is_contiguous(), name
        assert got.isfinite().all(), name
        # P and dS are rounded to the operand's dtype once, out before and the gradient after. The
        # absolute part is for gradients that cancel to rounding noise: a row that sees one key.
        error, size = (got.float() - expected).norm(), expected.norm()
        assert error <= 0.8 * ulp * size + 1e-4 * got.numel() ** 0.5, (name, error, size)
    assert (first[0].masked_fill(~hidden, 0) == 0).all()


@pytest.mark.parametrize(("dtype", "dim"), CLASSES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("heads", "kv_heads", "m_len", "n_len"), SHAPES)
def test_every_kind_matches_the_oracle(backward, dtype, dim, layout, heads, kv_heads, m_len, n_len):
    q, k, v, grad = tensors(2, heads, kv_heads, m_len, n_len, dim, dtype, layout)
    kinds = [FULL, CAUSAL, Visibility(intervals=random_intervals(2, m_len, n_len))]
    kinds += [Visibility(intervals=packed_intervals(m_len, n_len, (5, 100, 228)))]
    kinds += [Visibility(causal=True, window=w) for w in (1, 100, 128, 4000)]
    for visibility in kinds:
        compare(backward, q, k, v, grad, visibility, dim**-0.5)


def test_keys_that_nobody_sees_get_zero(backward):
    q, k, v, grad = tensors(1, 2, 2, 100, 400, 128, torch.bfloat16, "bshd")
    bounds = torch.tensor([130, 140], dtype=torch.int32, device="cuda").expand(1, 100, 2)
    visibility = Visibility(intervals=bounds)
    compare(backward, q, k, v, grad, visibility, 0.1)
    out, lse = attention_reference(q, k, v, visibility=visibility, scale=0.1, dtype=torch.float32)
    _, dk, dv = backward.launch_backward(grad, q, k, v, out.bfloat16(), lse, visibility, 0.1)
    for gradient in (dk, dv):
        assert (gradient[:, :, :130] == 0).all()
        assert (gradient[:, :, 140:] == 0).all()
        assert (gradient[:, :, 130:140] != 0).any()


def test_the_gradient_of_a_sum_and_misaligned_gradients(backward):
    q, k, v, grad = tensors(2, 4, 2, 70, 70, 64, torch.bfloat16, "bhsd")
    expanded = torch.ones((), device="cuda", dtype=torch.bfloat16).expand_as(grad)
    compare(backward, q, k, v, expanded, CAUSAL, 0.125)
    odd = torch.randn(grad.numel() + 1, device="cuda").bfloat16()[1:].view_as(grad)
    compare(backward, q, k, v, odd, CAUSAL, 0.125)


def test_wanted_gradients_only(backward):
    q, k, v, grad = tensors(1, 2, 1, 70, 70, 64, torch.float16, "bhsd")
    out, lse = attention_reference(q, k, v, is_causal=True, scale=0.125, dtype=torch.float32)
    call = (grad, q, k, v, out.half(), lse, CAUSAL, 0.125)
    assert [t.numel() > 0 for t in backward.launch_backward(*call, need_dq=False)] == [0, 1, 1]
    assert [t.numel() > 0 for t in backward.launch_backward(*call, need_dkdv=False)] == [1, 0, 0]


def test_no_keys_and_no_queries(backward):
    q, k, v, grad = tensors(2, 4, 2, 5, 9, 64, torch.bfloat16, "bhsd")
    out, lse = torch.zeros_like(q), torch.full((2, 4, 5), -torch.inf, device="cuda")
    none = k[:, :, :0], v[:, :, :0]
    dq, dk, _ = backward.launch_backward(grad, q, *none, out, lse, FULL, 1.0)
    assert (dq == 0).all()
    assert dk.shape == (2, 2, 0, 64)
    rows = [t[:, :, :0] for t in (grad, q, out, lse)]
    _, dk, dv = backward.launch_backward(rows[0], rows[1], k, v, *rows[2:], CAUSAL, 1.0)
    assert (dk == 0).all()
    assert (dv == 0).all()


def test_a_deterministic_request_is_refused(backward):
    q, k, v, grad = tensors(1, 2, 1, 70, 70, 64, torch.float16, "bhsd")
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(CallRefusedError, match="order of arrival"):
            backward.launch_backward(grad, q, k, v, q, q[..., 0].float(), CAUSAL, 0.1)
    finally:
        torch.use_deterministic_algorithms(False)


def test_lengths_batches_and_windows_do_not_recompile(backward):
    from hf_attn_backends.kernels.hopper.backward_kernels import attention_backward
    from hf_attn_backends.kernels.hopper.backward_passes import backward_finish, backward_prepare

    def compiled():
        return [
            sum(len(cache[0]) for cache in kernel.device_caches.values())
            for kernel in (attention_backward, backward_prepare, backward_finish)
        ]

    def call(batch, m_len, window, layout):
        q, k, v, grad = tensors(batch, 4, 2, m_len, m_len, 64, torch.bfloat16, layout)
        visibility = Visibility(causal=True, window=window)
        backward.launch_backward(grad, q, k, v, q, q[..., 0].float(), visibility, 0.1 + window)

    call(1, 16, 16, "bshd")
    before = compiled()
    for batch, m_len, window in ((1, 1, 1), (2, 77, 13), (3, 1024, 512), (1, 2000, 1)):
        call(batch, m_len, window, "bshd")
        call(batch, m_len, window, "padded")
    assert compiled() == before


@pytest.mark.slow
def test_random_calls(backward):
    chance = random.Random(0)
    for _ in range(300):
        dtype, dim = chance.choice(CLASSES)
        kv_heads, group = chance.randint(1, 4), chance.choice([1, 2, 3, 4, 7])
        m_len, n_len = (chance.choice([1, 7, 64, 127, 128, 129, 300, 511]) for _ in range(2))
        batch = chance.randint(1, 3)
        visibility = chance.choice(
            [
                FULL,
                CAUSAL,
                Visibility(causal=True, window=chance.choice([1, 64, 65, 200])),
                Visibility(intervals=random_intervals(batch, m_len, n_len)),
            ]
        )
        layout = chance.choice(LAYOUTS)
        q, k, v, grad = tensors(batch, kv_heads * group, kv_heads, m_len, n_len, dim, dtype, layout)
        compare(backward, q, k, v, grad, visibility, chance.choice([dim**-0.5, 0.3]))
