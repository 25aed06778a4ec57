"""Text to train on, without a download: what the running Python carries, or the user's own.

* `python-docs`: `pydoc_data.topics`, the reference that `help()` shows (0.47 M characters).
* `python-stdlib`: the same, and the sources of the standard library (9 M characters).
* a path: `*.txt` (one document a file), `*.jsonl` (field `text`), or a folder of either.

Both built-in texts depend on the Python version, so a corpus carries name, version and digest.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from hf_attn_backends.errors import LaunchError, compose

DOCS, STDLIB = "python-docs", "python-stdlib"
_LEFT_OUT = {"test", "tests", "idlelib", "encodings", "site-packages", "dist-packages"}
_LEFT_OUT |= {"__pycache__", "pydoc_data", "lib2to3", "idle_test", "ensurepip"}


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents, and what the record keeps of them.

    Attributes:
        name: As asked for.
        documents: The texts, in a fixed order.
    """

    name: str
    documents: tuple[str, ...]

    def facts(self) -> dict[str, Any]:
        """Name, Python version, documents, characters, sha256 over the documents in order."""
        digest = hashlib.sha256()
        for text in self.documents:
            digest.update(text.encode("utf-8", "surrogatepass"))
            digest.update(b"\0")
        return {
            "name": self.name,
            "python": platform.python_version(),
            "documents": len(self.documents),
            "characters": sum(map(len, self.documents)),
            "sha256": digest.hexdigest(),
        }


def load_corpus(name: str) -> Corpus:
    """Read a corpus.

    Raises:
        LaunchError: No such corpus or path, or no text in it.
    """
    if name == DOCS:
        documents = tuple(_topics())
    elif name == STDLIB:
        documents = (*_topics(), *_standard_library())
    else:
        documents = tuple(_from_path(Path(name)))
    if not any(text.strip() for text in documents):
        raise LaunchError(f"corpus {name!r} must hold text, got {len(documents)} empty documents")
    return Corpus(name, documents)


def _topics() -> Iterator[str]:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise LaunchError(
            f"corpus {DOCS!r} needs pydoc_data, which this Python was packaged without ({error}); "
            "on Debian and Ubuntu it is in libpython3-stdlib; or give --corpus a path"
        ) from error
    for key in sorted(topics):
        yield topics[key]


def _standard_library() -> Iterator[str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        if not _LEFT_OUT.intersection(path.relative_to(root).parts[:-1]):
            yield path.read_text(encoding="utf-8", errors="replace")


def _from_path(path: Path) -> Iterator[str]:
    if not path.exists():
        raise LaunchError(
            compose(
                f"corpus {str(path)!r} was asked for",
                ["it is neither a built-in corpus nor a path that exists"],
                works=f"{DOCS}, {STDLIB}, a .txt or .jsonl file, or a folder of them",
            )
        )
    files = [path]
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix in (".txt", ".jsonl"))
    for file in files:
        if file.suffix == ".jsonl":
            yield from _from_json_lines(file)
        elif file.suffix == ".txt":
            yield file.read_text(encoding="utf-8")
        else:
            raise LaunchError(f"a corpus file must end in .txt or .jsonl, got {file.name}")


def _from_json_lines(path: Path) -> Iterator[str]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise LaunchError(f"{path.name}:{number} must be one JSON object: {error}") from error
        if not isinstance(row, dict) or not isinstance(row.get("text"), str):
            raise LaunchError(f"{path.name}:{number} must have a field 'text' that holds a string")
        yield row["text"]


class Blocks(Dataset[dict[str, Tensor]]):
    """All documents' ids in a row, cut into blocks of one length; the rest is left out."""

    def __init__(self, ids: Sequence[Sequence[int]], length: int) -> None:
        joined = torch.tensor([i for document in ids for i in document], dtype=torch.long)
        if joined.numel() < length:
            raise LaunchError(
                f"the corpus must fill one block of {length} tokens, got {joined.numel()}; "
                "take a larger corpus or a shorter sequence_length"
            )
        self.tokens = joined.numel()
        self.blocks = joined[: joined.numel() // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        block = self.blocks[index]
        return {"input_ids": block, "labels": block}
