"""README's table of transformers' own tests, from what `peer_suite.py --json` kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from readme_bench import line, rule

COLUMNS = ("passed", "failed", "stopped", "refused", "not exercised", "fails alone")


def peer_suite(results: Path) -> str:
    """One table for each `*-peer-suite.json`: tests by family and verdict, and the refusals.

    Args:
        results: The folder of measured results.
    """
    files = sorted(results.glob("*-peer-suite.json"))
    if not files:
        return "not run (`scripts/peer_suite.py --json` makes it)"
    return "\n\n".join(_table(json.loads(path.read_text())) for path in files)


def _table(found: dict[str, Any]) -> str:
    versions, device = found["versions"], found["device"]
    where = device["name"] if device["type"] == "cuda" else "CPU, Triton's interpreter"
    lines = [
        f"{where}; tests of {found['tests']}, transformers {versions['transformers']}, torch "
        f"{versions['torch']}, triton {versions['triton']}; {found['launches']:,} launches:",
        "",
        line(["family", *COLUMNS]),
        rule(len(COLUMNS) + 1),
    ]
    total = dict.fromkeys(COLUMNS, 0)
    for family, row in found["families"].items():
        if any(row.values()):
            lines.append(line([family, *(str(row[name] or "") for name in COLUMNS)]))
            total = {name: total[name] + row[name] for name in COLUMNS}
    lines.append(line(["all", *(str(total[name]) for name in COLUMNS)]))
    empty = [family for family, row in found["families"].items() if not any(row.values())]
    if empty:
        lines += ["", f"No such tests upstream: {', '.join(empty)}."]
    refused = found["reasons"]["refused"]
    if refused:
        lines += ["", "Refused:", ""]
        lines += [f"* {one['tests']} ({', '.join(one['families'])}): {one['reason']}"
                  for one in refused]  # fmt: skip
    return "\n".join(lines)
