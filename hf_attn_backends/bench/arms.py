"""Every implementation that can be timed, under one calling convention.

An arm takes query `[B, H, S, D]`, key and value `[B, G, S, D]` (views of `[B, S, heads, D]`
memory) and returns `[B, H, S, D]`. Names are torch's own for SDPA's kernels and transformers' own
for the rest; `triton_fa2:triton` and `triton_fa2:hopper` are the two variants of `triton_fa2`.
An arm that cannot run here says why: `Unavailable` carries the reason that is printed beside NaN.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf_attn_backends.bench import ablations
from hf_attn_backends.bench.arm import Arm, Unavailable
from hf_attn_backends.bench.peer_arms import flash_arm, flex_arm
from hf_attn_backends.bench.workload import Workload
from hf_attn_backends.errors import BenchmarkError

SDPA_KERNELS = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
PEERS = (
    *SDPA_KERNELS,
    "flex_attention",
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
    "triton_fa2:triton",
    "triton_fa2:hopper",
)
# MATH and eager hold several score matrices at once (three forward, more backward). Above this
# size of one matrix they take most of a 141 GB card and seconds a call.
SCORE_BYTES_LIMIT = 9 << 30


def arm_for(name: str, workload: Workload) -> Arm:
    """Build an arm.

    Raises:
        Unavailable: Known, but it cannot run this workload on this machine.
        BenchmarkError: Nothing has that name.
    """
    if name in SDPA_KERNELS:
        return _sdpa_arm(name, workload)
    base, _, variant = name.partition(":")
    maker = _MAKERS.get(base)
    if maker is not None and (not variant or base in ("triton_fa2", ablations.NAME)):
        return maker(name, workload)
    return _dispatched_arm(name, workload)


def _sdpa_arm(name: str, workload: Workload) -> Arm:
    kernel = getattr(SDPBackend, name)
    if name == "MATH":
        _need_score_memory(name, workload)
    if workload.device.startswith("cpu") and name not in ("FLASH_ATTENTION", "MATH"):
        raise Unavailable(f"SDPA has no {name} kernel for CPU tensors")

    plain = _sdpa_default(name, workload)
    return Arm(
        name,
        plain.attend,
        source=f"torch {torch.__version__}",
        context=lambda: sdpa_kernel([kernel]),
    )


def _sdpa_default(name: str, workload: Workload) -> Arm:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=workload.causal, enable_gqa=True
        )

    return Arm(name, attend, source=f"torch {torch.__version__}, its own choice of kernel")


def _eager(name: str, workload: Workload) -> Arm:
    _need_score_memory(name, workload)
    group = workload.heads // workload.kv_heads
    ones = torch.ones(workload.seq_len, workload.seq_len, dtype=torch.bool, device=workload.device)
    hidden = ones.triu(1) if workload.causal else None

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = (tensor.repeat_interleave(group, 1) for tensor in (key, value))
        scores = (query @ key.mT) * workload.head_dim**-0.5
        if hidden is not None:
            scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        return scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ value

    return Arm(name, attend, source="matmul, softmax in float32, matmul")


def _triton_fa2(name: str, workload: Workload) -> Arm:
    variant = name.partition(":")[2] or "auto"
    if workload.device.startswith("cpu"):
        raise Unavailable("on a CPU the kernel runs only in Triton's interpreter: nothing to time")
    from hf_attn_backends.kernels import ops
    from hf_attn_backends.kernels.visibility import CAUSAL, FULL

    if variant not in ("auto", *ops.VARIANTS):
        raise BenchmarkError(f"triton_fa2 has the variants {', '.join(ops.VARIANTS)}, got {name!r}")
    visibility = CAUSAL if workload.causal else FULL

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return ops.triton_attention(query, key, value, visibility, variant=variant)

    return Arm(name, attend, source=f"variant {variant}")


def _never(name: str, workload: Workload) -> Arm:
    raise Unavailable(
        {
            "flashmla": "FlashMLA computes latent attention with a 512-wide value head; "
            "head_dim 576 over 512, one key/value head; no GQA model has such a call",
            "triton_decode": "serves calls out of a KV cache without gradients, "
            "not the full-length shapes that are timed here",
        }[name]
    )


def _dispatched_arm(name: str, workload: Workload) -> Arm:
    """A plugged-in backend, called through the dispatcher."""
    from hf_attn_backends.backends import AttentionBackendFactory
    from hf_attn_backends.dispatch import attention

    known = sorted({*SDPA_KERNELS, *_MAKERS, *AttentionBackendFactory.list_registered()})
    if name not in known:
        raise BenchmarkError(f"nothing to time is called {name!r}; known: {', '.join(known)}")

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attention(query, key, value, is_causal=workload.causal, backend=name)

    return Arm(name, attend, source="plug-in, through attention()")


def _need_score_memory(name: str, workload: Workload) -> None:
    if workload.score_bytes > SCORE_BYTES_LIMIT:
        raise Unavailable(
            f"{name} would hold score matrices of {workload.score_bytes / 2**30:.0f} GiB each "
            f"(limit {SCORE_BYTES_LIMIT / 2**30:.0f} GiB)"
        )


_MAKERS: dict[str, Callable[[str, Workload], Arm]] = {
    "eager": _eager,
    "sdpa": _sdpa_default,
    "flash_attention_2": flash_arm,
    "flash_attention_3": flash_arm,
    "flash_attention_4": flash_arm,
    "flex_attention": flex_arm,
    "triton_fa2": _triton_fa2,
    "triton_decode": _never,
    "flashmla": _never,
    ablations.NAME: ablations.ablation_arm,
}
