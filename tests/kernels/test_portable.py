"""The portable kernel against the fp64 oracle: through the interpreter, or on the GPU."""

import math

import pytest
import torch

KINDS = ["full", "causal", "window", "window of everything", "window of one", "intervals", "dense"]


@pytest.mark.parametrize("kind", [*KINDS, "dense, one head"])
def test_square_odd_lengths_and_groups_of_three(
    kind, make_case, launched, check_case, kernel_device
):
    case = make_case(kind, q_len=67, k_len=67, batch=1, device=kernel_device)
    check_case(case, launched(case))


@pytest.mark.parametrize("kind", ["full", "causal", "window", "intervals", "dense"])
@pytest.mark.parametrize(("q_len", "k_len"), [(1, 45), (33, 70), (70, 33), (5, 1)])
def test_unequal_lengths(kind, q_len, k_len, make_case, launched, check_case, kernel_device):
    case = make_case(kind, q_len=q_len, k_len=k_len, heads=2, kv_heads=1, device=kernel_device)
    check_case(case, launched(case))


@pytest.mark.parametrize("dim", [16, 80, 96, 128, 192, 256])
def test_head_dims(dim, make_case, launched, check_case, kernel_device):
    case = make_case("causal", dim=dim, batch=1, heads=2, q_len=35, k_len=35, device=kernel_device)
    check_case(case, launched(case))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["causal", "intervals", "dense"])
def test_low_precision(dtype, kind, make_case, launched, check_case, kernel_device):
    case = make_case(kind, dtype=dtype, batch=1, heads=4, dim=64, device=kernel_device)
    check_case(case, launched(case))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (8, 2), (5, 1)])
def test_head_ratios(heads, kv_heads, make_case, launched, check_case, kernel_device):
    case = make_case("causal", heads=heads, kv_heads=kv_heads, batch=1, q_len=19, k_len=19,
                     dim=16, device=kernel_device)  # fmt: skip
    check_case(case, launched(case))


def test_any_strides(make_case, launched, check_case, kernel_device):
    """A cropped view, a transposed last dimension, and the zero strides of the grad of a sum."""
    case = make_case("causal", batch=1, heads=2, kv_heads=1, layout="bhsd", device=kernel_device)
    wide = torch.zeros(1, 2, 40, 50, device=kernel_device)
    wide[:, :, 2:39, 7:39] = case.query
    case.query = wide[:, :, 2:39, 7:39]
    case.key = case.key.transpose(2, 3).contiguous().transpose(2, 3)
    case.grad_out = torch.ones(1, 1, 1, 1, device=kernel_device).expand(1, 2, 37, 32)
    assert case.query.stride(3) == 1
    assert case.key.stride(3) != 1
    check_case(case, launched(case))


def test_a_dense_mask_with_zero_strides(make_case, launched, check_case, kernel_device):
    case = make_case("dense, one head", batch=2, heads=2, kv_heads=1, device=kernel_device)
    from hf_attn_backends.kernels.visibility import Visibility

    mask = case.visibility.dense.expand(2, 2, 37, 37)
    assert mask.stride()[:2] == (0, 0)
    case.visibility = Visibility(dense=mask)
    check_case(case, launched(case))


def test_the_backward_is_deterministic(make_case, launched, kernel_device):
    case = make_case("window", dtype=torch.float16, heads=4, device=kernel_device)
    first, second = launched(case), launched(case)
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), first, second, strict=True):
        assert torch.equal(a, b), name


def test_the_lse_is_a_natural_logarithm(kernel_device):
    """Four keys with score 0 each: the log-sum-exp is ln 4, and the output the mean value."""
    from hf_attn_backends.kernels.triton.forward import launch_forward
    from hf_attn_backends.kernels.visibility import FULL

    query = torch.zeros(1, 1, 1, 16, device=kernel_device)
    value = torch.arange(4.0, device=kernel_device).view(1, 1, 4, 1).expand(1, 1, 4, 16)
    out, lse = launch_forward(query, torch.ones_like(value), value, FULL, 1.0)
    assert lse.item() == pytest.approx(math.log(4), rel=1e-6)
    assert out[0, 0, 0, 0].item() == pytest.approx(1.5, rel=1e-6)


def test_a_window_of_two_by_hand(kernel_device):
    """Equal scores: row i averages the values of keys i-1 and i."""
    from hf_attn_backends.kernels.triton.forward import launch_forward
    from hf_attn_backends.kernels.visibility import Visibility

    value = torch.arange(5.0, device=kernel_device).view(1, 1, 5, 1).expand(1, 1, 5, 16)
    query = torch.zeros(1, 1, 5, 16, device=kernel_device)
    out, _ = launch_forward(query, query, value, Visibility(causal=True, window=2), 1.0)
    assert out[0, 0, :, 0].tolist() == pytest.approx([0.0, 0.5, 1.5, 2.5, 3.5])


@pytest.mark.parametrize(("batch", "q_len", "k_len"), [(0, 5, 5), (2, 0, 5), (2, 5, 0)])
def test_nothing_to_do(batch, q_len, k_len, launched, make_case, kernel_device):
    case = make_case("full", batch=2, heads=2, kv_heads=1, device=kernel_device)
    case.query, case.grad_out = (t[:batch, :, :q_len] for t in (case.query, case.grad_out))
    case.key, case.value = (t[:batch, :, :k_len] for t in (case.key, case.value))
    out, lse, dq, dk, dv = launched(case)
    assert out.shape == (batch, 2, q_len, 32)
    assert dk.shape == dv.shape == (batch, 1, k_len, 32)
    assert all(float(t.abs().sum()) == 0.0 for t in (out, dq, dk, dv))
    assert torch.isneginf(lse).all()


def test_results_are_rows_first_in_memory(make_case, launched, kernel_device):
    out, _, dq, dk, _ = launched(make_case("causal", batch=2, device=kernel_device))
    for tensor in (out, dq, dk):
        assert tensor.transpose(1, 2).is_contiguous()
