"""Rows of a measurement as strict JSON, with everything that the numbers depend on."""

from __future__ import annotations

import json
import math
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hf_attn_backends import environment
from hf_attn_backends.bench.measure import Row
from hf_attn_backends.bench.timing import L2
from hf_attn_backends.call import dtype_name

SCHEMA_VERSION = 2
_CLOCKS = "clocks.sm,clocks.mem,power.draw,temperature.gpu,clocks_event_reasons.active"


def document(
    rows: Sequence[Row],
    *,
    device: str,
    clocks: Sequence[dict[str, str]],
    commit: str | None = None,
) -> dict:
    """Everything about one measurement; NaN becomes null beside its reason.

    `commit` is what the user says was measured, for code that lies in no repository.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "command": command_line(),
        "date": now(),
        "device": environment.device_facts(device),
        "versions": environment.versions(),
        "code": {**environment.code_state(), **({"commit_given": commit} if commit else {})},
        "clocks": list(clocks),
        "rows": [_row(row) for row in rows],
    }


def write(content: dict[str, Any], path: Path) -> None:
    """Write strict JSON; a NaN that slipped through raises ValueError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")


def now() -> str:
    """The time in UTC, RFC 3339."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def command_line(program: str = "hf-attn", argv: Sequence[str] | None = None) -> str:
    """The command as typed, with names instead of absolute paths."""
    words = sys.argv[1:] if argv is None else argv
    return shlex.join([program, *(Path(w).name if w.startswith("/") else w for w in words)])


def clocks(device: str, when: str) -> dict[str, str]:
    """Clocks, power and temperature, as `nvidia-smi` reads them now; `unknown: why` without it."""
    if not device.startswith("cuda"):
        return {"when": when, "clocks": "unknown: a CPU"}
    index = device.partition(":")[2] or "0"
    ask = ["nvidia-smi", f"--id={index}", f"--query-gpu={_CLOCKS}", "--format=csv,noheader"]
    try:
        said = subprocess.run(ask, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"when": when, "clocks": f"unknown: {type(error).__name__}"}
    values = [value.strip() for value in said.stdout.strip().split(",")]
    if said.returncode or len(values) != len(_CLOCKS.split(",")):
        return {"when": when, "clocks": f"unknown: nvidia-smi said {said.stdout.strip()[:120]!r}"}
    return {"when": when, **dict(zip(_CLOCKS.split(","), values, strict=True))}


def _row(row: Row) -> dict[str, Any]:
    work = row.workload
    return {
        "shape": work.label,
        "batch": work.batch,
        "seq_len": work.seq_len,
        "heads": work.heads,
        "kv_heads": work.kv_heads,
        "head_dim": work.head_dim,
        "dtype": dtype_name(work.dtype),
        "causal": work.causal,
        "arm": row.arm,
        "source": row.source,
        "phase": row.phase,
        "mode": row.mode,
        "l2": L2[row.mode],
        "median_ms": _number(row.timing.ms),
        "low_ms": _number(row.timing.low_ms),
        "high_ms": _number(row.timing.high_ms),
        "samples": row.timing.samples,
        "tflops": _number(row.tflops),
        "peak_mib": _number(row.peak_mib),
        "errors": {
            name: {metric: _number(error) for metric, error in found.items()}
            for name, found in row.errors.items()
        },
        "reason": row.timing.reason,
    }


def _number(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None
