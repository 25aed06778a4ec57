"""Reads what `finetune.py` left, and says what forbids a comparison."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_attn_backends.errors import LaunchError

FILE = "losses.json"
SCHEMA_VERSION = 1
# What two arms of a comparison must share; everything else may differ and is what is compared.
_MUST_AGREE = (
    ("corpus", "sha256"),
    ("corpus", "tokens"),
    ("tokenizer", "sha256"),
    ("model", "parameters"),
    ("model", "dtype"),
    ("training", "seed"),
    ("training", "sequence_length"),
    ("training", "batch"),
    ("training", "accumulation"),
    ("training", "world_size"),
    ("training", "learning_rate"),
    ("training", "bf16"),
    ("device", "name"),
    ("versions", "torch"),
)


@dataclass(frozen=True, slots=True)
class Run:
    """One run's losses.

    Attributes:
        label: The folder's name and the backend.
        facts: The whole file.
        steps: Step numbers.
        series: `loss` and `grad_norm` by step; NaN where the file has null.
    """

    label: str
    facts: dict[str, Any]
    steps: tuple[int, ...]
    series: dict[str, tuple[float, ...]]


def load_run(path: Path) -> Run:
    """Read a run's folder, or its `losses.json`.

    Raises:
        LaunchError: No such file, not one of ours, or no steps in it.
    """
    file = path / FILE if path.is_dir() else path
    try:
        facts = json.loads(file.read_text())
    except OSError as error:
        raise LaunchError(
            f"{path} must be the output folder of finetune.py: {file.name}: {error.strerror}"
        ) from error
    except ValueError as error:
        raise LaunchError(f"{file} must be JSON: {error}") from error
    version = facts.get("schema_version") if isinstance(facts, dict) else None
    if version != SCHEMA_VERSION:
        raise LaunchError(f"{file} must have schema_version {SCHEMA_VERSION}, got {version!r}")
    if not facts["steps"]:
        raise LaunchError(f"{file} must hold at least one step, got none")
    series = {
        name: tuple(
            math.nan if row.get(name) is None else float(row[name]) for row in facts["steps"]
        )
        for name in ("loss", "grad_norm")
    }
    attention = facts["attention"]
    kernel = attention["sdpa_kernel"]
    backend = attention["resolved"] + ("" if kernel == "auto" else f":{kernel}")
    steps = tuple(row["step"] for row in facts["steps"])
    return Run(f"{file.parent.name} ({backend})", facts, steps, series)


def obstacles(one: Run, other: Run) -> list[str]:
    """Everything that makes two runs no comparison of attention."""
    found = [
        f"{room}.{key} differs: {_of(one, room, key)} and {_of(other, room, key)}"
        for room, key in _MUST_AGREE
        if _of(one, room, key) != _of(other, room, key)
    ]
    if one.steps != other.steps:
        found.append(f"the logged steps differ: {len(one.steps)} and {len(other.steps)}")
    return found


def _of(run: Run, room: str, key: str) -> object:
    return run.facts.get(room, {}).get(key)
