"""What only a GPU shows: compiled kernels of every class, memory, far offsets, devices."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf_attn_backends import witness
from hf_attn_backends.errors import CallRefusedError
from hf_attn_backends.kernels.ops import triton_attention, triton_attention_with_lse
from hf_attn_backends.kernels.visibility import CAUSAL, Visibility

pytestmark = pytest.mark.gpu

KINDS = ["full", "causal", "window", "window of one", "intervals", "dense"]


def through_the_operator(case, variant):
    leaves = [t.detach().requires_grad_() for t in (case.query, case.key, case.value)]
    out, lse = triton_attention_with_lse(
        *leaves, case.visibility, scale=case.scale, variant=variant
    )
    grads = torch.autograd.grad(out, leaves, case.grad_out)
    return (out.detach(), lse, *grads)


@pytest.mark.parametrize("variant", ["triton", "auto"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dtype", "dim"),
    [(torch.bfloat16, 128), (torch.bfloat16, 64), (torch.float16, 128), (torch.float32, 80)],
)
def test_classes(variant, kind, dtype, dim, make_case, check_case):
    for q_len, k_len, layout in ((257, 257, "bshd"), (1, 300, "bhsd"), (200, 391, "bshd")):
        case = make_case(kind, dtype=dtype, dim=dim, heads=8, kv_heads=2, q_len=q_len, k_len=k_len,
                         device="cuda", layout=layout)  # fmt: skip
        check_case(case, through_the_operator(case, variant))


@pytest.mark.parametrize("variant", ["triton", "auto"])
def test_offsets_beyond_2_to_the_31(variant):
    """Heads that lie 2^31 elements and more apart give what compact ones give, to the bit."""
    length, heads = 257, 3
    gap = 2**30 + 2**19  # between heads: the third lies beyond 2^31
    room = torch.empty(2 * gap + length * 128 + 3 * 2**16, dtype=torch.bfloat16, device="cuda")
    far = [
        torch.as_strided(room, (1, heads, length, 128), (3 * gap, gap, 128, 1), i * 2**16)
        for i in range(3)
    ]
    near = []
    for tensor in far:
        tensor.normal_()
    for tensor in far:
        near.append(tensor.contiguous())
    assert far[0].stride(1) * 2 >= 2**31
    grad = torch.randn_like(near[0])
    got, want = [], []
    for tensors, results in ((far, got), (near, want)):
        leaves = [t.detach().requires_grad_() for t in tensors]
        out = triton_attention(*leaves, CAUSAL, variant=variant)
        results += [out, *torch.autograd.grad(out, leaves, grad)]
    assert torch.equal(got[0], want[0])
    for a, b in zip(got[1:], want[1:], strict=True):
        # dQ of the hopper variant is summed in the order of arrival.
        torch.testing.assert_close(a, b, rtol=0.05, atol=1e-2)


@pytest.mark.multigpu
@pytest.mark.parametrize("variant", ["triton", "auto"])
def test_the_second_device(variant, make_case, check_case):
    case = make_case("causal", dtype=torch.bfloat16, dim=128, heads=8, kv_heads=2, q_len=130,
                     k_len=130, device="cuda:1")  # fmt: skip
    assert torch.cuda.current_device() == 0
    check_case(case, through_the_operator(case, variant))


def test_deterministic_algorithms_are_bitwise_repeatable(make_case):
    torch.use_deterministic_algorithms(True)
    try:
        case = make_case("causal", dtype=torch.bfloat16, dim=128, heads=8, kv_heads=2, q_len=777,
                         k_len=777, device="cuda")  # fmt: skip
        before = witness.snapshot()
        first, second = (through_the_operator(case, "auto") for _ in range(2))
        assert {k.variant for k in witness.since(before) if k.phase == "backward"} == {"triton"}
    finally:
        torch.use_deterministic_algorithms(False)
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), first, second, strict=True):
        assert torch.equal(a, b), name


def test_the_forward_repeats_to_the_bit(make_case):
    case = make_case("causal", dtype=torch.bfloat16, dim=128, heads=8, kv_heads=2, q_len=1025,
                     k_len=1025, device="cuda")  # fmt: skip
    runs = [triton_attention(case.query, case.key, case.value, CAUSAL) for _ in range(4)]
    assert all(torch.equal(runs[0], run) for run in runs[1:])


def peak_bytes(attend, leaves, grad):
    """Peak memory of one forward and backward pass, beyond the inputs."""
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        torch.autograd.grad(attend(*leaves), leaves, grad)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - start
    return peak


@pytest.mark.parametrize("variant", ["triton", "auto"])
def test_peak_memory_is_at_most_sdpa_flash(variant, record_property):
    """1x16384, 32/8 heads, head_dim 128, bf16: at most 1.05x SDPA's FLASH."""

    def draw(heads):
        return torch.randn(1, 16384, heads, 128, device="cuda", dtype=torch.bfloat16).transpose(
            1, 2
        )

    leaves = [draw(n).requires_grad_() for n in (32, 8, 8)]
    grad = draw(32)

    def flash(q, k, v):
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True
            )

    theirs = peak_bytes(flash, leaves, grad)
    ours = peak_bytes(lambda q, k, v: triton_attention(q, k, v, CAUSAL, variant=variant), leaves,
                      grad)  # fmt: skip
    print(f"peak MiB beyond the inputs: {variant} {ours / 2**20:.0f}, FLASH {theirs / 2**20:.0f}")
    record_property("ratio", ours / theirs)
    assert ours <= 1.05 * theirs


def test_lengths_batches_and_windows_do_not_recompile():
    from hf_attn_backends.kernels.triton import backward_kernels, forward_kernels

    def compiled():
        kernels = (
            forward_kernels._attn_fwd_kernel,
            backward_kernels._attn_bwd_dkdv_kernel,
            backward_kernels._attn_bwd_dq_kernel,
            backward_kernels._attn_bwd_delta_kernel,
        )
        return [len(kernel.device_caches[0][0]) for kernel in kernels]

    def run(batch, length, window):
        q, k = (
            torch.randn(batch, length, n, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
            for n in (8, 2)
        )
        leaves = [t.requires_grad_() for t in (q, k, k.clone())]
        visibility = Visibility(causal=True, window=window)
        triton_attention(*leaves, visibility, variant="triton").sum().backward()

    run(2, 128, 16)
    before = compiled()
    for batch, length, window in ((3, 129, 17), (5, 1000, 1), (2, 64, 333), (7, 17, 16)):
        run(batch, length, window)
    assert compiled() == before


def test_the_hopper_variant_says_why_it_cannot_serve():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    tensor = torch.randn(1, 2, 64, 80, device="cuda", dtype=torch.float32)
    with pytest.raises(CallRefusedError, match="head_dim must be 64 or 128") as caught:
        triton_attention(tensor, tensor, tensor, CAUSAL, variant="hopper")
    assert "dtype must be bfloat16 or float16" in str(caught.value)
