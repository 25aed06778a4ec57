"""Strict JSON lines that many processes append to, and that show when they were edited.

One row is one line is one `os.write` on an `O_APPEND` descriptor, under a file lock, followed by
`fsync`. Each row ends with `sha256`, the digest of its own bytes before that key, and carries
`prev_sha256`, the digest of the row before it: an edited, reordered or deleted row breaks the
chain (rows cut off at the end do not: compare with the copy in the run's output directory).

A writer that dies inside its write leaves a torn last line. Readers skip it and say so. The next
writer does not delete it: it starts a new line and declares in `torn_before` how many bytes it
found and their digest, so that the fragment stays visible and cannot be mistaken for an edit.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from hf_attn_backends import torn_lines
from hf_attn_backends.errors import RecordError, RegistryCorruptError, compose
from hf_attn_backends.strict_json import parse, plain, seal

_BLOCK = 1 << 18  # bytes; a row is some 6 kB, so one block nearly always holds the last rows
LOCK_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Scan:
    """What a whole file says.

    Attributes:
        rows: The intact rows, in order.
        notes: Torn fragments that were skipped, one sentence each.
        problems: Broken lines and broken links, one sentence each; empty for a sound file.
    """

    rows: tuple[dict[str, Any], ...]
    notes: tuple[str, ...]
    problems: tuple[str, ...]


def append(path: Path, body: Mapping[str, Any]) -> dict[str, Any]:
    """Append one row, durably, and return it with its chain keys.

    Raises:
        RecordError: The folder, the lock or the disk does not let the row be written.
        RegistryCorruptError: The file has no intact row left to link to.
    """
    try:
        created = _make_folder(path.parent)
        lock = FileLock(f"{path}.lock", timeout=LOCK_TIMEOUT_S)
        # 5 ms between tries: one write with fsync takes about 6 ms; the default 50 ms starves.
        with lock.acquire(poll_interval=0.005):
            fresh = not path.exists()
            descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                row, data = _next_line(path, descriptor, body)
                written = os.write(descriptor, data)
                if written != len(data):
                    raise OSError(f"only {written} of {len(data)} bytes were written")
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            if fresh:
                for folder in (path.parent, *created):
                    descriptor = os.open(folder, os.O_RDONLY)
                    try:
                        os.fsync(descriptor)
                    finally:
                        os.close(descriptor)
    except (Timeout, NotImplementedError, OSError) as error:
        raise RecordError(
            compose(
                f"the run record cannot be written to {path}",
                [f"{type(error).__name__}: {error}"],
                works="a folder on a local disk that supports file locks",
                fix="export HF_ATTN_HOME=<a writable local folder>",
            )
        ) from error
    return row


def scan(path: Path) -> Scan:
    """Read every line of a file and check the chain; a missing file is an empty one."""
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    problems: list[str] = []
    broken: list[torn_lines.Broken] = []
    lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
    ended = lines[-1] == b""
    for number, line in enumerate(lines[:-1] if ended else lines, 1):
        row, why = parse(line)
        if row is None:
            broken.append((number, line, why))
            continue
        torn = torn_lines.declared_by(broken, row.get("torn_before"))
        if torn:
            notes.append(
                f"line {torn_lines.span(torn)}: torn, skipped (declared by the row after it)"
            )
        elif row.get("torn_before"):
            problems.append(f"line {number}: the torn line that it declares is not there")
        problems += [f"line {at}: {what}" for at, _, what in broken[: len(broken) - len(torn)]]
        broken = []
        before = rows[-1]["sha256"] if rows else None
        if row.get("prev_sha256") != before:
            problems.append(
                f"line {number}: prev_sha256 is {_short(row.get('prev_sha256'))}, but the row "
                f"before it has {_short(before)}: a row was changed, removed or added"
            )
        rows.append(row)
    torn = broken[len(broken) - torn_lines.fragments([item[1] for item in broken], ended) :]
    if torn:
        notes.append(f"line {torn_lines.span(torn)}: torn last line, skipped ({torn[-1][2]})")
    problems += [f"line {at}: {what}" for at, _, what in broken[: len(broken) - len(torn)]]
    return Scan(tuple(rows), tuple(notes), tuple(problems))


def _next_line(path: Path, descriptor: int, body: Mapping[str, Any]) -> tuple[dict, bytes]:
    """The row that follows what the file holds, and the bytes that append it."""
    row = plain(body)
    before, torn, ended = _tail(path, descriptor)
    if torn:
        row["torn_before"] = torn_lines.describe(torn)
    row["prev_sha256"] = before
    row, line = seal(row)
    return row, line + b"\n" if ended else b"\n" + line + b"\n"


def _tail(path: Path, descriptor: int) -> tuple[str | None, list[bytes], bool]:
    """(last intact row's digest, the broken lines after it, whether the file ends a line)."""
    size = os.fstat(descriptor).st_size
    length = 0
    while length < size:
        length = min(size, length + _BLOCK)
        os.lseek(descriptor, size - length, os.SEEK_SET)
        lines = os.read(descriptor, length).split(b"\n")
        ended = lines[-1] == b""
        lines = lines[:-1] if ended else lines
        broken: list[bytes] = []
        # The block's first line may be half a line, unless the block is the whole file.
        for line in reversed(lines if length == size else lines[1:]):
            row, _ = parse(line)
            if row is not None:
                return (
                    row["sha256"],
                    broken[len(broken) - torn_lines.fragments(broken, ended) :],
                    ended,
                )
            broken.insert(0, line)
        if length == size and len(broken) == torn_lines.fragments(broken, ended):
            return None, broken, ended  # the very first write of this file was torn
    if size == 0:
        return None, [], True
    raise RegistryCorruptError(
        compose(
            f"no row can be appended to {path}",
            ["it holds no intact row to link to"],
            fix=f"mv {shlex.quote(str(path))} {shlex.quote(f'{path}.broken')}",
        )
    )


def _make_folder(folder: Path) -> list[Path]:
    """Create a folder; return the parents whose listing changed by that."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return [each.parent for each in missing]


def _short(digest: object) -> str:
    return f"{digest[:12]}…" if isinstance(digest, str) else "none"
