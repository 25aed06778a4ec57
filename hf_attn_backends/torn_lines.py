"""What a writer that died inside its write leaves behind, told from what an editor leaves.

A torn write is never repaired: the row after it declares how many bytes it found and their digest,
so that a fragment that was there can be told from one that was put there (see `journal`).
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

Broken = tuple[int, bytes, str]  # line number, the line, why it is no row


def fragments(broken: list[bytes], ended: bool) -> int:
    """How many of the file's last lines a dying writer can have left.

    None where the file ends with a newline, which is the last byte of every write; and no line
    that is whole JSON: such a line was edited.
    """
    count = 0
    for line in reversed(broken if not ended else []):
        try:
            json.loads(line)
            break
        except ValueError:
            count += 1
    return count


def declared_by(broken: list[Broken], declared: object) -> list[Broken]:
    """The last of the broken lines, as far back as the next row declares them torn."""
    for start in range(len(broken)):
        if describe([item[1] for item in broken[start:]]) == declared:
            return broken[start:]
    return []


def describe(lines: list[bytes]) -> dict[str, Any]:
    """What a later row says of fragments: their size and digest."""
    joined = b"\n".join(lines)
    return {"bytes": len(joined), "sha256": hashlib.sha256(joined).hexdigest()}


def span(broken: list[Broken]) -> str:
    """`7`, or `7-9`: the line numbers of neighbours."""
    first, last = broken[0][0], broken[-1][0]
    return str(first) if first == last else f"{first}-{last}"
