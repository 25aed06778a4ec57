"""The witness sees PyTorch's backends: forward, backward, checkpointing, no gradient."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hf_attn_backends import witness
from hf_attn_backends.dispatch import attention


@pytest.fixture(autouse=True)
def _fresh():
    witness.reset()
    yield
    witness.reset()


def make(grad=True):
    return [torch.randn(1, 2, 6, 16, requires_grad=grad) for _ in range(3)]


def counts():
    return {(n.backend, n.variant, n.phase): c for n, c in witness.snapshot().items()}


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_forward_and_backward_are_counted_where_they_run(name):
    out = attention(*make(), is_causal=True, backend=name)
    assert counts() == {(name, "torch", "forward"): 1}
    out.sum().backward()
    assert counts() == {(name, "torch", "forward"): 1, (name, "torch", "backward"): 1}
    classes = {launch.call_class for launch in witness.snapshot()}
    assert classes == {"float32/d16/causal"}


def test_without_a_gradient_there_is_no_backward():
    with torch.no_grad():
        attention(*make(), backend="sdpa")
    attention(*make(grad=False), backend="flex_attention")
    assert counts() == {("sdpa", "torch", "forward"): 1, ("flex_attention", "torch", "forward"): 1}


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_launches_the_forward_pass_twice(reentrant):
    out = checkpoint(
        lambda q, k, v: attention(q, k, v, backend="sdpa"), *make(), use_reentrant=reentrant
    )
    out.sum().backward()
    assert counts() == {("sdpa", "torch", "forward"): 2, ("sdpa", "torch", "backward"): 1}


def test_features_are_part_of_the_class():
    attention(*make(), softcap=2.0, sinks=torch.zeros(2), backend="eager")
    assert [n.call_class for n in witness.snapshot()] == ["float32/d16/full+sinks+softcap"]
