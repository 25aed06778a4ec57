"""What a run of transformers' tests with triton_fa2 says, beside the same run without it.

Reads the two logs that `peer_suite_plugin.py` wrote. A test counts as passed only where the witness
saw a launch of ours in it.
"""

from __future__ import annotations

import collections
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VERDICTS = {
    "passed": "passed, and kernels of triton_fa2 ran in it",
    "failed": "fails with triton_fa2 and not without it",
    "stopped": "took longer than --timeout, or took its process down, with triton_fa2 only",
    "refused": "triton_fa2 refused a model or a call in it, with reasons",
    "not exercised": "passed or skipped itself without a single launch of triton_fa2",
    "fails alone": "fails or is stopped without triton_fa2 too",
    "skipped": "skips itself with and without triton_fa2",
    "not run": "the run ended before its turn",
}
OURS_TO_FIX = ("failed", "stopped")
_BAD = ("failed", "died")

_TIMEOUT = re.compile(r"\bTimeout\b.*pytest-timeout")
_DIED = {
    "outcome": "died", "launches": 0, "seconds": 0.0, "refusals": [], "where": [],
    "error": "the process ended in this test",
}  # fmt: skip
_CALL_CLASS = re.compile(r"\b(float32|float16|bfloat16)/d\d+/[a-z+/]+")
_DIGITS = re.compile(r"0x[0-9a-f]+|\b[0-9a-f]{16,}\b|(?<![A-Za-z_0-9])\d+")


@dataclass(frozen=True, slots=True)
class Verdict:
    """One test's verdict.

    Attributes:
        test: pytest's node id, relative to the checkout.
        family: The folder of the test's model.
        verdict: A key of `VERDICTS`.
        launches: Launches of triton_fa2 in it.
        seconds: With triton_fa2.
        reasons: Of a refusal, a failure or a skip.
        where: The innermost places of a failure.
    """

    test: str
    family: str
    verdict: str
    launches: int = 0
    seconds: float = 0.0
    reasons: tuple[str, ...] = ()
    where: tuple[str, ...] = ()


def read_logs(folder: Path, role: str) -> dict[str, dict[str, Any] | None]:
    """The last row of each test of one role; None for one that was collected and never began.

    Args:
        folder: Holds one file for each pytest process, numbered in their order: a later one ran
            tests again.
        role: `ours` or `control`.
    """
    found: dict[str, dict[str, Any] | None] = {}
    for path in sorted(folder.glob(f"{role}-*.jsonl")):
        rows: dict[str, dict[str, Any] | None] = {}
        for line in path.read_text().splitlines():
            row = json.loads(line)
            for test in row.get("collected", ()):
                rows.setdefault(test, None)
            if "began" in row:
                rows[row["began"]] = {**_DIED, "test": row["began"]}
            if "test" in row:
                before = rows.get(row["test"])
                if before is None or before["outcome"] != "failed":  # a teardown may fail too
                    rows[row["test"]] = row
        found.update(rows)
    return found


def without_us(ours: dict[str, dict[str, Any] | None], files: Sequence[str]) -> list[str]:
    """What the control has to run: of these files everything that did not pass with ours."""
    if not ours:
        return list(files)
    return [
        test
        for test, row in ours.items()
        if row is not None and row["outcome"] != "passed" and test.partition("::")[0] in files
    ]


def unproven(rows: dict[str, dict[str, Any] | None]) -> tuple[list[str], set[str]]:
    """Tests that were refused for want of the gate's coverage, and the commands that extend it."""
    tests, commands = [], set()
    for test, row in rows.items():
        if row and row["refusals"]:
            text = "\n".join([row["error"] or "", *row["refusals"]])
            found = re.findall(r"hf-attn (gate(?: --[a-z-]+ [a-z0-9+]+)+)", text)
            commands.update(found)
            tests += [test] if found else []
    return tests, commands


def judge_all(
    ours: dict[str, dict[str, Any] | None], control: dict[str, dict[str, Any] | None]
) -> list[Verdict]:
    """The verdict on every test that either run collected, in the order of their names."""
    return [judge(test, ours.get(test), control.get(test)) for test in sorted({*ours, *control})]


def judge(test: str, ours: dict[str, Any] | None, control: dict[str, Any] | None) -> Verdict:
    """The verdict on one test, from its row in each run; None where it never began."""
    family = family_of(test)
    if ours is None:
        return Verdict(test, family, "not run")
    facts = {"launches": ours["launches"], "seconds": ours["seconds"]}
    error = (ours["error"] or "",)
    if ours["outcome"] in _BAD:
        if ours["refusals"]:
            return Verdict(test, family, "refused", reasons=tuple(ours["refusals"]), **facts)
        verdict = "failed"
        if control is not None and control["outcome"] in _BAD:
            verdict = "fails alone"
        elif ours["outcome"] == "died" or _TIMEOUT.search(error[0]):
            verdict = "stopped"
        return Verdict(test, family, verdict, reasons=error, where=tuple(ours["where"] or ()),
                       **facts)  # fmt: skip
    if ours["outcome"] == "skipped":
        same = control is not None and control["outcome"] == "skipped"
        return Verdict(test, family, "skipped" if same else "not exercised", reasons=error, **facts)
    return Verdict(test, family, "passed" if ours["launches"] else "not exercised", **facts)


def family_of(test: str) -> str:
    """The model's folder in `tests/models/FAMILY/test_modeling_FAMILY.py::…`."""
    parts = test.partition("::")[0].split("/")
    return parts[-2] if len(parts) > 1 else parts[-1]


def counts(verdicts: Iterable[Verdict], families: Iterable[str] = ()) -> dict[str, dict[str, int]]:
    """How many tests of each family have each verdict; `families` come first, tests or none."""
    table = {family: dict.fromkeys(VERDICTS, 0) for family in families}
    for one in verdicts:
        row = table.setdefault(one.family, dict.fromkeys(VERDICTS, 0))
        row[one.verdict] += 1
    return table


def grouped(verdicts: Iterable[Verdict], verdict: str) -> list[tuple[str, list[Verdict]]]:
    """Tests of one verdict by what their reasons say, numbers and classes aside; largest first."""
    groups: dict[str, list[Verdict]] = collections.defaultdict(list)
    for one in verdicts:
        if one.verdict == verdict:
            for reason in dict.fromkeys(kind_of(reason) for reason in one.reasons or ("",)):
                groups[reason].append(one)
    return sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))


def kind_of(reason: str) -> str:
    """A reason's first line without what differs from test to test."""
    first = next((line for line in reason.splitlines() if line.strip()), "").strip()
    return _DIGITS.sub("#", _CALL_CLASS.sub("CLASS", first))[:300]
