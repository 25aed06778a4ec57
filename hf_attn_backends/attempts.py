"""The state of recorded runs, derived from their rows and from the processes that wrote them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hf_attn_backends.provenance import liveness
from hf_attn_backends.record import RunRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempt of one run.

    Attributes:
        first: Its launch row.
        last: Its newest row.
        status: `finished`, `running`, `crashed`, or `unknown: <why>`.
    """

    first: RunRecord
    last: RunRecord
    status: str

    @property
    def verdict(self) -> str:
        """The newest verdict of the attempt."""
        return self.last.attention_verdict


def attempts(records: Iterable[RunRecord]) -> list[Attempt]:
    """Group rows by run and attempt, in the order of their launches."""
    groups: dict[tuple[str, int], list[RunRecord]] = {}
    for record in records:
        groups.setdefault((record.run_id, record.attempt), []).append(record)
    return [
        Attempt(first=rows[0], last=rows[-1], status=_status(rows[-1])) for rows in groups.values()
    ]


def _status(last: RunRecord) -> str:
    if last.event == "end":
        return "finished"
    if last.event == "interrupted":
        return "crashed"
    state = liveness(last.process)
    return {"alive": "running", "dead": "crashed"}.get(state, state)
