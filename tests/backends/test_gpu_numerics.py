"""On a GPU: FLASH, CUDNN, EFFICIENT, MATH, flex, triton and flash-attn against the fp64 oracle.

The budgets are the gate's: twice SDPA's own error in the same dtype plus one rounding band, in the
largest and in the root-mean-square error.
"""

from __future__ import annotations

import contextlib
from importlib.util import find_spec

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf_attn_backends import gate, witness
from hf_attn_backends.backends import backend_of
from hf_attn_backends.backends.masks import visibility_of
from hf_attn_backends.backends.planning import reasons_against
from hf_attn_backends.call import AttentionCall, dtype_name
from hf_attn_backends.dispatch import attention
from hf_attn_backends.gate.budgets import error_of, yardstick
from hf_attn_backends.gate.inputs import Inputs
from hf_attn_backends.kernels.visibility import KINDS

pytestmark = pytest.mark.gpu

B, H, G, D = 2, 6, 2, 64


def make(dtype, q_len=130, k_len=130, heads=H, groups=G):
    return [
        torch.randn(B, n, rows, D, device="cuda").to(dtype).transpose(1, 2).requires_grad_()
        for rows, n in ((heads, q_len), (groups, k_len), (groups, k_len))
    ]


def options_of(kind, q_len, k_len):
    if kind == "intervals":
        first = torch.randint(0, k_len, (B, q_len), device="cuda")
        end = torch.minimum(first + torch.randint(0, k_len, (B, q_len), device="cuda"),
                            torch.tensor(k_len, device="cuda"))  # fmt: skip
        return {"attn_mask": torch.stack([first, end], -1).int()}
    if kind == "dense":
        mask = torch.rand(B, 1, q_len, k_len, device="cuda") > 0.4
        mask[:, :, :5] = False  # rows that see nothing
        return {"attn_mask": mask}
    return {
        "full": {},
        "causal": {"is_causal": True},
        "window": {"is_causal": True, "window": 40},
    }[kind]


def compare(name, leaves, options, around=contextlib.nullcontext, gradients=True):
    """Assert that out and gradients are within budget, and that `name` is what ran."""
    witness.reset()
    with around(), torch.set_grad_enabled(gradients):
        out = attention(*leaves, backend=name, **options)
        weights = torch.randn_like(out)
        grads = torch.autograd.grad((out * weights).sum(), leaves) if gradients else ()
    torch.cuda.synchronize()
    assert {launch.backend for launch in witness.snapshot()} == {name}
    plain = [leaf.detach() for leaf in leaves]
    mask = visibility_of(
        *plain[:2], options.get("attn_mask"), options.get("is_causal", False), options.get("window")
    )
    features = {name: options[name] for name in ("softcap", "sinks") if name in options}
    stick = yardstick(Inputs(*plain, weights, mask, D**-0.5, **features))
    for tensor, mine in zip(("out", "dq", "dk", "dv"), (out, *grads), strict=False):
        assert torch.isfinite(mine).all(), f"{name} {tensor} is not finite"
        error = error_of(mine.detach(), getattr(stick.exact, tensor))
        for metric, allowed in stick.budgets.items():
            if metric[0] == tensor:
                found = error[metric[1]]
                assert found <= allowed, f"{name} {metric}: error {found:.2e} over {allowed:.2e}"


SDPA_KERNELS = [
    ("FLASH_ATTENTION", "full"), ("FLASH_ATTENTION", "causal"),
    ("CUDNN_ATTENTION", "full"), ("CUDNN_ATTENTION", "causal"), ("CUDNN_ATTENTION", "dense"),
    ("EFFICIENT_ATTENTION", "dense"), ("EFFICIENT_ATTENTION", "window"),
    ("MATH", "full"), ("MATH", "causal"), ("MATH", "window"), ("MATH", "dense"),
    ("MATH", "intervals"),
]  # fmt: skip


@pytest.mark.parametrize(("kernel", "kind"), SDPA_KERNELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_each_of_sdpas_kernels(kernel, kind, dtype):
    compare(
        "sdpa", make(dtype), options_of(kind, 130, 130),
        lambda: sdpa_kernel(getattr(SDPBackend, kernel)),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("lengths", [(130, 130), (65, 193), (1, 77), (193, 65)])
@pytest.mark.parametrize("kind", KINDS)
def test_sdpa_by_pytorchs_own_choice(kind, lengths, dtype):
    compare("sdpa", make(dtype, *lengths), options_of(kind, *lengths))


@pytest.mark.parametrize("kind", KINDS)
def test_flex_compiled(kind):
    compare("flex_attention", make(torch.bfloat16), options_of(kind, 130, 130))


@pytest.mark.parametrize("lengths", [(65, 193), (193, 65)])
def test_flex_with_other_lengths_softcap_and_sinks(lengths):
    options = options_of("causal", *lengths)
    more = {"softcap": 2.0, "sinks": torch.randn(H, device="cuda").bfloat16()}
    compare("flex_attention", make(torch.bfloat16, *lengths), {**options, **more})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_triton_fa2(kind, dtype, home):
    gate.write_equivalence_gate(
        tolerances={}, shapes_covered=[], device="cuda",
        coverage=[f"{dtype_name(dtype)}/d{D}/{kind}"],
    )  # fmt: skip
    compare("triton_fa2", make(dtype), options_of(kind, 130, 130))


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3"])
@pytest.mark.parametrize("lengths", [(130, 130), (65, 193), (193, 65)])
@pytest.mark.parametrize("kind", ["full", "causal", "window"])
def test_flash_attn_where_it_is_installed(name, kind, lengths, gradients):
    leaves, options = make(torch.bfloat16, *lengths), options_of(kind, *lengths)
    call = AttentionCall.of(*leaves, **options)
    reasons = reasons_against(backend_of(name), call)
    if reasons:
        pytest.skip(reasons[0])
    if gradients and name == "flash_attention_3" and find_spec("fa3_fwd") is not None:
        pytest.skip("the build fa3-fwd of FlashAttention-3 has no backward pass")
    compare(name, leaves, options, gradients=gradients)


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_rows_that_see_nothing_are_zero(name):
    leaves = make(torch.bfloat16)
    options = options_of("dense", 130, 130)
    out = attention(*leaves, backend=name, **options)
    assert (out[:, :, :5] == 0).all()
    out.sum().backward()
    assert (leaves[0].grad[:, :, :5] == 0).all()
    assert all(torch.isfinite(leaf.grad).all() for leaf in leaves)
