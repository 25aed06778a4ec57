"""Host side of the sm_90 forward: what it can serve, and its launch.

Shapes: `B` batch, `H` query heads, `G` key/value heads, `M` query length, `N` key length, `D`
head dim. Lengths, batch, heads, window and strides are run-time values: a kernel is compiled once
for each (dtype, head dim, visibility kind).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from torch import Tensor

from hf_attn_backends.call import dtype_name
from hf_attn_backends.errors import CallRefusedError, compose
from hf_attn_backends.kernels.visibility import Visibility

HEAD_DIMS = (64, 128)
DTYPES = (torch.bfloat16, torch.float16)
KINDS = ("full", "causal", "window", "intervals")
TRITON_VERSIONS = ("3.6", "3.9")
TILE = 128  # query rows of a tile
KEYS = 128  # keys of a block
_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Tuning:
    """How the kernel is built and scheduled; other values than the default are for ablations.

    Attributes:
        half: Skip the right half of the diagonal block for a tile's upper rows.
        turns: The two consumers take turns on the tensor cores.
        l2_bytes: Keys and values that are worked on together under causality and intervals.
    """

    half: bool = True
    turns: bool = True
    l2_bytes: int = 32 * 2**20


DEFAULT = Tuning()


@lru_cache(maxsize=64)
def _device(index: int) -> tuple[tuple[int, int], int]:
    """Compute capability and number of multiprocessors of a CUDA device."""
    properties = torch.cuda.get_device_properties(index)
    return (properties.major, properties.minor), properties.multi_processor_count


def environment_refusals(device: torch.device) -> list[str]:
    """Why no call at all can be served on `device` with this Triton; empty: some can."""
    reasons = []
    version = ".".join(triton.__version__.split(".")[:2])
    if version not in TRITON_VERSIONS:
        reasons.append(
            f"the hopper variant is tested with triton {' and '.join(TRITON_VERSIONS)}, "
            f"this is {triton.__version__}"
        )
    if device.type != "cuda":
        reasons.append(f"the hopper variant needs a CUDA device of capability 9.0, not {device}")
    else:
        index = device.index if device.index is not None else torch.cuda.current_device()
        major, minor = _device(index)[0]
        if (major, minor) != (9, 0):
            reasons.append(
                f"the hopper variant needs capability 9.0 (H100, H200), {device} has "
                f"{major}.{minor}"
            )
    return reasons


def layout_refusals(name: str, tensor: Tensor) -> list[str]:
    """Why the tensor copy engine cannot read or write `tensor`; empty: it can."""
    reasons = []
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        reasons.append(f"{name} must be contiguous in its last dimension")
    unit = 16 // tensor.element_size()
    bad = [
        stride
        for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
        if size > 1 and (stride % unit or stride <= 0)
    ]
    if bad:
        reasons.append(
            f"{name} must have strides that are positive multiples of 16 bytes, "
            f"got {tuple(tensor.stride())} elements"
        )
    if tensor.data_ptr() % 16:
        reasons.append(f"{name} must begin at a multiple of 16 bytes")
    return reasons


def refusals(
    q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, scale: float | None = None
) -> list[str]:
    """Why this variant cannot serve a (valid) call; empty: it can.

    Args:
        q: `[B, H, M, D]`.
        k: `[B, G, N, D]`.
        v: `[B, G, N, E]`.
        visibility: Which keys a row sees.
        scale: Softmax scale, None for the default one.
    """
    reasons = environment_refusals(q.device)
    if q.dtype not in DTYPES:
        reasons.append(f"dtype must be bfloat16 or float16, got {dtype_name(q.dtype)}")
    if q.shape[-1] not in HEAD_DIMS or v.shape[-1] != q.shape[-1]:
        reasons.append(
            f"head_dim must be 64 or 128 and the value's the same, "
            f"got {q.shape[-1]} and {v.shape[-1]}"
        )
    if visibility.kind not in KINDS:
        reasons.append(f"visibility must be {', '.join(KINDS)}, got {visibility.kind}")
    if scale is not None and not scale > 0:
        reasons.append(f"scale must be greater than 0, got {scale}")
    if q.shape[0] * q.shape[1] * (-(-q.shape[2] // TILE) + 1) > _MAX:
        reasons.append("batch x heads x tiles must stay below 2^31")
    for name, tensor in (("query", q), ("key", k), ("value", v)):
        reasons += layout_refusals(name, tensor)
    return reasons


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


def safe_strides(tensor: Tensor) -> list[int]:
    """The strides of a 4-d tensor, with harmless values where a dimension has one element."""
    last = tensor.shape[-1]
    return [
        stride if size > 1 else last
        for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    ] + [1]


def _descriptor(tensor: Tensor, rows: int):
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

    fp32 accumulation; two runs give the same bits.

    Args:
        q, k, v: bf16 or fp16; any strides that `layout_refusals` accepts.
        visibility: Full, causal, window or intervals.
        scale: Softmax scale, greater than 0.
        tuning: For ablations only.

    Returns:
        `[B, H, M, D]` (a view of contiguous `[B, M, H, D]` memory) in the query's dtype, and the
        natural log-sum-exp `[B, H, M]` in fp32. A row that sees nothing has 0 and -inf.

    Raises:
        CallRefusedError: The visibility is dense, or a tensor cannot be read by the copy engine.
    """
    reasons = refusals(q, k, v, visibility, scale)
    if reasons:
        raise CallRefusedError(compose("the hopper variant cannot serve this call", reasons))
    batch, heads, m_len, head_dim = q.shape
    n_len, group = k.shape[2], heads // k.shape[1]
    out = q.new_empty((batch, m_len, heads, head_dim)).transpose(1, 2)
    lse = torch.empty((batch, heads, m_len), dtype=torch.float32, device=q.device)
    if out.numel() == 0 or n_len == 0:
        return out.zero_(), lse.fill_(float("-inf"))
    kind = visibility.kind
    intervals, stride = lse, 0
    if visibility.intervals is not None:
        intervals = visibility.intervals.contiguous()
        stride = 2 * m_len if intervals.shape[0] > 1 else 0
    m_tiles = -(-m_len // TILE)
    tiles = batch * heads * m_tiles
    from hf_attn_backends.kernels.hopper.forward_kernels import attention_forward

    with torch.cuda.device_of(q):
        programs = min(tiles, _device(q.device.index)[1])
        attention_forward[(programs,)](
            _descriptor(q, 64),
            _descriptor(k, KEYS),
            _descriptor(v, KEYS),
            _descriptor(out, 64),
            lse,
            intervals,
            scale * 1.4426950408889634,
            batch * heads,
            heads,
            group,
            m_len,
            n_len,
            visibility.window or 0,
            m_tiles,
            section_heads(kind, n_len, head_dim, group, batch * heads, tuning.l2_bytes),
            stride,
            KIND=KINDS.index(kind),
            BN=KEYS,
            D=head_dim,
            HALF=tuning.half,
            TURNS=tuning.turns,
            num_warps=4,
            enable_fp_fusion=True,
        )
    return out, lse
