"""The digest of every source file that can change what the gate measured."""

from __future__ import annotations

import hashlib
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent

# The kernels themselves, and the code that decides what "equal" means: cases, budgets, the
# measurement and the oracle. A gate with other cases has proven something else.
_FOLDERS = ("kernels",)
_FILES = (
    "reference.py",
    "gate/attend.py",
    "gate/budgets.py",
    "gate/cases.py",
    "gate/checks.py",
    "gate/dropout.py",
    "gate/inputs.py",
    "gate/measure.py",
    "gate/offsets.py",
    "gate/pages.py",
)


def kernel_sources() -> list[Path]:
    """Every file that counts, sorted; caches and editors' leftovers do not."""
    found = [_PACKAGE / name for name in _FILES]
    for folder in _FOLDERS:
        found += [
            path
            for path in (_PACKAGE / folder).rglob("*")
            if path.is_file()
            and "__pycache__" not in path.parts
            and path.suffix in (".py", ".json", ".cu", ".cuh", ".ptx")
        ]
    return sorted(path for path in found if path.is_file())


def kernel_source_hash() -> str:
    """sha256 over path and content of `kernel_sources()`, 64 hex digits. Reads the disk."""
    digest = hashlib.sha256()
    for path in kernel_sources():
        content = path.read_bytes()
        digest.update(f"{path.relative_to(_PACKAGE).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()
