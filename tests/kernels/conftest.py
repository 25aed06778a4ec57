"""Calls for the kernel tests: tensors, the oracle's answer, the error that is allowed."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from hf_attn_backends.kernels.visibility import Visibility
from hf_attn_backends.reference import attention_reference_grads


@dataclass
class Case:
    """Inputs of one call, in the dtype under test."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    grad_out: torch.Tensor
    visibility: Visibility
    scale: float

    def reference(self, dtype=torch.float64):
        """(out, lse, dq, dk, dv) of the oracle, on these very numbers."""
        return attention_reference_grads(
            self.query, self.key, self.value, self.grad_out,
            visibility=self.visibility, scale=self.scale, dtype=dtype,
        )[:5]  # fmt: skip


def visibilities(batch, heads, q_len, k_len, device):
    """One of each kind; intervals and dense ones with rows that see nothing."""
    generator = torch.Generator().manual_seed(3)
    start = torch.randint(0, k_len, (batch, q_len), generator=generator)
    end = torch.randint(0, k_len + 5, (batch, q_len), generator=generator)
    end[:, 0] = start[:, 0]
    dense = torch.rand(batch, heads, q_len, k_len, generator=generator) > 0.4
    dense[:, :, q_len // 2] = False
    return {
        "full": Visibility(),
        "causal": Visibility(causal=True),
        "window": Visibility(causal=True, window=9),
        "window of everything": Visibility(causal=True, window=k_len + 3),
        "window of one": Visibility(causal=True, window=1),
        "intervals": Visibility(intervals=torch.stack([start, end], -1).int().to(device)),
        "dense": Visibility(dense=dense.to(device)),
        "dense, one head": Visibility(dense=dense[:1, :1].to(device)),
    }


def make(kind, *, batch=2, heads=6, kv_heads=2, q_len=37, k_len=37, dim=32, dtype=torch.float32,
         device="cpu", layout="bshd", seed=0):  # fmt: skip
    """A case; `layout` `bshd` gives transposed views, `bhsd` contiguous tensors."""
    generator = torch.Generator().manual_seed(seed)

    def draw(n, length):
        if layout == "bhsd":
            return torch.randn(batch, n, length, dim, generator=generator).to(device, dtype)
        rows = torch.randn(batch, length, n, dim, generator=generator).to(device, dtype)
        return rows.transpose(1, 2)

    visibility = visibilities(batch, heads, q_len, k_len, device)[kind]
    return Case(
        draw(heads, q_len), draw(kv_heads, k_len), draw(kv_heads, k_len), draw(heads, q_len),
        visibility, dim**-0.5,
    )  # fmt: skip


def cancellation(case):
    """What rounding leaves of dQ and dK where they are exactly 0: a row that sees one key.

    There dS = P * (dP - delta) is the difference of two equal sums, each with fp32 roundings; the
    remainder is multiplied by scale * K (or Q).
    """
    groups = case.query.shape[1] // case.key.shape[1]
    value = case.value.detach().double().repeat_interleave(groups, 1)
    dp = float((case.grad_out.double() @ value.transpose(2, 3)).abs().max())
    unit = 4 * torch.finfo(torch.float32).eps * case.scale * dp
    return {
        "dq": unit * float(case.key.detach().abs().max()),
        "dk": unit * float(case.query.detach().abs().max()),
    }


# The largest error allowed, in units of the dtype's epsilon and of the tensor's largest value:
# twice what eager attention in the same dtype shows, and never less than four roundings.
def check(case, got, roundings=4.0):
    """Every tensor within twice eager's own error; zeros where a row sees nothing."""
    want = case.reference()
    eager = case.reference(case.query.dtype)
    eps = torch.finfo(case.query.dtype).eps
    floors = cancellation(case)
    for name, have, exact, rough in zip(
        ("out", "lse", "dq", "dk", "dv"), got, want, eager, strict=True
    ):
        assert have.shape == exact.shape, name
        hidden = torch.isneginf(exact)
        assert torch.equal(torch.isneginf(have), hidden), f"{name}: rows that see nothing"
        have, exact, rough = (t.double().masked_fill(hidden, 0.0) for t in (have, exact, rough))
        assert torch.isfinite(have).all(), f"{name}: not finite"
        size = max(float(exact.abs().max()), 1e-3)
        # The log-sum-exp is fp32 in every dtype, and so are its roundings.
        unit = torch.finfo(torch.float32).eps if name == "lse" else eps
        budget = (
            floors.get(name, 0.0) + 2 * float((rough - exact).abs().max()) + roundings * unit * size
        )
        error = float((have - exact).abs().max())
        assert error <= budget, f"{name}: error {error:.2e}, budget {budget:.2e}"
    empty = torch.isneginf(want[1])
    if empty.any():
        assert float(got[0][empty].abs().max()) == 0.0
        assert float(got[2][empty].abs().max()) == 0.0


@pytest.fixture
def launched():
    """Run a case through the portable launches; (out, lse, dq, dk, dv)."""
    from hf_attn_backends.kernels.triton.backward import launch_backward
    from hf_attn_backends.kernels.triton.forward import launch_forward

    def run(case):
        out, lse = launch_forward(case.query, case.key, case.value, case.visibility, case.scale)
        grads = launch_backward(
            case.grad_out, case.query, case.key, case.value, out, lse, case.visibility, case.scale
        )
        return (out, lse, *grads)

    return run


@pytest.fixture
def make_case():
    return make


@pytest.fixture
def check_case():
    return check


@pytest.fixture
def draw(kernel_device):
    """Leaves `[B, H, M, D]`, `[B, G, N, D]`, `[B, G, N, E]` and sinks `[H]`."""

    def make(b=1, h=4, g=2, m=21, n=21, d=16, e=16, grad=True, dtype=torch.float32):
        draws = torch.Generator().manual_seed(5)
        shapes = ((b, h, m, d), (b, g, n, d), (b, g, n, e), (h,))
        return [
            torch.randn(shape, generator=draws).to(kernel_device, dtype).requires_grad_(grad)
            for shape in shapes
        ]

    return make
