"""Prepares the process for Triton's interpreter, before anything imports triton.

Triton decides at import whether its kernels are compiled or interpreted, so a configuration that
says `interpreter: true` has to be read before transformers, torch and triton are. Standard library
and PyYAML only.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

VARIABLE = "TRITON_INTERPRET"


def prepare(argv: Sequence[str]) -> None:
    """Set `TRITON_INTERPRET=1` where the configuration or the command line asks for it.

    Where something has imported triton already (a `.pth` file, a debugger), the process starts
    itself again with the variable set.
    """
    if os.environ.get(VARIABLE) == "1" or not wants_interpreter(argv):
        return
    os.environ[VARIABLE] = "1"
    if "triton" in sys.modules:
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def wants_interpreter(argv: Sequence[str]) -> bool:
    """Whether `--interpreter` or, below it, the `--config` file asks for the interpreter."""
    for index, word in enumerate(argv):
        if word == "--interpreter":
            following = argv[index + 1] if index + 1 < len(argv) else "true"
            return following.startswith("--") or _truth(following)
        if word == "--no_interpreter":
            return False
        if word.startswith("--interpreter="):
            return _truth(word.partition("=")[2])
    path = config_path(argv)
    if path is None or not path.is_file():
        return False  # the parser says what is wrong with it
    import yaml

    try:
        content = yaml.safe_load(path.read_text())
    except yaml.YAMLError:
        return False
    return isinstance(content, dict) and _truth(str(content.get("interpreter", "")))


def config_path(argv: Sequence[str]) -> Path | None:
    """The argument of `--config`, or None."""
    for index, word in enumerate(argv):
        if word == "--config" and index + 1 < len(argv):
            return Path(argv[index + 1])
        if word.startswith("--config="):
            return Path(word.partition("=")[2])
    return None


def _truth(text: str) -> bool:
    return text.lower() in ("1", "true", "yes", "on", "t", "y")
