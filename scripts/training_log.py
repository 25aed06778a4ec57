"""What a run leaves for a comparison: losses, gradient norms, and what they depend on."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

SCHEMA_VERSION = 1
FILE = "losses.json"


class LossLog(TrainerCallback):
    """Keeps every logged step; the last value of a step wins."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, float]] = {}

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Keep loss, grad_norm and learning_rate."""
        if logs and "loss" in logs:
            kept = {k: float(logs[k]) for k in ("loss", "grad_norm", "learning_rate") if k in logs}
            self.steps[state.global_step] = kept


def write_log(folder: Path, log: LossLog, facts: dict[str, Any]) -> Path:
    """Write `losses.json`, strict JSON: a loss that is not finite is null, with its name."""
    rows = []
    for step, values in sorted(log.steps.items()):
        row: dict[str, Any] = {"step": step}
        for key, value in values.items():
            row[key] = value if math.isfinite(value) else None
            if not math.isfinite(value):
                row[f"{key}_reason"] = f"not finite: {value}"
        rows.append(row)
    content = {"schema_version": SCHEMA_VERSION, **facts, "steps": rows}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    return path
