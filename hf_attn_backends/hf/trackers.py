"""Mirrors of the banner in the trackers that the run already reports to. Best effort.

The registry is the record; a mirror is written after it, and one that fails is said once and
never stops training. Paths, command lines and environments stay local.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hf_attn_backends.record import RunRecord

_log = logging.getLogger(__name__)
_MLFLOW_TAG_LIMIT = 5000  # characters; longer values are refused by older servers

_said: set[str] = set()


def mirrored_values(record: RunRecord) -> dict[str, str]:
    """The values that trackers get, flat, under `attention/`."""
    gate = record.gate or {}
    verified = record.attention_verified
    values = {
        "backend": record.attention_backend,
        "requested": record.attention_requested or "nothing",
        "origin": record.attention_origin,
        "reason": record.attention_reason,
        "verdict": record.attention_verdict,
        "layers": verified.get("layers") if isinstance(verified, Mapping) else verified,
        "gate_artifact_sha256": gate.get("artifact_sha256") or "no gate",
        "kernel_source_sha256": gate.get("kernel_source_sha256") or "no gate",
        "run_id": record.run_id,
        "attempt": record.attempt,
    }
    return {f"attention/{key}": str(value) for key, value in values.items()}


def mirror(record: RunRecord, args: Any) -> None:
    """Write a record's values to every tracker in `args.report_to` that has a live run."""
    values = mirrored_values(record)
    for name in getattr(args, "report_to", None) or ():
        write = _MIRRORS.get(name)
        if write is None:
            continue
        try:
            write(values, args)
        except Exception as error:  # a tracker's failure of any kind must not stop training
            if name not in _said:
                _said.add(name)
                _log.warning(
                    "%s did not take the attention record (training goes on, the registry has "
                    "it): %s: %s", name, type(error).__name__, error,
                )  # fmt: skip


def _wandb(values: Mapping[str, str], _: Any) -> None:
    run = getattr(sys.modules.get("wandb"), "run", None)
    if run is not None:
        run.config.update(dict(values), allow_val_change=True)


def _mlflow(values: Mapping[str, str], _: Any) -> None:
    mlflow = sys.modules.get("mlflow")
    if mlflow is not None and mlflow.active_run() is not None:
        # Tags, not parameters: a parameter cannot be written again when a run is resumed.
        mlflow.set_tags({key: value[:_MLFLOW_TAG_LIMIT] for key, value in values.items()})


def _trackio(values: Mapping[str, str], _: Any) -> None:
    trackio = sys.modules.get("trackio")
    if trackio is not None:
        trackio.config.update(dict(values), allow_val_change=True)


def _tensorboard(values: Mapping[str, str], args: Any) -> None:
    """A second event file beside the Trainer's: callbacks do not see one another's writers."""
    chosen = os.environ.get("TENSORBOARD_LOGGING_DIR")
    folder = Path(chosen).expanduser() if chosen else _newest(Path(args.output_dir) / "runs")
    if folder is None:
        return
    try:
        board = importlib.import_module("torch.utils.tensorboard")
    except ImportError:
        board = importlib.import_module("tensorboardX")
    writer = board.SummaryWriter(log_dir=str(folder), filename_suffix=".attention")
    try:
        for key, value in values.items():
            writer.add_text(key, value)
    finally:
        writer.close()


def _newest(folder: Path) -> Path | None:
    """The log folder that the Trainer made last."""
    made = [each for each in folder.glob("*") if each.is_dir()] if folder.is_dir() else []
    return max(made, key=lambda each: each.stat().st_mtime, default=None)


_MIRRORS: dict[str, Callable[[Mapping[str, str], Any], None]] = {
    "mlflow": _mlflow,
    "tensorboard": _tensorboard,
    "trackio": _trackio,
    "wandb": _wandb,
}
