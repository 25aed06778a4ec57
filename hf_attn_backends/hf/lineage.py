"""Which run a launch belongs to: a new one, or the next attempt of one that is resumed."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_attn_backends import registry
from hf_attn_backends.errors import BackendChangedError, RecordError, compose
from hf_attn_backends.record import RunRecord

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Lineage:
    """The identity of a launch.

    Attributes:
        run_id: Stable over resumes.
        attempt: 1 for the first launch.
        event: `launch` or `resume`.
        previous: The backend that the attempt before ran under; None where nothing is known.
    """

    run_id: str
    attempt: int
    event: str
    previous: str | None = None


def trace(saved: Any, resumed: bool, copy: Path | None, main: Path) -> Lineage:
    """Find the run that is resumed.

    Args:
        saved: What the checkpoint keeps of the callback: its state, a list of such (two
            callbacks), or None (written without the callback).
        resumed: Whether training continues from a checkpoint at all.
        copy: The run's own copy of its records, in the output directory.
        main: The registry.
    """
    if not resumed:
        return Lineage(str(uuid.uuid4()), 1, "launch")
    saved = saved[0] if isinstance(saved, list) and saved else saved
    known = saved.get("attributes", {}) if isinstance(saved, Mapping) else {}
    rows = _rows(copy)
    run_id = known.get("run_id") or (rows[-1].run_id if rows else None)
    if run_id is None:
        return Lineage(str(uuid.uuid4()), 1, "resume")
    mine = [row for row in rows if row.run_id == run_id]
    mine = mine or [row for row in _rows(main) if row.run_id == run_id]
    attempts = [row.attempt for row in mine] + [known.get("attempt") or 0]
    previous = known.get("backend") or (mine[-1].attention_backend if mine else None)
    return Lineage(run_id, max(attempts) + 1, "resume", previous)


def check_backend(lineage: Lineage, backend: str, allowed: bool) -> str | None:
    """Refuse a changed backend; give the sentence that records an allowed change.

    Raises:
        BackendChangedError: The resumed run ran under another backend.
    """
    if lineage.previous in (None, backend):
        return None
    if allowed:
        return (
            f"resumed under another backend than before ({lineage.previous}), allowed by "
            "allow_backend_change=True"
        )
    raise BackendChangedError(
        compose(
            f"run {lineage.run_id} cannot be resumed under attn_implementation {backend!r}",
            [f"its attempt {lineage.attempt - 1} ran under {lineage.previous!r}"],
            works=f"attn_implementation={lineage.previous!r}, as before",
            fix="AttentionBackendCallback(allow_backend_change=True), which records the change",
        )
    )


def _rows(path: Path | None) -> list[RunRecord]:
    """The records of a file; one that cannot be read is said, and counts as empty."""
    if path is None:
        return []
    try:
        return registry.read(path)[0]
    except RecordError as error:
        _log.warning("earlier attempts are not looked up: %s", error)
        return []
