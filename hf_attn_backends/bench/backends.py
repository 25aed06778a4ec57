"""The two functions for users: a backend's name -> its time, with or without the reason."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_attn_backends.bench.arms import SDPA_KERNELS
from hf_attn_backends.bench.measure import measure
from hf_attn_backends.bench.workload import Workload

# SDPA's kernels one by one, then every backend that a model can be loaded with.
DEFAULT_NAMES = (
    *SDPA_KERNELS,
    "eager",
    "sdpa",
    "flash_attention_2",
    "flash_attention_3",
    "flex_attention",
    "triton_fa2",
    "triton_decode",
    "flashmla",
)


def benchmark_backends(
    names: Sequence[str] | None = None,
    *,
    batch: int = 4,
    seq_len: int = 512,
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    causal: bool = True,
    phase: str = "forward",
    device: str | None = None,
    verify: bool = True,
    budget_s: float = 0.6,
) -> dict[str, float]:
    """Time attention backends on one shape: name -> median milliseconds, NaN for what cannot run.

    On a GPU: replays of CUDA graphs between CUDA events, the backends taking turns. On a CPU:
    `time.perf_counter`. Each backend is compared with the fp64 oracle first; a wrong one is NaN.

    Args:
        names: Which; None for SDPA's kernels and every backend (`DEFAULT_NAMES`).
        batch, seq_len, heads, kv_heads, head_dim: The shape of self-attention.
        dtype: Of query, key and value.
        causal: Causal, or every key seen.
        phase: `forward`, or `backward` (the backward pass alone).
        device: None for the GPU where there is one, else the CPU.
        verify: False to time without comparing with the oracle.
        budget_s: Seconds of timed work for all backends together.

    Raises:
        BenchmarkError: A name that nothing has, or numbers that make no shape.
    """
    reasoned = benchmark_backends_with_reasons(
        names,
        batch=batch,
        seq_len=seq_len,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        causal=causal,
        phase=phase,
        device=device,
        verify=verify,
        budget_s=budget_s,
    )
    return {name: ms for name, (ms, _) in reasoned.items()}


def benchmark_backends_with_reasons(
    names: Sequence[str] | None = None,
    *,
    batch: int = 4,
    seq_len: int = 512,
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    causal: bool = True,
    phase: str = "forward",
    device: str | None = None,
    verify: bool = True,
    budget_s: float = 0.6,
) -> dict[str, tuple[float, str]]:
    """As `benchmark_backends`: name -> (median milliseconds or NaN, how it was timed or why not).

    The reason is never empty.
    """
    workload = Workload(
        batch=batch,
        seq_len=seq_len,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        causal=causal,
        device=device or ("cuda" if torch.cuda.is_available() else "cpu"),
    )
    rows = measure(
        workload, names or DEFAULT_NAMES, phases=(phase,), verify=verify, budget_s=budget_s
    )
    return {row.arm: (row.timing.ms, row.timing.reason) for row in rows}
