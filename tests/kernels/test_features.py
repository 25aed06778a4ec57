"""Softcap, sinks, dropout and value head dims of the portable kernel, at the operator."""

from __future__ import annotations

import pytest
import torch

from hf_attn_backends import witness
from hf_attn_backends.errors import CallRefusedError
from hf_attn_backends.gate.dropout import kept_weights
from hf_attn_backends.kernels.ops import triton_attention, triton_attention_with_lse
from hf_attn_backends.kernels.visibility import CAUSAL, FULL, Visibility
from hf_attn_backends.reference import attention_reference


def agree(leaves, visibility, seed=None, **options):
    """Out, lse and every gradient with the oracle's."""
    query, key, value = leaves[:3]
    wanted = leaves if options.get("sinks") is not None else leaves[:3]
    out, lse = triton_attention_with_lse(query, key, value, visibility, seed=seed, **options)
    if seed is not None:
        shape = (*query.shape[:3], key.shape[2])
        options["kept"] = kept_weights(int(seed), shape, options["dropout_p"], query.device)
    exact, exact_lse = attention_reference(query, key, value, visibility=visibility, **options)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(out.device)
    got = torch.autograd.grad(out, wanted, weight)
    want = torch.autograd.grad(exact, wanted, weight.double())
    for name, one, two in zip(("dq", "dk", "dv", "dsinks"), got, want, strict=False):
        torch.testing.assert_close(
            one, two, rtol=1e-4, atol=3e-5, msg=lambda m, n=name: f"{n}: {m}"
        )
    return out


def test_everything_at_once(draw, kernel_device):
    leaves = draw(b=2, m=37, n=45, d=24, e=40)
    seed = torch.tensor([2**61 + 12345], device=kernel_device)
    window = Visibility(causal=True, window=9)
    agree(leaves, window, seed, softcap=1.5, sinks=leaves[3], dropout_p=0.3)


@pytest.mark.parametrize("softcap", [1e-3, 0.5, 50.0, 1e4])
def test_softcaps_from_saturated_to_hardly_there(draw, softcap):
    agree(draw(), CAUSAL, softcap=softcap)


def test_a_softcap_of_large_scores_does_not_overflow(draw):
    query, key, value, _ = draw(grad=False)
    out = triton_attention(query * 1e4, key * 1e4, value, FULL, softcap=30.0)
    want, _ = attention_reference(query * 1e4, key * 1e4, value, softcap=30.0)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)


def test_a_row_that_sees_only_its_sink(draw, kernel_device):
    leaves = draw()
    intervals = torch.tensor([[0, 9]] * 21, dtype=torch.int32, device=kernel_device)[None]
    intervals[:, 3:17] = 0
    visibility = Visibility(intervals=intervals)
    out = agree(leaves, visibility, sinks=leaves[3])
    assert (out[:, :, 3:17] == 0).all()
    _, lse = triton_attention_with_lse(*leaves[:3], visibility, sinks=leaves[3])
    torch.testing.assert_close(lse[0, :, 3], leaves[3].detach())


def test_a_sink_of_minus_infinity_is_none(draw, kernel_device):
    query, key, value, sinks = draw()
    intervals = torch.tensor([[0, 9]] * 20 + [[0, 0]], dtype=torch.int32, device=kernel_device)[
        None
    ]
    visibility = Visibility(intervals=intervals)
    none = torch.full_like(sinks, float("-inf")).requires_grad_()
    leaves = (query, key, value, none)
    out, lse = triton_attention_with_lse(query, key, value, visibility, sinks=none)
    plain, plain_lse = triton_attention_with_lse(query, key, value, visibility)
    torch.testing.assert_close(out, plain)
    torch.testing.assert_close(lse, plain_lse)
    *grads, dsinks = torch.autograd.grad(out.sum(), leaves)
    for one, two in zip(grads, torch.autograd.grad(plain.sum(), leaves[:3]), strict=True):
        torch.testing.assert_close(one, two)
    assert (dsinks == 0).all()


def test_only_the_sinks_want_a_gradient(draw):
    query, key, value, sinks = draw(grad=False)
    whole = draw()
    want = torch.autograd.grad(
        triton_attention(*whole[:3], CAUSAL, sinks=whole[3]).sum(), whole[3]
    )[0]
    sinks.requires_grad_()
    out = triton_attention(query, key, value, CAUSAL, sinks=sinks)
    assert torch.equal(torch.autograd.grad(out.sum(), sinks)[0], want)


def test_sinks_in_another_dtype_get_their_gradient_in_it(draw):
    query, key, value, sinks = draw(dtype=torch.float16)
    sinks = sinks.detach().bfloat16().requires_grad_()
    triton_attention(query, key, value, CAUSAL, sinks=sinks).sum().backward()
    assert sinks.grad is not None
    assert sinks.grad.dtype == torch.bfloat16
    assert (sinks.grad != 0).all()


@pytest.mark.parametrize(("d", "e"), [(48, 32), (16, 40), (20, 17), (64, 16)])
def test_value_head_dims(draw, d, e):
    out = agree(draw(d=d, e=e), CAUSAL)
    assert out.shape[-1] == e
    assert out.transpose(1, 2).is_contiguous()


def test_a_value_head_dim_out_of_range_is_refused(draw):
    with pytest.raises(CallRefusedError, match=r"value head_dim must be 16 to 256, got .* 8"):
        triton_attention(*draw(e=8)[:3], CAUSAL)


def test_the_hopper_variant_refuses_features_by_name(draw):
    leaves = draw()
    with pytest.raises(CallRefusedError, match=r"does not implement sinks, softcap|needs a CUDA"):
        triton_attention(*leaves[:3], CAUSAL, sinks=leaves[3], softcap=2.0, variant="hopper")


def test_the_witness_names_the_features(draw):
    *leaves, sinks = draw(e=24)
    before = witness.snapshot()
    triton_attention(*leaves, CAUSAL, sinks=sinks, softcap=2.0, dropout_p=0.1).sum().backward()
    assert {(k.phase, k.call_class) for k in witness.since(before)} == {
        (phase, "float32/d16/causal+dropout+sinks+softcap+value_dim")
        for phase in ("forward", "backward")
    }


def test_compiles_whole_with_every_feature(draw):
    *leaves, sinks = draw(e=24)

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=False)
    def step(query, key, value, sinks):
        return triton_attention(
            query * 1.0, key, value, CAUSAL, sinks=sinks, softcap=2.0, dropout_p=0.5
        )

    first, second = step(*leaves, sinks), step(*leaves, sinks)
    assert not torch.equal(first, second)  # the seed is no constant of the graph
    torch.manual_seed(6)
    compiled = torch.autograd.grad(step(*leaves, sinks).sum(), (*leaves, sinks))
    torch.manual_seed(6)
    eager = triton_attention(*leaves, CAUSAL, sinks=sinks, softcap=2.0, dropout_p=0.5)
    for one, two in zip(compiled, torch.autograd.grad(eager.sum(), (*leaves, sinks)), strict=True):
        assert torch.equal(one, two)


def test_fakes_tell_the_truth(draw, kernel_device):
    *tensors, sinks = draw(e=24, grad=False)
    seed = torch.tensor([9], device=kernel_device)
    scalars = (None, None, 0.2, True, 0, "triton_fa2", "triton")
    extras = (sinks, seed, 2.0, 0.1)
    torch.library.opcheck(
        torch.ops.hf_attn_backends.attention_forward.default,
        (*tensors, *scalars, *extras),
        test_utils=("test_schema", "test_faketensor"),
    )
    out, lse = torch.ops.hf_attn_backends.attention_forward(*tensors, *scalars, *extras)
    torch.library.opcheck(
        torch.ops.hf_attn_backends.attention_backward.default,
        (out, *tensors, out, lse, *scalars, True, True, *extras),
        test_utils=("test_schema", "test_faketensor"),
    )
