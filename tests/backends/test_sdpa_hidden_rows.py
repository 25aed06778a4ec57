"""A row that sees nothing is 0 in SDPA's output and gradients, whatever kernel PyTorch chose."""

from __future__ import annotations

import pytest
import torch

from hf_attn_backends import attention
from hf_attn_backends.backends import sdpa
from hf_attn_backends.reference import attention_reference


@pytest.fixture
def mean_for_hidden_rows(monkeypatch):
    """What CUDNN does on an H200: a hidden row gets the mean value."""

    def kernel(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa):
        seen = attn_mask | ~attn_mask.any(-1, keepdim=True)
        scores = (query @ key.transpose(2, 3)) * (scale or query.shape[-1] ** -0.5)
        lowest = torch.where(attn_mask.any(-1, keepdim=True), scores, torch.zeros_like(scores))
        return lowest.masked_fill(~seen, -torch.inf).softmax(-1) @ value

    monkeypatch.setattr(sdpa.F, "scaled_dot_product_attention", kernel)


def test_hidden_rows_take_no_part(mean_for_hidden_rows):
    query, key, value = (torch.randn(2, 3, 7, 8, requires_grad=True) for _ in range(3))
    mask = torch.rand(2, 1, 7, 7) > 0.4
    mask[:, :, 2] = False
    out = attention(query, key, value, attn_mask=mask, backend="sdpa")
    assert float(out[:, :, 2].abs().max()) == 0.0
    weights = torch.randn_like(out)
    grads = torch.autograd.grad((out * weights).sum(), (query, key, value))
    exact = [t.detach().double().requires_grad_() for t in (query, key, value)]
    want, _ = attention_reference(*exact, attn_mask=mask)
    wanted = torch.autograd.grad((want * weights.double()).sum(), exact)
    for mine, true in zip((out, *grads), (want, *wanted), strict=True):
        torch.testing.assert_close(mine.double(), true, rtol=1e-5, atol=1e-5)
