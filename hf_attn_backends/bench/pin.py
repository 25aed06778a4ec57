"""Measures the baseline of this machine's GPU and writes its file."""

from __future__ import annotations

import math
import re
from pathlib import Path

import torch

from hf_attn_backends import environment
from hf_attn_backends.bench import results
from hf_attn_backends.bench.arms import SDPA_KERNELS
from hf_attn_backends.bench.baselines import LENGTHS, WORKLOAD, Baseline, write_baseline
from hf_attn_backends.bench.measure import Progress, Row, measure
from hf_attn_backends.bench.timing import MODES_GPU
from hf_attn_backends.bench.workload import Workload
from hf_attn_backends.errors import BenchmarkError

MODE = MODES_GPU[0]


def baseline_workload(length: int, device: str) -> Workload:
    """The workload of the baselines at one length."""
    return Workload(
        batch=WORKLOAD["batch"],
        seq_len=length,
        heads=WORKLOAD["heads"],
        kv_heads=WORKLOAD["kv_heads"],
        head_dim=WORKLOAD["head_dim"],
        dtype=getattr(torch, WORKLOAD["dtype"]),
        causal=WORKLOAD["causal"],
        device=device,
    )


def measure_baseline(device: str, progress: Progress = lambda text: None) -> list[Row]:
    """Time SDPA's kernels at every length of the baseline."""
    rows: list[Row] = []
    for length in LENGTHS:
        rows += measure(
            baseline_workload(length, device),
            SDPA_KERNELS,
            phases=(WORKLOAD["phase"],),
            modes=(MODE,),
            budget_s=1.5,
            progress=progress,
        )
    return rows


def pin(
    device: str,
    *,
    commit: str | None = None,
    path: Path | None = None,
    progress: Progress = lambda text: None,
) -> tuple[Baseline, Path]:
    """Measure and write the baseline of a GPU.

    Args:
        device: A CUDA device.
        commit: The commit that is measured, where the code lies in no repository.
        path: Where to write; None for the package's own folder.

    Raises:
        BenchmarkError: `device` is no GPU, or the commit is not known, or is none.
    """
    if not device.startswith("cuda"):
        raise BenchmarkError(f"a baseline is pinned on a GPU, got device {device!r}")
    commit = commit or _commit()
    if not re.fullmatch(r"[0-9a-f]{7,64}( with changes)?", commit):
        raise BenchmarkError(f"commit must be the hex digits of one, got {commit!r}")
    rows = measure_baseline(device, progress)
    facts = environment.device_facts(device)
    times: dict[str, dict[str, float]] = {str(length): {} for length in LENGTHS}
    reasons: dict[str, dict[str, str]] = {str(length): {} for length in LENGTHS}
    timing = "unknown: no kernel ran"
    for row in rows:
        length = str(row.workload.seq_len)
        times[length][row.arm] = row.timing.ms
        if math.isnan(row.timing.ms):
            reasons[length][row.arm] = row.timing.reason
        else:
            timing = "median of CUDA-graph replays between CUDA events, kernels taking turns"
    baseline = Baseline(
        device=str(facts["name"]),
        torch=environment.versions()["torch"],
        driver=str(facts["driver"]),
        date=results.now(),
        commit=commit,
        command=results.command_line(),
        timing=timing,
        median_ms=times,
        reasons=reasons,
    )
    return baseline, write_baseline(baseline, path)


def _commit() -> str:
    state = environment.code_state()
    package = state.get("package")
    if not isinstance(package, dict) or not package.get("commit"):
        raise BenchmarkError(
            "the commit that is measured must be known, and this code lies in no repository; "
            "give it with --commit"
        )
    return f"{package['commit']}{' with changes' if package.get('dirty') else ''}"
