"""What the sm_90 kernels can serve: devices, versions, dtypes, head dims, memory layouts."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
from torch import Tensor

from hf_attn_backends.call import dtype_name
from hf_attn_backends.kernels.visibility import Visibility

HEAD_DIMS = (64, 128)
DTYPES = (torch.bfloat16, torch.float16)
KINDS = ("full", "causal", "window", "intervals")
TRITON_VERSIONS = ("3.6", "3.9")
TILE = 128  # query rows of a tile
_MAX = 2**31 - 1


@lru_cache(maxsize=64)
def device_facts(index: int) -> tuple[tuple[int, int], int]:
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
        major, minor = device_facts(index)[0]
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


def call_refusals(
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


def safe_strides(tensor: Tensor) -> list[int]:
    """The strides of a 4-d tensor, with harmless values where a dimension has one element."""
    last = tensor.shape[-1]
    return [
        stride if size > 1 else last
        for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    ] + [1]
