"""What one row of the run registry says, and which of it is mandatory."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from hf_attn_backends import provenance

SCHEMA_VERSION = 1
EVENTS = ("launch", "resume", "first_step", "end", "interrupted")
VERDICTS = ("matched", "mismatch", "not_observed")

#: What every row must say. Unknown is the string `unknown: <why>`, never empty and never a guess.
MANDATORY_BANNER_KEYS = (
    "schema_version",
    "record_id",
    "run_id",
    "attempt",
    "event",
    "seq",
    "time_utc",
    "attention_requested",
    "attention_origin",
    "attention_backend",
    "attention_reason",
    "attention_candidates",
    "attention_verified",
    "attention_executed",
    "attention_verdict",
    "gate",
    "model",
    "device",
    "versions",
    "code",
    "dist",
    "flags",
)

#: Keys whose null has a meaning: nothing was requested; the backend needs no gate.
_NULL_MEANS = frozenset({"attention_requested", "gate"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One row of the registry: what was decided, what was verified, what ran.

    Attributes:
        run_id: Stable over resumes.
        attempt: 1 for the first launch, one more for each resume.
        event: One of `EVENTS`.
        seq: Order of the event in its attempt, from 0.
        attention_requested: The literal request, or None for none.
        attention_origin: `argument`, `context`, `environment`, `config` or `default`.
        attention_backend: The resolved name.
        attention_reason: Why it was resolved.
        attention_candidates: `{name, available, reason}` of every backend.
        attention_verified: What the live attention modules say: `{layers, names, ok}`.
        attention_executed: What was counted at run time, or `unknown: <why>`.
        attention_verdict: One of `VERDICTS`; never inferred from the decision.
        gate: The artifact's summary, or None for a backend that needs none.
        model, device, versions, code, dist, flags: The circumstances; see `hf/launch_facts.py`.
        process: pid, start time, host and boot id, by which the status is derived.
        baseline, trackers: Optional.
        extra: Keys that a newer minor version wrote.
    """

    run_id: str
    attempt: int
    event: str
    seq: int
    attention_requested: str | None
    attention_origin: str
    attention_backend: str
    attention_reason: str
    attention_candidates: Any
    attention_verified: Any
    attention_executed: Any
    attention_verdict: str
    gate: Mapping[str, Any] | None
    model: Any
    device: Any
    versions: Any
    code: Any
    dist: Any
    flags: Any
    schema_version: int = SCHEMA_VERSION
    record_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    time_utc: str = field(default_factory=lambda: utc_now())
    process: Mapping[str, Any] = field(default_factory=provenance.process_identity)
    baseline: Any = None
    trackers: Any = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def as_row(self) -> dict[str, Any]:
        """The row's keys and values; optional keys only where they are set."""
        row = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        extra = row.pop("extra")
        return {k: v for k, v in row.items() if v is not None or k in _NULL_MEANS} | dict(extra)

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> RunRecord:
        """Read a row; keys that this version does not know are kept in `extra`."""
        names = {each.name for each in dataclasses.fields(cls)} - {"extra"}
        known = {key: value for key, value in row.items() if key in names}
        extra = {key: value for key, value in row.items() if key not in names}
        return cls(**known, extra=extra)


def utc_now() -> str:
    """The time, RFC 3339 with milliseconds and Z."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def incomplete_keys(row: Mapping[str, Any]) -> list[str]:
    """Every mandatory key of the row that is missing or empty, nested keys as `device.name`."""
    found = []
    for key in MANDATORY_BANNER_KEYS:
        if key not in row or (row[key] is None and key not in _NULL_MEANS):
            found.append(f"{key} is missing")
        elif row[key] is not None:
            found += [f"{name} is empty" for name in _empties(key, row[key])]
    return found


def _empties(name: str, value: Any) -> list[str]:
    if isinstance(value, str):
        return [] if value.strip() else [name]
    if isinstance(value, Mapping) and value:
        return [each for k, v in value.items() for each in _empties(f"{name}.{k}", v)]
    if isinstance(value, Mapping | list | tuple | set | frozenset) and "." not in name:
        return [] if value else [name]
    return []
