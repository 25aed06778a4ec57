"""README's tables of the peers, out of what `hf-attn bench --peers --json FILE` wrote."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Found = dict[tuple[str, str], float | None]  # (shape, mode) -> a figure; None: NaN
_ABSENT = "not run (`hf-attn bench --peers --json FILE` on an H200 makes it)"


def peers(content: dict[str, Any] | None) -> str:
    """TFLOP/s of every peer, forward and backward, graph replays with a cold L2 cache."""
    if content is None:
        return _ABSENT
    lines = []
    for phase in ("forward", "backward"):
        lines += _table(content, phase, f"{phase}, TFLOP/s", "tflops", ("graph",), every_arm=True)
    versions, device = content["versions"], content["device"]
    lines.append(
        f"{device['name']}, driver {device['driver']}, torch {versions['torch']}, "
        f"triton {versions['triton']}, {content['date']}: `{content['command']}`"
    )
    return "\n".join(lines)


def modes(content: dict[str, Any] | None) -> str:
    """The same peers by replays with a warm L2 cache, and by eager calls; only what ran."""
    if content is None:
        return _ABSENT
    lines = []
    for phase in ("forward", "backward"):
        head = f"{phase}, TFLOP/s: warm replay / eager call"
        lines += _table(content, phase, head, "tflops", ("graph_warm", "eager"))
    return "\n".join(lines).rstrip()


def memory(content: dict[str, Any] | None) -> str:
    """Peak memory above the inputs of forward + backward; only what ran."""
    if content is None:
        return _ABSENT
    head = "forward + backward, peak MiB above the inputs"
    return "\n".join(_table(content, "backward", head, "peak_mib", ("graph",))).rstrip()


def _table(
    content: dict[str, Any],
    phase: str,
    head: str,
    figure: str,
    modes: Sequence[str],
    *,
    every_arm: bool = False,
) -> list[str]:
    """One table of a figure, arms by shapes; several modes share a cell."""
    rows = [r for r in content["rows"] if r["phase"] == phase and r["mode"] in modes]
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    lines = [line([head, *shapes]), rule(len(shapes) + 1)]
    for arm in dict.fromkeys(row["arm"] for row in rows):
        found = {(r["shape"], r["mode"]): r[figure] for r in rows if r["arm"] == arm}
        if every_arm or any(number is not None for number in found.values()):
            cells = (" / ".join(_cell(found, s, m) for m in modes) for s in shapes)
            lines.append(line([arm, *cells]))
    return [*lines, ""]


def _cell(found: Found, shape: str, mode: str) -> str:
    if (shape, mode) not in found:
        return "not run"
    number = found[shape, mode]
    return "NaN" if number is None else f"{number:,.0f}"


def line(cells: Sequence[str]) -> str:
    """One line of a Markdown table."""
    return "| " + " | ".join(cells) + " |"


def rule(columns: int) -> str:
    """The line under a Markdown table's head."""
    return "|" + " --- |" * columns
