"""What a run leaves for a comparison: losses, gradient norms, and what they depend on."""

from __future__ import annotations

import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

from run_files import FILE, SCHEMA_VERSION
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

WARM_UP_STEPS = 3


class LossLog(TrainerCallback):
    """Keeps every logged step, and the seconds since the one before it.

    Logging reads the loss, so the device has finished the step when the clock is read.
    """

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, float]] = {}
        self._last = time.perf_counter()

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Start the clock of the first step."""
        self._last = time.perf_counter()

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
            now = time.perf_counter()
            self.steps[state.global_step] = {**kept, "seconds": round(now - self._last, 6)}
            self._last = now

    def steady_seconds(self) -> float:
        """The median step, without the first three: they compile and allocate. NaN below four."""
        later = [values["seconds"] for _, values in sorted(self.steps.items())][WARM_UP_STEPS:]
        return statistics.median(later) if later else math.nan


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
