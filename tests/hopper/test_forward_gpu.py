"""The sm_90 forward against the oracle, on the device."""

from __future__ import annotations

import random

import pytest
import torch

from hf_attn_backends.kernels.visibility import CAUSAL, FULL, Visibility
from hf_attn_backends.reference import attention_reference

pytestmark = pytest.mark.gpu

CLASSES = [(dtype, dim) for dtype in (torch.bfloat16, torch.float16) for dim in (64, 128)]
LAYOUTS = ("bhsd", "bshd", "padded")


@pytest.fixture(scope="module")
def forward():
    from hf_attn_backends.kernels.hopper import forward as module

    if module.call_refusals(*tensors(1, 1, 1, 8, 8, 64, torch.bfloat16, "bhsd"), FULL):
        pytest.skip("needs a Hopper device and a tested Triton")
    return module


def tensors(batch, heads, kv_heads, m_len, n_len, dim, dtype, layout):
    def one(h, s):
        if layout == "bshd":
            return torch.randn(batch, s, h, dim, device="cuda", dtype=dtype).transpose(1, 2)
        if layout == "padded":
            wide = torch.randn(batch, h, s + 3, dim + 8, device="cuda", dtype=dtype)
            return wide[:, :, 1 : s + 1, :dim]
        return torch.randn(batch, h, s, dim, device="cuda", dtype=dtype)

    return one(heads, m_len), one(kv_heads, n_len), one(kv_heads, n_len)


def intervals(batch, m_len, n_len):
    start = torch.randint(-3, n_len, (batch, m_len), device="cuda")
    length = torch.randint(-1, n_len + 4, (batch, m_len), device="cuda")
    return torch.stack([start, start + length], -1).int()


def compare(forward, q, k, v, visibility, scale):
    """Poison what the outputs will be allocated from, run twice, compare with the oracle."""
    poison = [torch.full_like(q, torch.nan) for _ in range(2)]
    del poison
    out, lse = forward.launch_forward(q, k, v, visibility, scale)
    again, lse_again = forward.launch_forward(q, k, v, visibility, scale)
    assert out.transpose(1, 2).is_contiguous()
    assert torch.equal(out, again)
    assert torch.equal(lse, lse_again)
    want, want_lse = attention_reference(
        q, k, v, visibility=visibility, scale=scale, dtype=torch.float32
    )
    assert out.isfinite().all()
    empty = want_lse == float("-inf")
    assert (out[empty] == 0).all()
    assert torch.equal(lse == float("-inf"), empty)
    assert (lse - want_lse)[~empty].abs().max().item() < 2e-4 if (~empty).any() else True
    # Weights are rounded to the operand's dtype once, the output once: two half-ulps of values
    # whose size is the largest value's.
    ulp = torch.finfo(q.dtype).eps
    assert (out.float() - want).abs().max().item() <= 2 * ulp * v.abs().max().item()
    assert (out.float() - want).norm() <= 1.0 * ulp * want.norm() + 1e-30


@pytest.mark.parametrize(("dtype", "dim"), CLASSES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "m_len", "n_len"),
    [(4, 2, 256, 256), (6, 2, 333, 333), (4, 1, 129, 515), (3, 3, 515, 129), (8, 2, 1, 700)],
)
def test_every_kind_matches_the_oracle(forward, dtype, dim, layout, heads, kv_heads, m_len, n_len):
    q, k, v = tensors(2, heads, kv_heads, m_len, n_len, dim, dtype, layout)
    kinds = [FULL, CAUSAL, Visibility(intervals=intervals(2, m_len, n_len))]
    kinds += [Visibility(causal=True, window=w) for w in (1, 100, 128, 4000)]
    for visibility in kinds:
        compare(forward, q, k, v, visibility, dim**-0.5)


@pytest.mark.parametrize("growth", [0.02, 2.0, 40.0])
@pytest.mark.parametrize("rows", ["all", "one of each warp"])
def test_maxima_that_grow_from_block_to_block(forward, growth, rows):
    """Blocks are walked from the last key to the first: below, at, and above what is let pass."""
    q, k, v = tensors(1, 4, 2, 300, 1000, 128, torch.bfloat16, "bhsd")
    step = (torch.arange(999, -1, -1, device="cuda") // 128).to(torch.bfloat16)
    k[..., 0] = step * growth
    q[..., 0] = 0 if rows != "all" else 11.0
    if rows != "all":
        q[:, :, 5::16, 0] = 11.0
    for visibility in (FULL, CAUSAL):
        compare(forward, q, k, v, visibility, 128**-0.5)


def test_no_keys_and_no_queries(forward):
    q, k, v = tensors(2, 4, 2, 5, 1, 64, torch.bfloat16, "bhsd")
    out, lse = forward.launch_forward(q, k[:, :, :0], v[:, :, :0], FULL, 1.0)
    assert (out == 0).all()
    assert (lse == float("-inf")).all()
    out, lse = forward.launch_forward(q[:, :, :0], k, v, CAUSAL, 1.0)
    assert out.shape == (2, 4, 0, 64)
    assert lse.shape == (2, 4, 0)


def test_lengths_batches_and_windows_do_not_recompile(forward):
    from hf_attn_backends.kernels.hopper.forward_kernels import attention_forward

    def compiled():
        return sum(len(cache[0]) for cache in attention_forward.device_caches.values())

    def call(batch, m_len, window):
        q, k, v = tensors(batch, 4, 2, m_len, m_len, 64, torch.bfloat16, "bshd")
        forward.launch_forward(q, k, v, Visibility(causal=True, window=window), 0.1)

    call(1, 16, 16)
    before = compiled(), len(forward._KERNELS)
    for batch, m_len, window in ((1, 1, 1), (2, 77, 13), (3, 1024, 512), (1, 2000, 1)):
        call(batch, m_len, window)
    assert (compiled(), len(forward._KERNELS)) == before


@pytest.mark.slow
def test_a_thousand_random_calls(forward):
    chance = random.Random(0)
    torch.manual_seed(0)
    for _ in range(1000):
        dtype, dim = chance.choice(CLASSES)
        kv_heads, group = chance.randint(1, 4), chance.choice([1, 2, 3, 4, 7])
        m_len, n_len = (chance.choice([1, 7, 64, 127, 128, 129, 300, 511]) for _ in range(2))
        batch = chance.randint(1, 3)
        visibility = chance.choice(
            [
                FULL,
                CAUSAL,
                Visibility(causal=True, window=chance.randint(1, 600)),
                Visibility(intervals=intervals(chance.choice([1, batch]), m_len, n_len)),
            ]
        )
        layout = chance.choice(LAYOUTS)
        q, k, v = tensors(batch, kv_heads * group, kv_heads, m_len, n_len, dim, dtype, layout)
        compare(forward, q, k, v, visibility, chance.choice([dim**-0.5, 0.3]))
