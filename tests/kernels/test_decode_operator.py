"""The operator sends few query rows to the decode kernels, and says so."""

import pytest
import torch

from hf_attn_backends import witness
from hf_attn_backends.call import CallClass
from hf_attn_backends.errors import CallRefusedError
from hf_attn_backends.gate.measure import measure_class
from hf_attn_backends.kernels.ops import triton_attention, triton_attention_with_lse
from hf_attn_backends.kernels.visibility import CAUSAL, Visibility


def draw(q_len, k_len, device, requires_grad=False):
    return [
        torch.randn(2, heads, length, 16, device=device, requires_grad=requires_grad)
        for heads, length in ((4, q_len), (2, k_len), (2, k_len))
    ]


def variants(before):
    return {(launch.variant, launch.phase) for launch in witness.since(before)}


@pytest.mark.parametrize(("q_len", "variant"), [(1, "decode"), (16, "decode"), (17, "triton")])
def test_up_to_sixteen_rows_are_decoded(q_len, variant, kernel_device):
    tensors = draw(q_len, 40, kernel_device)
    before = witness.snapshot()
    out = triton_attention(*tensors, CAUSAL)
    assert variants(before) == {(variant, "forward")}
    torch.testing.assert_close(out, triton_attention(*tensors, CAUSAL, variant="triton"))


def test_a_short_sequence_without_a_cache_is_not(kernel_device):
    before = witness.snapshot()
    triton_attention(*draw(7, 7, kernel_device), CAUSAL)
    assert variants(before) == {("triton", "forward")}


def test_dense_masks_are_not(kernel_device):
    hidden = Visibility(dense=torch.rand(1, 1, 3, 40, device=kernel_device) > 0.5)
    before = witness.snapshot()
    triton_attention(*draw(3, 40, kernel_device), hidden)
    assert variants(before) == {("triton", "forward")}


def test_asked_for_by_name_it_says_why_it_cannot_serve(kernel_device):
    with pytest.raises(CallRefusedError, match="at most 16, got q_len 17"):
        triton_attention(*draw(17, 40, kernel_device), CAUSAL, variant="decode")


def test_gradients_pass_through_its_results(make_case, check_case, kernel_device):
    """It has no backward pass of its own; the portable one continues from its lse."""
    case = make_case("window", q_len=7, k_len=70, device=kernel_device)
    leaves = [t.detach().requires_grad_() for t in (case.query, case.key, case.value)]
    before = witness.snapshot()
    out, lse = triton_attention_with_lse(
        *leaves, case.visibility, scale=case.scale, variant="decode"
    )
    grads = torch.autograd.grad(out, leaves, case.grad_out)
    assert variants(before) == {("decode", "forward"), ("triton", "backward")}
    check_case(case, (out.detach(), lse, *grads))


@pytest.mark.parametrize("kind", ["full", "intervals"])
def test_the_gate_measures_it(kind, kernel_device):
    found = measure_class(CallClass("float32", 128, kind), kernel_device)
    assert found.status == "passed", found.failures
    assert "decode/triton" in found.variants
