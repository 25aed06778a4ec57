"""What people see: the banner of a launch, the verdict of a run, and tables.

The banner is made of a record alone, so that it cannot say anything that the record does not.
Every line is `key=value`, so that `grep ^attention_backend=` works on any log.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hf_attn_backends.record import RunRecord

BANNER_LINES = 15
_MODEL_KEYS = ("head_dim", "n_heads", "n_kv_heads", "sliding_window", "dtype")
_WIDTH = 200  # characters of a value in the banner; the record has all of it
_PIPE_WIDTH = 160  # columns of a table that goes into a file


def banner(record: RunRecord, registry: Path, reading: str) -> str:
    """The banner of a launch, at most 15 lines.

    Args:
        record: The launch row, as it was written.
        registry: Where it was written.
        reading: How the counts of the run are to be read.
    """
    head = [
        f"attention_backend={record.attention_backend} ({'; '.join(_circumstances(record))})",
        f"attention_requested={record.attention_requested or 'nothing'} "
        f"attention_origin={record.attention_origin}",
        f"attention_reason={record.attention_reason}",
        f"attention_verified={_verified(record.attention_verified)}",
    ]
    model = record.model
    tail = [
        f"gate={_gate(record.gate)}",
        f"model={_get(model, 'model_type')}, {_pairs(model, _MODEL_KEYS)}",
        f"versions={_pairs(record.versions)}",
        f"flags={_pairs(record.flags)}",
        f"dist={_pairs(record.dist, ('world_size', 'launcher', 'agree'))}",
        f"counts={reading}",
        f"run_id={record.run_id} attempt={record.attempt} record_id={record.record_id}",
        f"registry={registry}",
    ]
    refused = [
        f"attention_refused={each['name']}: {each['reason']}"
        for each in record.attention_candidates
        if isinstance(each, Mapping) and not each.get("available")
    ]
    room = BANNER_LINES - len(head) - len(tail)
    if len(refused) > room:
        rest = [line.partition("=")[2].partition(":")[0] for line in refused[room - 1 :]]
        refused = [
            *refused[: room - 1],
            f"attention_refused={', '.join(rest)}: `hf-attn doctor` says why",
        ]
    return "\n".join(_short(" ".join(line.split())) for line in [*head, *refused, *tail])


def verdict_text(record: RunRecord) -> str:
    """The line that ends a run; several, and loud, where decision and execution disagree."""
    executed = record.attention_executed
    reason = _get(executed, "reason")
    line = f"attention_verdict={record.attention_verdict} ({reason})"
    if record.attention_verdict != "mismatch":
        return line
    rule = "!" * 88
    return (
        f"{rule}\n{line}\n  decided: {record.attention_backend}; what ran is in the record "
        f"({record.record_id}).\n  The results of this run are not those of "
        f"{record.attention_backend}.\n{rule}"
    )


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    title: str | None = None,
    caption: str | None = None,
    styles: Mapping[str, str] | None = None,
) -> Table:
    """A table of plain cells; nothing in a cell is read as markup.

    Args:
        columns: Headings.
        rows: One sequence of cells for each row; None becomes `-`.
        title: Above it.
        caption: Below it.
        styles: Style of every cell whose text is the key, such as `{"refused": "red"}`.
    """
    made = Table(title=title, caption=caption, box=SIMPLE_HEAD, title_justify="left")
    for column in columns:
        made.add_column(column, overflow="fold")
    for row in rows:
        cells = ["-" if cell is None else str(cell) for cell in row]
        made.add_row(*(Text(cell, style=(styles or {}).get(cell, "")) for cell in cells))
    return made


def show(*renderables: Any, stream: TextIO | None = None) -> None:
    """Print to a stream (standard output), with colour and the terminal's width where it is one."""
    target = sys.stdout if stream is None else stream
    width = None if target.isatty() else _PIPE_WIDTH
    console = Console(file=target, width=width, highlight=False, markup=False, soft_wrap=False)
    for each in renderables:
        console.print(each)


def _circumstances(record: RunRecord) -> list[str]:
    asked = record.attention_requested
    parts = [f"requested by {record.attention_origin}" if asked else "nothing requested"]
    if asked and asked != record.attention_backend:
        parts = [f"requested {asked} by {record.attention_origin}"]
    if record.gate:
        parts.append(f"gate ok {str(record.gate.get('artifact_sha256', ''))[:8]}…")
    device = record.device
    place = f"{_get(device, 'type')} {_get(device, 'name')}"
    capability = str(_get(device, "capability"))
    if capability[:1].isdigit():
        place += f" sm{capability.replace('.', '')}"
    return [*parts, place]


def _verified(verified: Any) -> str:
    if not isinstance(verified, Mapping):
        return str(verified)
    names = ", ".join(f"{count} run {name}" for name, count in verified["names"].items())
    return f"{'ok' if verified['ok'] else 'MISMATCH'}: {verified['layers']} modules, {names}"


def _gate(gate: Mapping[str, Any] | None) -> str:
    if gate is None:
        return "none (this backend needs none)"
    keys = ("artifact_sha256", "kernel_source_sha256", "device", "created")
    shown = {key: str(gate[key])[:20] for key in keys if key in gate}
    return f"{gate.get('status', 'ok')}, {_pairs(shown)}"


def _pairs(values: Any, keys: Sequence[str] | None = None) -> str:
    """`torch 2.13.0, triton 3.9.0`."""
    if not isinstance(values, Mapping):
        return str(values)
    return ", ".join(f"{key} {_plain(values.get(key))}" for key in keys or values)


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _get(values: Any, key: str) -> Any:
    return values.get(key) if isinstance(values, Mapping) else values


def _short(line: str) -> str:
    return line if len(line) <= _WIDTH else f"{line[: _WIDTH - 1]}…"
