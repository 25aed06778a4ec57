"""`hf-attn runs`: the recorded runs of this machine, and whether their registry is sound."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_attn_backends import registry, report
from hf_attn_backends.attempts import Attempt, attempts
from hf_attn_backends.errors import RecordError, compose
from hf_attn_backends.record import RunRecord
from hf_attn_backends.strict_json import plain

_STYLES = {"matched": "green", "mismatch": "bold red", "crashed": "red", "running": "cyan"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("run_id", nargs="?", help="one run (the first characters do): its rows")
    parser.add_argument("--json", action="store_true", help="strict JSON on standard output")
    parser.add_argument("--verify", action="store_true", help="check the chain; 1 if it is broken")
    parser.add_argument(
        "--registry",
        type=Path,
        metavar="PATH",
        help=f"a registry, or an output directory that holds {registry.COPY_NAME}",
    )


def run(args: argparse.Namespace) -> int:
    """List, show or verify; returns the exit code."""
    path = args.registry or registry.registry_path()
    if path.is_dir():
        path = path / registry.COPY_NAME
    if args.registry is not None and not path.exists():
        raise RecordError(compose("the runs cannot be listed", [f"there is no {path}"]))
    if args.verify:
        return _verify(path, args.json)
    records, notes = registry.read(path)
    for note in notes:
        print(f"{path}: {note}", file=sys.stderr)
    if args.run_id is None:
        _list(path, attempts(records), notes, args.json)
    else:
        _show(_rows_of(records, args.run_id, path), args.json)
    return 0


def _verify(path: Path, as_json: bool) -> int:
    rows, problems, notes = registry.verify(path)
    if as_json:
        found = {"registry": path, "rows": rows, "problems": problems, "notes": notes}
        _print_json({**found, "ok": not problems})
    else:
        for line in (*(f"note: {note}" for note in notes), *problems):
            print(line)
        state = "BROKEN" if problems else "sound: every row is intact and linked"
        print(f"{path}: {rows} rows, {state}")
    return 1 if problems else 0


def _list(path: Path, found: list[Attempt], notes: list[str], as_json: bool) -> None:
    if as_json:
        _print_json({"registry": path, "notes": notes, "attempts": [_summary(a) for a in found]})
        return
    columns = ("run", "attempt", "mode", "launched", "backend", "verdict", "launches", "status")
    rows = []
    for each in found:
        summary = _summary(each)
        rows.append(
            (
                summary["run_id"][:8],
                summary["attempt"],
                summary["mode"],
                summary["launched"],
                summary["attention_backend"],
                summary["attention_verdict"],
                summary["forward_launches"],
                summary["status"],
            )
        )
    caption = None if rows else "no runs yet: AttentionBackendCallback() in Trainer(callbacks=[…])"
    report.show(report.table(columns, rows, title=str(path), caption=caption, styles=_STYLES))


def _show(rows: list[RunRecord], as_json: bool) -> None:
    if as_json:
        _print_json([row.as_row() for row in rows])
        return
    for each in attempts(rows):
        last = each.last
        shown = {"status": each.status, "rows": ", ".join(_events(rows, each)), **last.as_row()}
        executed = shown.pop("attention_executed")
        reports = shown.pop("attention_candidates")
        counts = _counts(executed)
        cells = [(key, _text(value)) for key, value in shown.items()]
        if isinstance(executed, Mapping):
            rest = {k: v for k, v in executed.items() if k != "by_rank"}
            cells += [(f"attention_executed.{k}", _text(v)) for k, v in rest.items()]
        else:
            cells.append(("attention_executed", executed))
        title = f"run {last.run_id}, attempt {last.attempt}"
        report.show(report.table(("key", "value"), cells, title=title, styles=_STYLES))
        if isinstance(reports, list):
            columns = ("name", "available", "reason")
            report.show(report.table(columns, [[row.get(c) for c in columns] for row in reports]))
        if counts:
            columns = ("rank", *(key for key in counts[0] if key != "rank"))
            report.show(report.table(columns, [[row.get(c) for c in columns] for row in counts]))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(plain(value), ensure_ascii=False)


def _events(rows: list[RunRecord], attempt: Attempt) -> list[str]:
    mine = (row for row in rows if row.attempt == attempt.last.attempt)
    return [f"{row.event} {row.time_utc}" for row in mine]


def _summary(attempt: Attempt) -> dict[str, Any]:
    first, last = attempt.first, attempt.last
    counts = _counts(last.attention_executed)
    forward = sum(row["launches"] for row in counts if row["phase"] == "forward")
    flags = first.flags if isinstance(first.flags, Mapping) else {}
    return {
        "run_id": first.run_id,
        "attempt": first.attempt,
        "mode": flags.get("mode", "unknown: not recorded"),
        "launched": first.time_utc,
        "last_event": last.event,
        "last_time": last.time_utc,
        "attention_backend": last.attention_backend,
        "attention_verdict": attempt.verdict,
        "forward_launches": forward if counts else None,
        "status": attempt.status,
    }


def _counts(executed: Any) -> list[dict[str, Any]]:
    """The counts of every rank, one flat row each."""
    if not isinstance(executed, Mapping):
        return []
    return [{"rank": rank, **row} for rank, rows in enumerate(executed["by_rank"]) for row in rows]


def _rows_of(records: list[RunRecord], run_id: str, path: Path) -> list[RunRecord]:
    names = sorted({row.run_id for row in records if row.run_id.startswith(run_id)})
    if len(names) != 1:
        reason = f"{len(names)} runs begin with it: {', '.join(names)}" if names else "no such run"
        raise RecordError(
            compose(f"run {run_id!r} of {path} cannot be shown", [reason], fix="hf-attn runs")
        )
    return [row for row in records if row.run_id == names[0]]


def _print_json(value: Any) -> None:
    print(json.dumps(plain(value), allow_nan=False, indent=2))
