"""The oracle against hand-worked numbers and, in fp64, against torch's own attention."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from hf_attn_backends.kernels.visibility import CAUSAL, Visibility
from hf_attn_backends.reference import (
    attention_reference,
    attention_reference_grads,
    visible_keys,
)

INF = float("inf")


def tensors(b=2, h=6, g=2, m=5, n=7, d=4, dtype=torch.float64):
    q, k, v = torch.randn(b, h, m, d), torch.randn(b, g, n, d), torch.randn(b, g, n, d)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def rows(seen):
    return ["".join("1" if key else "." for key in row) for row in seen[0, 0].tolist()]


def test_two_keys_by_hand():
    """Scores 0 and ln 3 after the scale: weights 1/4 and 3/4, denominator 4."""
    q = torch.tensor([[[[2.0]]]])
    k = torch.tensor([[[[0.0], [math.log(3.0)]]]])
    v = torch.tensor([[[[8.0, 0.0], [0.0, 4.0]]]])
    out, lse = attention_reference(q, k, v, scale=0.5)
    assert out.flatten().tolist() == pytest.approx([2.0, 3.0], abs=1e-6)
    assert lse.item() == pytest.approx(math.log(4.0), abs=1e-7)


def test_softcap_sinks_and_bias_by_hand():
    q, k = torch.tensor([[[[1.0]]]]), torch.tensor([[[[50.0], [50.0]]]])
    v = torch.tensor([[[[1.0], [3.0]]]])
    out, lse = attention_reference(
        q, k, v, scale=1.0, softcap=1e-9, sinks=torch.tensor([math.log(2.0)]),
        bias=torch.tensor([0.0, math.log(5.0)]),
    )  # fmt: skip
    # Capped scores are 0: weights 1 and 5, the sink 2.
    assert out.item() == pytest.approx((1 + 15) / 8, abs=1e-6)
    assert lse.item() == pytest.approx(math.log(8.0), abs=1e-6)


@pytest.mark.parametrize(
    ("m", "n", "arguments", "want"),
    [
        (2, 4, {"is_causal": True}, ["111.", "1111"]),
        (4, 2, {"is_causal": True}, ["..", "..", "1.", "11"]),
        (3, 3, {"is_causal": True, "window": 1}, ["1..", ".1.", "..1"]),
        (3, 5, {"is_causal": True, "window": 2}, [".11..", "..11.", "...11"]),
        (2, 3, {}, ["111", "111"]),
        (2, 3, {"attn_mask": torch.tensor([[[1, 3], [2, 2]]], dtype=torch.int32)}, [".11", "..."]),
        (2, 2, {"attn_mask": torch.tensor([[0.0, -INF], [torch.finfo().min, 5.0]])}, ["1.", ".1"]),
        (2, 2, {"visibility": Visibility(dense=torch.eye(2).bool()[None, None])}, ["1.", ".1"]),
        (2, 3, {"visibility": Visibility(causal=True, window=2)}, ["11.", ".11"]),
    ],
)
def test_visible_keys_by_hand(m, n, arguments, want):
    assert rows(visible_keys(1, 1, m, n, "cpu", **arguments)) == want


def test_intervals_and_masks_of_each_batch_and_head():
    intervals = torch.tensor([[[0, 1]], [[1, 3]]], dtype=torch.int32)
    seen = visible_keys(2, 2, 1, 3, "cpu", attn_mask=intervals)
    assert seen[:, 1, 0].tolist() == [[True, False, False], [False, True, True]]
    dense = torch.tensor([[[[1, 0]], [[0, 1]]]]).bool()
    assert visible_keys(2, 2, 1, 2, "cpu", attn_mask=dense)[1, :, 0].tolist() == [
        [True, False],
        [False, True],
    ]


@pytest.mark.parametrize("kind", ["full", "causal", "mask", "additive"])
def test_equals_torch_in_fp64(kind):
    q, k, v = tensors(m=7, n=7)
    mask = torch.rand(2, 1, 7, 7) > 0.4
    mask[..., 0] = True
    ours, torchs = {
        "full": ({}, {}),
        "causal": ({"is_causal": True}, {"is_causal": True}),
        "mask": ({"attn_mask": mask}, {"attn_mask": mask}),
        "additive": ({"attn_mask": mask * 2.0}, {"attn_mask": mask * 2.0}),
    }[kind]
    out, lse = attention_reference(q, k, v, scale=0.3, **ours)
    torchs = {name: x.double() if x is not True and x.is_floating_point() else x
              for name, x in torchs.items()}  # fmt: skip
    want = scaled_dot_product_attention(q, k, v, scale=0.3, enable_gqa=True, **torchs)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-13)
    assert out.dtype == lse.dtype == torch.float64


def test_grads_equal_finite_differences_and_sum_over_the_group():
    q, k, v = tensors(b=1, h=4, g=2, m=3, n=4, d=2)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradcheck(
        lambda *x: attention_reference(*x, is_causal=True, window=2)[0], leaves
    )
    grads = attention_reference_grads(q, k, v, torch.ones_like(q), visibility=CAUSAL)
    # Each row's weights sum to one, so dV sums to one for each of the 2 query heads and 3 rows.
    assert grads.dv[0, 0].sum(0).tolist() == pytest.approx([6.0, 6.0], abs=1e-12)
    assert grads.dk.shape == k.shape
    assert q.grad is None


def test_rows_that_see_nothing_are_zero_everywhere():
    q, k, v = tensors(m=4, n=2)
    grads = attention_reference_grads(q, k, v, torch.randn_like(q), is_causal=True)
    assert (grads.out[:, :, :2] == 0).all()
    assert (grads.dq[:, :, :2] == 0).all()
    assert (grads.lse[:, :, :2] == -INF).all()
    assert all(torch.isfinite(x).all() for x in (grads.out, grads.dq, grads.dk, grads.dv))
    assert (grads.out[:, :, 2] == v[:, :, 0].repeat_interleave(3, 1)).all()


def test_no_keys_at_all():
    q, k, v = tensors(m=3, n=0)
    grads = attention_reference_grads(q, k, v, torch.randn_like(q))
    assert (grads.out == 0).all()
    assert (grads.lse == -INF).all()
    assert (grads.dq == 0).all()


def test_lower_dtype_is_eager_in_that_dtype():
    q, k, v = tensors(dtype=torch.bfloat16)
    out, _ = attention_reference(q, k, v, dtype=torch.bfloat16)
    exact, _ = attention_reference(q, k, v)
    assert out.dtype == torch.bfloat16
    error = (out.double() - exact).abs().max().item()
    assert 1e-4 < error < 5e-2
