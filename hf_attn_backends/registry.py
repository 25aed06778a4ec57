"""The run registry: one durable row for each event of a run, in strict JSON lines.

A run that is launched through the Trainer callback leaves `launch` (or `resume`) before its first
step, `first_step` once the kernel was seen to run, and `end`; `interrupted` where the process
ended without reaching the end. Every row carries every mandatory key, so that each can be read
alone. A launch without an end is a crash, or still runs: `attempts()` tells which.

The rows lie in `<home>/runs/registry.jsonl`, and the run's own also in its output directory. Both
files are append-only and chained (see `journal`); neither is complete evidence against someone who
rewrites whole files, and the two can be compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hf_attn_backends import environment, journal
from hf_attn_backends.errors import (
    BannerIncompleteError,
    RecordError,
    RegistryCorruptError,
    compose,
)
from hf_attn_backends.record import (
    EVENTS,
    MANDATORY_BANNER_KEYS,
    SCHEMA_VERSION,
    VERDICTS,
    RunRecord,
    incomplete_keys,
)

__all__ = [
    "COPY_NAME",
    "MANDATORY_BANNER_KEYS",
    "RunRecord",
    "append",
    "read",
    "registry_path",
    "verify",
]

COPY_NAME = "attention_runs.jsonl"


def registry_path() -> Path:
    """Where this user's registry lies."""
    return environment.home() / "runs" / "registry.jsonl"


def append(record: RunRecord | Mapping[str, Any], *, paths: Iterable[Path] | None = None) -> None:
    """Check a record and append it to the registry, or to each of `paths` in order.

    Raises:
        BannerIncompleteError: A mandatory key is missing or empty; nothing was written.
        RecordError: A file cannot be written.
    """
    row = record.as_row() if isinstance(record, RunRecord) else dict(record)
    reasons = incomplete_keys(row)
    if row.get("event") not in EVENTS and "event" in row:
        reasons.append(f"event is {row['event']!r}, not one of {', '.join(EVENTS)}")
    if row.get("attention_verdict") not in VERDICTS and "attention_verdict" in row:
        reasons.append(f"attention_verdict is {row['attention_verdict']!r}, not one of {VERDICTS}")
    if reasons:
        raise BannerIncompleteError(
            compose("the launch is refused: its record is incomplete", reasons,
                    works="every mandatory key filled in; unknown is 'unknown: <why>'")
        )  # fmt: skip
    for path in (registry_path(),) if paths is None else paths:
        journal.append(path, row)


def read(path: Path | None = None) -> tuple[list[RunRecord], list[str]]:
    """Read a registry: its records, and what was skipped.

    Raises:
        RegistryCorruptError: A line before the last is broken, or the chain is.
        RecordError: A row has a newer major schema, or is no run record.
    """
    path = registry_path() if path is None else path
    scan = journal.scan(path)
    if scan.problems:
        raise RegistryCorruptError(
            compose(f"the registry {path} cannot be trusted", scan.problems,
                    fix="hf-attn runs --verify, then move the file away or restore it")
        )  # fmt: skip
    return [_record(path, row) for row in scan.rows], list(scan.notes)


def verify(path: Path | None = None) -> tuple[int, list[str], list[str]]:
    """Check a registry without raising: (intact rows, problems, notes)."""
    path = registry_path() if path is None else path
    scan = journal.scan(path)
    problems = list(scan.problems)
    for number, row in enumerate(scan.rows, 1):
        try:
            _record(path, row)
        except RecordError as error:
            problems.append(str(error))
        else:
            problems += [f"row {number}: {reason}" for reason in incomplete_keys(row)]
    return len(scan.rows), problems, list(scan.notes)


def _record(path: Path, row: Mapping[str, Any]) -> RunRecord:
    version = row.get("schema_version")
    if not isinstance(version, int) or isinstance(version, bool) or version > SCHEMA_VERSION:
        raise RecordError(
            compose(f"the registry {path} cannot be read by this version",
                    [f"a row has schema_version {version!r}, this reads up to {SCHEMA_VERSION}"],
                    fix="pip install -U hf-attn-backends")
        )  # fmt: skip
    try:
        return RunRecord.of_row(row)
    except TypeError as error:
        raise RecordError(compose(f"a row of {path} is no run record", [str(error)])) from error
