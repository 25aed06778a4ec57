"""What is shown and kept of a run of `peer_suite.py`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from peer_suite_verdicts import OURS_TO_FIX, VERDICTS, Verdict, counts, grouped
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hf_attn_backends import environment

REASONS = ("refused", "fails alone", "not exercised", "skipped")


def facts(checkout: Path, selection: str, timeout: int) -> dict[str, Any]:
    """What a run was made with; the version of the tests is the one that the checkout states."""
    setup = checkout / "setup.py"
    stated = re.search(r'version="([^"]+)"', setup.read_text()) if setup.exists() else None
    return {
        "schema_version": 1,
        "tests": f"transformers {stated[1]}" if stated else "unknown: the checkout has no setup.py",
        "device": environment.device_facts(environment.default_device()),
        "versions": environment.versions(),
        "selection": selection,
        "timeout": timeout,
    }


def summary(
    verdicts: list[Verdict], families: Sequence[str], made_with: dict[str, Any]
) -> dict[str, Any]:
    """What is kept: facts, counts by family, reasons by how many tests, and all that is ours."""
    return {
        **made_with,
        "verdicts": VERDICTS,
        "families": counts(verdicts, families),
        "launches": sum(one.launches for one in verdicts),
        "reasons": {
            verdict: [
                {"reason": reason, "tests": len(tests), "families": _families(tests)}
                for reason, tests in grouped(verdicts, verdict)
            ]
            for verdict in REASONS
        },
        "to_fix": [asdict(one) for one in verdicts if one.verdict in OURS_TO_FIX],
    }


def show(verdicts: list[Verdict], families: Sequence[str], console: Console) -> None:
    """Print the table of families, then why tests were refused or failed."""
    table = Table(title="transformers' own tests, with triton_fa2")
    for column in ("family", *VERDICTS):
        table.add_column(column)
    for family, row in counts(verdicts, families).items():
        table.add_row(family, *(str(row[verdict] or "") for verdict in VERDICTS))
    console.print(table)
    for verdict in (*OURS_TO_FIX, *REASONS[:-1]):
        for reason, tests in grouped(verdicts, verdict):
            console.print(
                f"[bold]{verdict}[/] {len(tests)} ({', '.join(_families(tests))}): "
                f"{escape(reason) or 'no kernel of ours was launched'}",
                soft_wrap=True,
            )
    for one in verdicts:
        if one.verdict in OURS_TO_FIX:
            console.print(f"[red]{one.verdict}[/] {escape(one.test)}", soft_wrap=True)


def _families(tests: list[Verdict]) -> list[str]:
    return sorted({one.family for one in tests})
