"""How much error a kernel may have: derived from what SDPA makes on the same numbers.

Shapes: `B` batch, `H` query heads, `G` key/value heads, `M` query length, `N` key length, `D`
head dim.

The yardstick is the fp64 oracle on the same low-precision inputs, so that the rounding of the
inputs counts for nobody. For each tensor, in the largest error and in the root mean square:

    budget = 2 x (SDPA's error in the same dtype) + (one rounding band)

The band is one unit of the dtype's precision at the size of what is summed, before it cancels
(the oracle's own products with absolute values): SDPA's error can be 0 by luck or by symmetry, as
in a row that sees one key, where every gradient of the scores is 0. Where SDPA has no such call
(softcap, sinks), eager attention in the same dtype stands in. The log-sum-exp is an fp32 result
whatever the inputs' dtype: its yardstick is fp32 arithmetic.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from hf_attn_backends.gate.inputs import Inputs
from hf_attn_backends.reference import (
    ReferenceGrads,
    attention_reference,
    attention_reference_grads,
    visible_keys,
)

TENSORS = ("out", "lse", "dq", "dk", "dv")
METRICS = ("max", "rms")
SDPA_FACTOR = 2.0

TOLERANCES = {
    "rule": "error <= sdpa_factor * error of SDPA in the same dtype + one rounding band",
    "oracle": "fp64 on the same inputs",
    "sdpa_factor": SDPA_FACTOR,
    "band": "eps of the dtype x the size of the summed terms before they cancel",
    "metrics": list(METRICS),
    "tensors": list(TENSORS),
}


class Yardstick(NamedTuple):
    """What a case is measured against.

    Attributes:
        exact: The oracle's tensors, fp64.
        seen: `[B, H, M, N]` bool.
        budgets: (tensor, metric) -> the error that is allowed.
        name: Which implementation set the budgets: `sdpa` or `eager`.
    """

    exact: ReferenceGrads
    seen: Tensor
    budgets: dict[tuple[str, str], float]
    name: str


def error_of(found: Tensor, exact: Tensor) -> dict[str, float]:
    """Largest and root-mean-square difference; entries of -inf on both sides agree."""
    both = (found == exact) & torch.isinf(exact)
    difference = torch.where(both, 0.0, found.to(exact.dtype) - exact).abs()
    if difference.numel() == 0:
        return {"max": 0.0, "rms": 0.0}
    return {"max": difference.max().item(), "rms": difference.square().mean().sqrt().item()}


def yardstick(inputs: Inputs) -> Yardstick:
    """The oracle, and the budgets that SDPA's own errors leave."""
    query, key, value, grad_out, visibility, scale = inputs
    b, h, m, _ = query.shape
    seen = visible_keys(b, h, m, key.shape[2], query.device, visibility=visibility)
    exact = attention_reference_grads(
        query, key, value, grad_out, visibility=visibility, scale=scale
    )
    try:
        measured, name = _sdpa(inputs, seen), "sdpa"
    except RuntimeError as error:
        if "No available kernel" not in str(error):
            raise
        measured, name = _eager(inputs), "eager"
    _, lse = attention_reference(
        query, key, value, visibility=visibility, scale=scale, dtype=torch.float32
    )
    measured = {**measured, "lse": lse}
    sizes = _sizes(inputs, exact, seen)
    budgets = {}
    for tensor in TENSORS:
        eps = torch.finfo(torch.float32 if tensor == "lse" else query.dtype).eps
        found = error_of(measured[tensor], getattr(exact, tensor))
        size = error_of(sizes[tensor], torch.zeros_like(sizes[tensor]))
        for metric in METRICS:
            budgets[tensor, metric] = SDPA_FACTOR * found[metric] + eps * size[metric]
    return Yardstick(exact, seen, budgets, name)


def _sdpa(inputs: Inputs, seen: Tensor) -> dict[str, Tensor]:
    """SDPA in the inputs' dtype; rows that see nothing are shown everything and given no gradient.

    That takes them out of dQ, dK and dV exactly, whatever the SDPA kernel makes of such rows, and
    their outputs are left out by hand.
    """
    query, key, value, grad_out, visibility, scale = inputs
    hidden = ~seen.any(-1, keepdim=True)
    plain = visibility.kind == "full" or (
        visibility.kind == "causal" and query.shape[2] == key.shape[2]
    )
    mask = None if plain else (seen | hidden)
    leaves = [x.detach().contiguous().requires_grad_() for x in (query, key, value)]
    with torch.enable_grad(), _kernels(query, plain):
        out = scaled_dot_product_attention(
            *leaves, attn_mask=mask, is_causal=plain and visibility.causal, scale=scale,
            enable_gqa=True,
        )  # fmt: skip
        grads = torch.autograd.grad(out, leaves, grad_out.masked_fill(hidden, 0.0))
    out = out.detach().masked_fill(hidden, 0.0)
    return {"out": out, "dq": grads[0], "dk": grads[1], "dv": grads[2]}


def _kernels(query: Tensor, plain: bool) -> AbstractContextManager[object]:
    """FLASH where it takes the call (16 bit, no mask), else the unfused arithmetic."""
    if query.device.type != "cuda":
        return nullcontext()
    flash = plain and query.dtype in (torch.float16, torch.bfloat16)
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION] if flash else [SDPBackend.MATH])


def _eager(inputs: Inputs) -> dict[str, Tensor]:
    """Eager attention in the inputs' dtype."""
    found = attention_reference_grads(
        inputs.query, inputs.key, inputs.value, inputs.grad_out,
        visibility=inputs.visibility, scale=inputs.scale, dtype=inputs.query.dtype,
    )  # fmt: skip
    return found._asdict()


def _sizes(inputs: Inputs, exact: ReferenceGrads, seen: Tensor) -> dict[str, Tensor]:
    """Size of what each element sums, before it cancels, in fp64.

    For 16-bit dtypes the terms are what is rounded to 16 bits on the way: the weights, the
    gradients of the scores, the output inside delta = rowsum(dO * O); such roundings are
    independent and add in quadrature. For fp32 it is every product, and they add up.
    A weight is exp(score - lse), so the fp32 rounding of the score, at the size of its products,
    is a relative error of the weight; beside a 16-bit rounding it disappears.
    """
    query, key, value, grad_out = (x.double() for x in inputs[:4])
    h, g = query.shape[1], key.shape[1]
    key, value = key.repeat_interleave(h // g, 1), value.repeat_interleave(h // g, 1)
    full = inputs.query.dtype == torch.float32
    power = 1 if full else 2

    def summed(weights: Tensor, terms: Tensor) -> Tensor:
        return (weights.abs() ** power @ terms.abs() ** power) ** (1 / power)

    def group(x: Tensor) -> Tensor:
        return (x.unflatten(1, (g, h // g)) ** power).sum(2) ** (1 / power)

    products = query.abs() @ key.abs().transpose(-1, -2) * inputs.scale
    finite = torch.where(torch.isinf(exact.lse), 0.0, exact.lse)[..., None]
    weights = torch.exp(query @ key.transpose(-1, -2) * inputs.scale - finite)
    relative = torch.finfo(torch.float32).eps / torch.finfo(inputs.query.dtype).eps
    weights = weights.masked_fill(~seen, 0.0) * (1.0 + relative * products)
    dp = summed(grad_out, value.transpose(-1, -2)) if full else grad_out @ value.transpose(-1, -2)
    delta = ((exact.out * grad_out).abs() ** power).sum(-1, keepdim=True) ** (1 / power)
    ds = weights * (dp.abs() + delta) * inputs.scale
    return {
        "out": summed(weights, value),
        "lse": products.masked_fill(~seen, 0.0).amax(-1),
        "dq": summed(ds, key),
        "dk": group(summed(ds.transpose(-1, -2), query)),
        "dv": group(summed(weights.transpose(-1, -2), grad_out)),
    }
