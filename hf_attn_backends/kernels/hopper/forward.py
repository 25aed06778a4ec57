"""Host side of the sm_90 forward: what it can serve, and its launch.

Shapes: `B` batch, `H` query heads, `G` key/value heads, `M` query length, `N` key length, `D`
head dim. Lengths, batch, heads, window and strides are run-time values: a kernel is compiled once
for each (dtype, head dim, visibility kind).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_attn_backends.errors import CallRefusedError, compose
from hf_attn_backends.kernels.bound import BoundKernel, Map, Plan
from hf_attn_backends.kernels.hopper.limits import (
    KINDS,
    TILE,
    call_refusals,
    device_facts,
    safe_strides,
)
from hf_attn_backends.kernels.visibility import Visibility

KEYS = 128  # keys of a block
_LOG2_E = 1.4426950408889634
_ROWS = (64, KEYS, KEYS, 64)  # rows of a box of query, key, value, output
_PLANS_KEPT = 1024


@dataclass(frozen=True, slots=True)
class Tuning:
    """How the kernel is built and scheduled; other values than the default are for ablations.

    Attributes:
        turns: The two consumers take turns on the tensor cores.
        lazy_from: Head dims from this one on rescale the accumulator only where a maximum has
            grown by more than `2 ** 8`; for 64 the branch costs more than the products.
        l2_bytes: Keys and values that are worked on together under causality and intervals.
    """

    turns: bool = True
    lazy_from: int = 128
    l2_bytes: int = 32 * 2**20


DEFAULT = Tuning()
_KERNELS: dict[tuple[object, ...], BoundKernel | None] = {}
_PLANS: dict[tuple[object, ...], Plan] = {}

refusals = call_refusals


def section_heads(
    kind: str, n_len: int, head_dim: int, group: int, batch_heads: int, l2_bytes: int
) -> int:
    """How many query heads are worked on together.

    Where tiles differ in length (causal, intervals), as many as keep their keys and values in the
    L2 cache: a power of two of key heads, FlashAttention-3's rule. Elsewhere one group.
    """
    if kind in ("full", "window"):
        return min(group, batch_heads)
    per_head = n_len * 2 * head_dim * 2
    fit = max(1, l2_bytes // per_head)
    return min(batch_heads, group * 2 ** int(math.log2(fit)))


def inverse(divisor: int) -> int:
    """What `schedule.divide` multiplies by: `2**62 / divisor`, rounded up; divisors to `2**31`."""
    return -(-(2**62) // divisor)


def _descriptor(tensor: Tensor, rows: int) -> object:
    from triton.experimental.gluon import language as gl

    from hf_attn_backends.kernels.hopper.gluon_compat import TensorDescriptor

    element = gl.bfloat16 if tensor.dtype == torch.bfloat16 else gl.float16
    block = [1, 1, rows, tensor.shape[-1]]
    layout = gl.NVMMASharedLayout.get_default_for(block, element)
    return TensorDescriptor(tensor, list(tensor.shape), safe_strides(tensor), block, layout)


def launch_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visibility: Visibility,
    scale: float,
    *,
    tuning: Tuning = DEFAULT,
) -> tuple[Tensor, Tensor]:
    """Attention of `[B, H, M, D]` queries over `[B, G, N, D]` keys and values.

    fp32 accumulation; two runs give the same bits. One kernel for each (dtype, head dim,
    visibility kind); one launch plan for each set of shapes and strides.

    Args:
        q, k, v: bf16 or fp16; any strides that `layout_refusals` accepts.
        visibility: Full, causal, window or intervals.
        scale: Softmax scale, greater than 0.
        tuning: For ablations only.

    Returns:
        `[B, H, M, D]` (a view of contiguous `[B, M, H, D]` memory) in the query's dtype, and the
        natural log-sum-exp `[B, H, M]` in fp32. A row that sees nothing has 0 and -inf.

    Raises:
        CallRefusedError: See `refusals`.
    """
    intervals = visibility.intervals
    if intervals is not None and not intervals.is_contiguous():
        intervals = intervals.contiguous()
    device = q.device
    query, key, value = q.data_ptr(), k.data_ptr(), v.data_ptr()
    index = device.index
    which = _which(q, k, v, intervals, visibility, scale, tuning)
    plan = _PLANS.get(which)
    if plan is None or (query | key | value) & 15:
        reasons = refusals(q, k, v, visibility, scale)
        if reasons:
            raise CallRefusedError(compose("the hopper variant cannot serve this call", reasons))
    batch, heads, m_len, head_dim = q.shape
    row = heads * head_dim
    out = torch.empty_strided(
        (batch, heads, m_len, head_dim),
        (m_len * row, head_dim, row, 1),
        dtype=q.dtype,
        device=device,
    )
    lse = torch.empty((batch, heads, m_len), dtype=torch.float32, device=device)
    if plan is None or index != torch.cuda.current_device():
        if out.numel() == 0 or k.shape[2] == 0:
            return out.zero_(), lse.fill_(float("-inf"))
        with torch.cuda.device(device):
            plan = plan or _prepare(which, q, k, v, out, lse, intervals, visibility, scale, tuning)
            if plan is None:
                return out, lse
            return _run(plan, query, key, value, out, lse, intervals, index)
    return _run(plan, query, key, value, out, lse, intervals, index)


def _which(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    intervals: Tensor | None,
    visibility: Visibility,
    scale: float,
    tuning: Tuning,
) -> tuple[object, ...]:
    """What a plan depends on; addresses are no part of it."""
    return (
        q.shape,
        q.stride(),
        k.shape,
        k.stride(),
        v.shape,
        v.stride(),
        q.dtype,
        q.device.index,
        visibility.kind,
        visibility.window,
        None if intervals is None else intervals.shape[0],
        scale,
        tuning,
    )


def bind(
    q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, scale: float
) -> Callable[[Tensor, Tensor, Tensor, Visibility], tuple[Tensor, Tensor]] | None:
    """`launch_forward` for calls of this dtype, device, scale and visibility kind, these shapes
    and strides, and addresses that are multiples of 16; None before such a call was launched.

    Args:
        q, k, v, visibility, scale: Of a call that was launched.
    """  # fmt: skip
    intervals = visibility.intervals
    rows = None if intervals is None else intervals.shape[0]
    plan = _PLANS.get(_which(q, k, v, intervals, visibility, scale, DEFAULT))
    if plan is None:
        return None
    batch, heads, m_len, head_dim = q.shape
    row = heads * head_dim
    shape, strides = (batch, heads, m_len, head_dim), (m_len * row, head_dim, row, 1)
    sums_shape, sums_strides = shape[:3], (heads * m_len, m_len, 1)
    dtype, device, index = q.dtype, q.device, q.device.index
    alike = torch.empty_like(q, device="meta").stride() == strides  # takes no memory

    def launch(
        q: Tensor, k: Tensor, v: Tensor, visibility: Visibility
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        intervals = visibility.intervals
        if index != torch.cuda.current_device() or (
            intervals is not None and (intervals.shape[0] != rows or not intervals.is_contiguous())
        ):
            return launch_forward(q, k, v, visibility, scale)
        if alike:
            out = torch.empty_like(q)  # cheaper, where it gives the same
        else:
            out = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        lse = torch.empty_strided(sums_shape, sums_strides, dtype=torch.float32, device=device)
        sums = lse.data_ptr()
        plan.launch(
            torch._C._cuda_getCurrentRawStream(index),
            (q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()),
            (sums, sums if intervals is None else intervals.data_ptr()),
        )
        return out, lse

    return launch


def _run(
    plan: Plan,
    query: int,
    key: int,
    value: int,
    out: Tensor,
    lse: Tensor,
    intervals: Tensor | None,
    index: int,
) -> tuple[Tensor, Tensor]:
    """Launch a plan on the device's current stream."""
    sums = lse.data_ptr()
    plan.launch(
        torch._C._cuda_getCurrentRawStream(index),
        (query, key, value, out.data_ptr()),
        (sums, sums if intervals is None else intervals.data_ptr()),
    )
    return out, lse


def _prepare(
    which: tuple[object, ...],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    intervals: Tensor | None,
    visibility: Visibility,
    scale: float,
    tuning: Tuning,
) -> Plan | None:
    """Compile the kernel of a call class if need be, and keep a plan for this call.

    Where Triton's calling convention is not the known one, the call is launched through Triton
    and the answer is None.
    """
    batch, heads, m_len, head_dim = q.shape
    n_len, group, kind = k.shape[2], heads // k.shape[1], visibility.kind
    m_tiles = -(-m_len // TILE)
    section = section_heads(kind, n_len, head_dim, group, batch * heads, tuning.l2_bytes)
    sections = -(-batch * heads // section)
    programs = min(batch * heads * m_tiles, device_facts(q.device.index)[1])
    scalars = (
        float(scale) * _LOG2_E,
        batch * heads,
        heads,
        m_len,
        n_len,
        min(visibility.window or 0, 2**30),
        m_tiles,
        section,
        sections,
        2 * m_len if intervals is not None and intervals.shape[0] > 1 else 0,
        batch * heads * m_tiles // programs,
        inverse(section * m_tiles),
        inverse(section),
        inverse(batch * heads - (sections - 1) * section),
        inverse(heads),
        inverse(group),
    )
    tensors = (q, k, v, out)
    lazy = head_dim >= tuning.lazy_from
    kernel_key = (q.dtype, head_dim, kind, q.device.index, tuning.turns, lazy)
    if _KERNELS.get(kernel_key) is None:
        from hf_attn_backends.kernels.hopper.forward_kernels import attention_forward

        compiled = attention_forward[(programs,)](
            *(_descriptor(tensor, rows) for tensor, rows in zip(tensors, _ROWS, strict=True)),
            lse,
            lse if intervals is None else intervals,
            *scalars,
            KIND=KINDS.index(kind),
            BN=KEYS,
            D=head_dim,
            TURNS=tuning.turns,
            LAZY=lazy,
            num_warps=4,
            enable_fp_fusion=True,
        )
        _KERNELS[kernel_key] = BoundKernel.of(compiled, len(scalars) + 2)
    kernel = _KERNELS[kernel_key]
    if kernel is None:
        return None
    maps = [
        Map.of(tensor, safe_strides(tensor), metadata)
        for tensor, metadata in zip(tensors, kernel.maps, strict=True)
    ]
    if len(_PLANS) >= _PLANS_KEPT:
        _PLANS.clear()
    plan = _PLANS[which] = Plan(kernel, maps, (None, None, *scalars), programs)
    return plan
