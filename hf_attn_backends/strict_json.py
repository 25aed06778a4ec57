"""Rows of strict JSON that carry the digest of their own bytes.

Strict: no NaN or infinity, no key twice, ASCII only, so that any reader in any language gets the
same values, and so that a row's bytes are the same wherever it was written.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

_DIGEST = b',"sha256":"'


def seal(row: Mapping[str, Any]) -> tuple[dict[str, Any], bytes]:
    """Append `sha256`, the digest of the row's bytes before that key; give the row and its line."""
    head = json.dumps(row, allow_nan=False, separators=(",", ":"))[:-1].encode()
    digest = hashlib.sha256(head).hexdigest()
    return {**row, "sha256": digest}, head + _DIGEST + digest.encode() + b'"}'


def parse(line: bytes) -> tuple[dict[str, Any] | None, str]:
    """One line's row, or None and why it is not one."""
    head, mark, tail = line.rpartition(_DIGEST)
    try:
        row = json.loads(line, parse_constant=_refuse_constant, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        return None, f"not strict JSON ({error})"
    if not isinstance(row, dict) or not mark or tail != f'{row.get("sha256")}"}}'.encode():
        return None, "not a row of this registry: it does not end with its sha256"
    if hashlib.sha256(head).hexdigest() != row["sha256"]:
        return None, "its bytes do not give its sha256: the row was edited"
    return row, ""


def plain(value: Any) -> Any:
    """Turn a value into what strict JSON can hold.

    NaN and infinities become `{"value": null, "reason": ...}`; unknown objects their `str`.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"value": None, "reason": f"was {value}"}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((plain(item) for item in value), key=str)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value)


def _refuse_constant(token: str) -> None:
    raise ValueError(f"{token} is not JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) != len(pairs):
        raise ValueError("a key occurs twice")
    return row
