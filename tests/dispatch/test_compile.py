"""Under torch.compile(fullgraph=True): no graph break, equal numbers, true counts."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hf_attn_backends import witness
from hf_attn_backends.dispatch import ATTN_BACKEND, attention, attn_backend, run_call
from hf_attn_backends.errors import CallRefusedError
from hf_attn_backends.kernels.visibility import CAUSAL

FUNCTIONS = {
    "sdpa": lambda q, k, v: attention(q, k, v, is_causal=True, backend="sdpa"),
    "eager window": lambda q, k, v: attention(q, k, v, is_causal=True, window=3, backend="eager"),
    "enum": lambda q, k, v: attention(q, k, v, backend=ATTN_BACKEND.EAGER),
    "default": lambda q, k, v: attention(q, k, v, is_causal=True),
    "substituted": lambda q, k, v: attention(q, k, v, is_causal=True, softcap=3.0),
    "model": lambda q, k, v: run_call("sdpa", q, k, v, CAUSAL, scale=0.2),
    "auto model": lambda q, k, v: run_call("auto", q, k, v, CAUSAL, scale=None),
    "mask": lambda q, k, v: attention(
        q, k, v, attn_mask=torch.ones(q.shape[2], k.shape[2]).tril().bool(), backend="sdpa"
    ),
}


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    witness.reset()
    yield
    torch._dynamo.reset()
    witness.reset()


def make(q_len, k_len):
    shapes = [(1, 4, q_len, 16), (1, 2, k_len, 16), (1, 2, k_len, 16)]
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def phases():
    return {(n.backend, n.phase): c for n, c in witness.snapshot().items()}


@pytest.mark.parametrize(
    ("name", "dynamic"), [*((name, None) for name in FUNCTIONS), ("sdpa", True)]
)
def test_no_graph_break_same_numbers_true_counts(name, dynamic):
    function = FUNCTIONS[name]
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    lengths = [(5, 5), (7, 7)] if name == "sdpa" else [(3, 9)]
    expected = []
    for q_len, k_len in lengths:
        torch.manual_seed(q_len)
        leaves = make(q_len, k_len)
        out = function(*leaves)
        expected.append((out, torch.autograd.grad(out.sum(), leaves)))
    eager_counts, eager_substitutions = phases(), witness.substitutions()
    witness.reset()
    for (q_len, k_len), (out, grads) in zip(lengths, expected, strict=True):
        torch.manual_seed(q_len)
        leaves = make(q_len, k_len)
        mine = compiled(*leaves)
        assert torch.allclose(mine, out, atol=1e-5)
        for got, want in zip(torch.autograd.grad(mine.sum(), leaves), grads, strict=True):
            assert torch.allclose(got, want, atol=1e-5)
    assert phases() == eager_counts
    assert witness.substitutions() == eager_substitutions


def test_counts_grow_with_each_run_of_one_graph_and_backward_with_each_backward():
    compiled = torch.compile(FUNCTIONS["sdpa"], backend="aot_eager", fullgraph=True)
    leaves = make(4, 4)
    for run in range(5):
        out = compiled(*leaves)
        if run >= 3:
            out.sum().backward()
    assert phases() == {("sdpa", "forward"): 5, ("sdpa", "backward"): 2}


def test_recomputation_inside_a_graph_is_counted():
    def layer(q, k, v):
        return checkpoint(lambda *t: FUNCTIONS["sdpa"](*t).sin(), q, k, v, use_reentrant=False)

    torch.compile(layer, backend="aot_eager", fullgraph=True)(*make(4, 4)).sum().backward()
    assert phases() == {("sdpa", "forward"): 2, ("sdpa", "backward"): 1}


def test_a_context_is_guarded():
    compiled = torch.compile(FUNCTIONS["default"], backend="eager", fullgraph=True)
    leaves = make(4, 4)
    compiled(*leaves)
    with attn_backend("eager"):
        compiled(*leaves)
        with attn_backend("sdpa"):
            compiled(*leaves)
        compiled(*leaves)
    compiled(*leaves)
    assert phases() == {("sdpa", "forward"): 3, ("eager", "forward"): 2}


def test_a_refusal_is_the_same_error_without_fullgraph_and_readable_with_it():
    def refused(q, k, v):
        return attention(q, k, v, softcap=2.0, backend="sdpa")

    with pytest.raises(CallRefusedError, match="Explicitly-set backend 'sdpa' cannot serve"):
        torch.compile(refused, backend="eager")(*make(4, 4))
    torch._dynamo.reset()
    with pytest.raises(Exception, match="does not implement softcap"):
        torch.compile(refused, backend="eager", fullgraph=True)(*make(4, 4))
