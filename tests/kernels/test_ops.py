"""The operator: autograd, fakes, torch.compile, refusals, and what the witness counts."""

import os
import subprocess
import sys

import pytest
import torch

from hf_attn_backends import witness
from hf_attn_backends.errors import CallRefusedError, InvalidCallError
from hf_attn_backends.kernels.ops import triton_attention, triton_attention_with_lse
from hf_attn_backends.kernels.visibility import CAUSAL, Visibility


@pytest.fixture
def leaves(make_case, kernel_device):
    case = make_case("causal", batch=1, heads=2, kv_heads=1, q_len=21, k_len=21,
                     device=kernel_device)  # fmt: skip
    return [t.detach().clone().requires_grad_() for t in (case.query, case.key, case.value)]


def test_gradients_through_autograd(leaves, make_case, check_case, kernel_device):
    case = make_case("causal", batch=1, heads=2, kv_heads=1, q_len=21, k_len=21,
                     device=kernel_device)  # fmt: skip
    case.query, case.key, case.value = leaves
    out, lse = triton_attention_with_lse(*leaves, CAUSAL)
    assert not lse.requires_grad
    grads = torch.autograd.grad(out, leaves, case.grad_out)
    check_case(case, (out.detach(), lse, *grads))


def test_only_the_wanted_gradients(leaves):
    query, key, value = leaves
    whole = torch.autograd.grad(triton_attention(*leaves, CAUSAL).sum(), leaves)
    only_q = triton_attention(query, key.detach(), value.detach(), CAUSAL)
    assert torch.equal(torch.autograd.grad(only_q.sum(), query)[0], whole[0])
    only_v = triton_attention(query.detach(), key.detach(), value, CAUSAL)
    assert torch.equal(torch.autograd.grad(only_v.sum(), value)[0], whole[2])


def test_every_launch_is_counted(leaves):
    before = witness.snapshot()
    triton_attention(*leaves, CAUSAL, backend="somebody").sum().backward()
    with torch.no_grad():
        triton_attention(*leaves, Visibility(causal=True, window=3), backend="somebody")
    counted = {(k.phase, k.call_class): n for k, n in witness.since(before).items()}
    assert counted == {
        ("forward", "float32/d32/causal"): 1,
        ("backward", "float32/d32/causal"): 1,
        ("forward", "float32/d32/window"): 1,
    }


def test_checkpointing_launches_the_forward_twice(leaves):
    from torch.utils.checkpoint import checkpoint

    before = witness.snapshot()
    checkpoint(triton_attention, *leaves, CAUSAL, use_reentrant=False).sum().backward()
    phases = {k.phase: n for k, n in witness.since(before).items()}
    assert phases == {"forward": 2, "backward": 1}


def test_compiles_whole_and_counts_at_run_time(leaves):
    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=False)
    def step(query, key, value):
        return triton_attention(query * 1.0, key, value, CAUSAL)

    eager = torch.autograd.grad(triton_attention(*leaves, CAUSAL).sum(), leaves)
    step(*leaves)
    before = witness.snapshot()
    for _ in range(3):
        compiled = torch.autograd.grad(step(*leaves).sum(), leaves)
    assert sum(witness.since(before).values()) == 6
    for a, b in zip(eager, compiled, strict=True):
        assert torch.equal(a, b)


def test_fakes_tell_the_truth(leaves, kernel_device):
    intervals = torch.tensor([[0, 9]] * 21, dtype=torch.int32, device=kernel_device)[None]
    arguments = [t.detach() for t in leaves]
    torch.library.opcheck(
        torch.ops.hf_attn_backends.attention_forward.default,
        (*arguments, intervals, None, 0.2, False, 0, "triton_fa2", "triton"),
        test_utils=("test_schema", "test_faketensor"),
    )
    out, lse = triton_attention_with_lse(*arguments, CAUSAL)
    torch.library.opcheck(
        torch.ops.hf_attn_backends.attention_backward.default,
        (out, *arguments, out, lse, None, None, 0.2, True, 0, "triton_fa2", "triton", True, False),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.parametrize("dim", [8, 264])
def test_head_dims_outside_are_refused(dim, kernel_device):
    tensor = torch.zeros(1, 1, 4, dim, device=kernel_device)
    with pytest.raises(CallRefusedError, match=f"head_dim must be 16 to 256, got head_dim {dim}"):
        triton_attention(tensor, tensor, tensor, CAUSAL)


def test_float64_is_refused_and_every_reason_is_given(kernel_device):
    tensor = torch.zeros(1, 1, 4, 8, device=kernel_device, dtype=torch.float64)
    with pytest.raises(CallRefusedError, match="head_dim must be") as caught:
        triton_attention(tensor, tensor, tensor, CAUSAL)
    assert "dtype must be bfloat16, float16 or float32" in str(caught.value)
    assert len(caught.value.reasons) == 2


def test_a_variant_that_does_not_exist(leaves):
    with pytest.raises(InvalidCallError, match="variant must be auto, triton or hopper"):
        triton_attention(*leaves, CAUSAL, variant="volta")


def test_a_variant_that_cannot_serve_is_refused_with_its_reasons(leaves):
    with pytest.raises(CallRefusedError, match="variant 'hopper' was asked for"):
        triton_attention(*leaves, CAUSAL, variant="hopper")


def test_a_cpu_tensor_without_the_interpreter_is_refused():
    code = (
        "import torch\n"
        "from hf_attn_backends.kernels.ops import triton_attention\n"
        "from hf_attn_backends.kernels.visibility import CAUSAL\n"
        "x = torch.zeros(1, 1, 4, 16)\n"
        "triton_attention(x, x, x, CAUSAL)\n"
    )
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert "CallRefusedError" in done.stderr
    assert "set TRITON_INTERPRET=1" in done.stderr


@pytest.mark.parametrize(
    ("triton_version", "numpy_version", "refused"),
    [("3.6.0", "2.4.6", True), ("3.6.0", "2.3.5", False), ("3.9.0", "2.4.6", False)],
)
def test_an_interpreter_that_this_numpy_breaks(monkeypatch, triton_version, numpy_version, refused):
    import numpy
    import triton

    from hf_attn_backends.kernels.variants import interpreter_refusals

    monkeypatch.setattr(triton, "__version__", triton_version)
    monkeypatch.setattr(numpy, "__version__", numpy_version)
    reasons = interpreter_refusals()
    assert bool(reasons) == refused
    assert not refused or "pip install 'numpy<2.4'" in reasons[0]
