"""Pinned times of SDPA's kernels, one file a device, and the verdicts against them.

A file is strict JSON, written only by a measurement (`hf-attn bench --pin`) on the device that it
names. A device that was not measured has no file, and asking for one raises: no number is invented.
Unit: milliseconds, the median of the forward pass, batch 4, 32 / 8 heads, head_dim 128, bfloat16,
causal. A kernel that could not run is null in the file, NaN in memory, with its reason beside it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_attn_backends.bench.arms import SDPA_KERNELS
from hf_attn_backends.errors import BenchmarkError, compose

SCHEMA_VERSION = 1
REFERENCE_DEVICE = "NVIDIA H200"
LENGTHS = (512, 1024, 2048)
WORKLOAD = {
    "batch": 4,
    "heads": 32,
    "kv_heads": 8,
    "head_dim": 128,
    "dtype": "bfloat16",
    "causal": True,
    "phase": "forward",
}
PIN_COMMAND = "hf-attn bench --pin"
FOLDER = Path(__file__).parent / "baselines"
_TEXT_KEYS = ("device", "torch", "driver", "date", "commit", "command", "timing")

Times = dict[str, dict[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """One device's pinned times.

    Attributes:
        device: The GPU's name, as its driver gives it.
        torch, driver, date, commit, command, timing: Where the numbers come from and how.
        median_ms: length -> SDPA kernel -> milliseconds or NaN.
        reasons: length -> SDPA kernel -> why it is NaN.
        workload: What was timed; `WORKLOAD` for every file of this schema.
    """

    device: str
    torch: str
    driver: str
    date: str
    commit: str
    command: str
    timing: str
    median_ms: Times
    reasons: dict[str, dict[str, str]] = field(default_factory=dict)
    workload: dict[str, Any] = field(default_factory=lambda: dict(WORKLOAD))


def baseline_path(device: str) -> Path:
    """Where the file of a device lies: `NVIDIA H200` -> `nvidia-h200.json`."""
    return FOLDER / (re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") + ".json")


def pinned_devices() -> list[str]:
    """The devices that have a file."""
    return sorted(read_baseline(path).device for path in FOLDER.glob("*.json"))


def load_baseline(device: str | None = None) -> Baseline:
    """Read the baseline of a device.

    Args:
        device: A GPU's name (`NVIDIA H200`); `cuda` or `cuda:N` for the name of that GPU; None for
            the reference device, the H200, on whatever machine this runs.

    Raises:
        BenchmarkError: That device was not measured, or its file is broken.
    """
    name = _device_name(device)
    path = baseline_path(name)
    if not path.exists():
        pinned = pinned_devices()
        raise BenchmarkError(
            compose(
                f"no SDPA baseline is pinned for {name!r}",
                ["this device was not measured, and a number is never invented for one"],
                works=f"the pinned devices: {', '.join(pinned)}" if pinned else None,
                fix=f"{PIN_COMMAND}  (on a machine that has the device)",
            )
        )
    return read_baseline(path)


def load_sdpa_baseline(device: str | None = None) -> Times:
    """The pinned times: length (as text) -> SDPA kernel -> milliseconds, NaN where it cannot run.

    `load_sdpa_baseline()["512"]["FLASH_ATTENTION"]`. See `load_baseline` for `device` and errors.
    """
    return load_baseline(device).median_ms


def read_baseline(path: Path) -> Baseline:
    """Read and check one file.

    Raises:
        BenchmarkError: Not strict JSON, another schema, or a value that cannot be a time.
    """
    try:
        row = json.loads(path.read_text(), parse_constant=_refuse_constant)
    except (OSError, ValueError) as error:
        raise BenchmarkError(f"the baseline {path.name} cannot be read: {error}") from error
    problems = list(_problems(row))
    if problems:
        raise BenchmarkError(
            compose(f"the baseline {path.name} is invalid", problems, fix=PIN_COMMAND)
        )
    times = {
        length: {kernel: math.nan if ms is None else float(ms) for kernel, ms in kernels.items()}
        for length, kernels in row["median_ms"].items()
    }
    return Baseline(
        **{key: row[key] for key in _TEXT_KEYS},
        median_ms=times,
        reasons=row["reasons"],
        workload=row["workload"],
    )


def write_baseline(baseline: Baseline, path: Path | None = None) -> Path:
    """Write a baseline as strict JSON (NaN as null), after the checks that reading makes."""
    row = {
        "schema_version": SCHEMA_VERSION,
        **{key: getattr(baseline, key) for key in _TEXT_KEYS},
        "workload": baseline.workload,
        "median_ms": {
            length: {kernel: None if math.isnan(ms) else round(ms, 6) for kernel, ms in row.items()}
            for length, row in baseline.median_ms.items()
        },
        "reasons": baseline.reasons,
    }
    problems = list(_problems(row))
    if problems:
        raise BenchmarkError(compose("the measured baseline is invalid", problems))
    path = path or baseline_path(baseline.device)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(row, indent=2, allow_nan=False) + "\n")
    return path


def _problems(row: Any) -> list[str]:
    """Everything that is wrong with a file's content."""
    if not isinstance(row, Mapping):
        return [f"it must hold one object, got {type(row).__name__}"]
    if row.get("schema_version") != SCHEMA_VERSION:
        return [f"schema_version must be {SCHEMA_VERSION}, got {row.get('schema_version')!r}"]
    found = [
        f"{key} must be a non-empty text, got {row.get(key)!r}"
        for key in _TEXT_KEYS
        if not isinstance(row.get(key), str) or not row[key]
    ]
    if row.get("workload") != WORKLOAD:
        found.append(f"workload must be {WORKLOAD}, got {row.get('workload')!r}")
    times, reasons = row.get("median_ms"), row.get("reasons")
    if not isinstance(times, Mapping) or not isinstance(reasons, Mapping):
        return [*found, "median_ms and reasons must be objects"]
    if list(times) != [str(length) for length in LENGTHS]:
        found.append(f"median_ms must have the lengths {LENGTHS}, got {list(times)}")
    for length, kernels in times.items():
        if sorted(kernels) != sorted(SDPA_KERNELS):
            found.append(f"length {length} must have {SDPA_KERNELS}, got {sorted(kernels)}")
        for kernel, ms in kernels.items():
            if ms is None and not reasons.get(length, {}).get(kernel):
                found.append(f"{kernel} at {length} is null without a reason")
            if ms is not None and not (isinstance(ms, int | float) and 0 < ms < math.inf):
                found.append(f"{kernel} at {length} must be milliseconds above 0, got {ms!r}")
    return found


def _refuse_constant(token: str) -> float:
    raise ValueError(f"{token} is not strict JSON")


def _device_name(device: str | None) -> str:
    if device is None:
        return REFERENCE_DEVICE
    if device == "cuda" or device.startswith("cuda:"):
        import torch

        if not torch.cuda.is_available():
            raise BenchmarkError(f"{device} names a GPU of this machine, and it has none")
        return torch.cuda.get_device_name(torch.device(device))
    return device
