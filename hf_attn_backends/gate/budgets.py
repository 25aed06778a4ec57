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

TENSORS = ("out", "lse", "dq", "dk", "dv", "dsinks")  # the last where there are sinks
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

    @property
    def tensors(self) -> tuple[str, ...]:
        """Which of `TENSORS` the call has."""
        return TENSORS if self.exact.dsinks is not None else TENSORS[:-1]


def error_of(found: Tensor, exact: Tensor) -> dict[str, float]:
    """Largest and root-mean-square difference; entries of -inf on both sides agree."""
    both = (found == exact) & torch.isinf(exact)
    difference = torch.where(both, 0.0, found.to(exact.dtype) - exact).abs()
    if difference.numel() == 0:
        return {"max": 0.0, "rms": 0.0}
    return {"max": difference.max().item(), "rms": difference.square().mean().sqrt().item()}


def yardstick(inputs: Inputs) -> Yardstick:
    """The oracle, and the budgets that SDPA's own errors leave."""
    query, key, value, grad_out, visibility, _ = inputs[:6]
    b, h, m, _ = query.shape
    seen = visible_keys(b, h, m, key.shape[2], query.device, visibility=visibility)
    options = inputs.oracle_options()
    exact = attention_reference_grads(query, key, value, grad_out, **options)
    unlike_sdpa = bool(inputs.softcap or inputs.dropout_p) or inputs.sinks is not None
    try:
        measured, name = (_eager(inputs), "eager") if unlike_sdpa else (_sdpa(inputs, seen), "sdpa")
    except RuntimeError as error:
        if "No available kernel" not in str(error):
            raise
        measured, name = _eager(inputs), "eager"
    _, lse = attention_reference(query, key, value, **options, dtype=torch.float32)
    measured = {**measured, "lse": lse}
    sizes = term_sizes(inputs, exact, seen)
    budgets = {}
    stick = Yardstick(exact, seen, budgets, name)
    for tensor in stick.tensors:
        eps = torch.finfo(torch.float32 if tensor == "lse" else query.dtype).eps
        found = error_of(measured[tensor], getattr(exact, tensor))
        size = error_of(sizes[tensor], torch.zeros_like(sizes[tensor]))
        for metric in METRICS:
            budgets[tensor, metric] = SDPA_FACTOR * found[metric] + eps * size[metric]
    return stick


def _sdpa(inputs: Inputs, seen: Tensor) -> dict[str, Tensor]:
    """SDPA in the inputs' dtype; rows that see nothing are shown everything and given no gradient.

    That takes them out of dQ, dK and dV exactly, whatever the SDPA kernel makes of such rows, and
    their outputs are left out by hand.
    """
    query, key, value, grad_out, visibility, scale = inputs[:6]
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
    options = inputs.oracle_options()
    return attention_reference_grads(*inputs[:4], **options, dtype=inputs.query.dtype)._asdict()


def term_sizes(inputs: Inputs, exact: ReferenceGrads, seen: Tensor) -> dict[str, Tensor]:
    """Size of what each element sums, before it cancels, in fp64.

    For 16-bit dtypes the terms are what is rounded to 16 bits on the way: the weights, the
    gradients of the scores, the output inside delta = rowsum(dO * O); such roundings are
    independent and add in quadrature. For fp32 it is every product, and they add up.
    A weight is exp(score - lse), so the fp32 rounding of the score, at the size of its products,
    is a relative error of the weight; beside a 16-bit rounding it disappears. A softcap turns that
    error by its slope 1 - tanh^2, itself a difference of fp32 numbers of size 1, and adds the
    rounding of the capped score; for 16-bit inputs that is a rounding of the cap.
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

    relative = torch.finfo(torch.float32).eps / torch.finfo(inputs.query.dtype).eps
    scores = query @ key.transpose(-1, -2) * inputs.scale
    spread = query.abs() @ key.abs().transpose(-1, -2) * inputs.scale
    slope: Tensor | float = 1.0
    if inputs.softcap:
        curve = torch.tanh(scores / inputs.softcap)
        scores = inputs.softcap * curve
        slope = 1.0 - curve**2 + 2 * relative
        spread = spread * slope + (scores.abs() if full else inputs.softcap)
    finite = torch.where(torch.isinf(exact.lse), 0.0, exact.lse)[..., None]
    weights = torch.exp(scores - finite)
    weights = weights.masked_fill(~seen, 0.0) * (1.0 + relative * spread)
    dp = summed(grad_out, value.transpose(-1, -2)) if full else grad_out @ value.transpose(-1, -2)
    delta = ((exact.out * grad_out).abs() ** power).sum(-1, keepdim=True) ** (1 / power)
    passed = weights
    if (kept := inputs.kept()) is not None:
        passed, dp = (x * kept / (1.0 - inputs.dropout_p) for x in (weights, dp))
    ds = weights * (dp.abs() + delta) * inputs.scale * slope
    spread = spread.masked_fill(~seen, 0.0).amax(-1)
    sizes = {
        "out": summed(passed, value),
        "lse": spread,
        "dq": summed(ds, key),
        "dk": group(summed(ds.transpose(-1, -2), query)),
        "dv": group(summed(passed.transpose(-1, -2), grad_out)),
    }
    if inputs.sinks is not None and exact.dsinks is not None:
        sinks = inputs.sinks.double()[None, :, None]
        share = torch.exp(sinks - exact.lse) * (1.0 + relative * (spread + sinks.abs()))
        sizes["dsinks"] = ((share * delta[..., 0]) ** power).sum((0, 2)) ** (1 / power)
        sizes["dsinks"] = sizes["dsinks"] + exact.dsinks.abs()  # its own rounding
    return sizes
