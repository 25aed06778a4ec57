"""Who served the calls of a run, with each one's share and why: what `auto` leaves open."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from hf_attn_backends import dispatch

Counts = Iterable[Mapping[str, Any]]
"""A rank's counts as the record holds them: backend, phase, call_class, launches."""


def served_by(ranks: Iterable[Counts]) -> list[dict[str, Any]]:
    """The forward launches of all ranks by backend and call class, most first.

    Returns:
        Rows of `backend`, `call_class`, `launches`, `share` (of all forward launches, in [0, 1])
        and `why`: what this rank's dispatch answered for the class.
    """
    counted: Counter[tuple[str, str]] = Counter()
    for rows in ranks:
        for row in rows:
            if row["phase"] == "forward":
                counted[row["backend"], row["call_class"]] += row["launches"]
    why = dispatch.served_reasons()
    unknown = "unknown: it was dispatched on another rank, or by the model's own decision"
    return [
        {
            "backend": backend,
            "call_class": call_class,
            "launches": launches,
            "share": round(launches / counted.total(), 4),
            "why": why.get((backend, call_class), unknown),
        }
        for (backend, call_class), launches in counted.most_common()
    ]
