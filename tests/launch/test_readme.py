"""README says what is there: tables out of files, names, paths and commands that exist."""

from __future__ import annotations

import ast
import re
import shlex

import pytest
import readme_tables
import torch

import hf_attn_backends
from hf_attn_backends import errors
from hf_attn_backends.cli import _COMMANDS


@pytest.fixture(scope="module")
def text(root):
    return (root / "README.md").read_text()


def blocks(text, language):
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_tables_are_what_their_files_say(text):
    assert readme_tables.filled(text) == text, "run: python scripts/readme_tables.py"


def test_an_edited_table_is_seen(text):
    edited = text.replace("| FLASH_ATTENTION | 0.", "| FLASH_ATTENTION | 1.", 1)
    assert edited != text
    assert readme_tables.filled(edited) == text


def test_python_blocks_are_python_and_use_public_names(text):
    found = blocks(text, "python")
    assert len(found) >= 2
    for block in found:
        tree = ast.parse(block)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "hf_attn_backends":
                for alias in node.names:
                    assert alias.name in hf_attn_backends.__all__
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "hf_attn_backends":
                assert node.attr in hf_attn_backends.__all__


def test_the_backend_of_ones_own_serves(text):
    from hf_attn_backends.backends.factory import forget_registered

    (block,) = (block for block in blocks(text, "python") if "class Mean" in block)
    query, key = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 5, 8)
    names = {"query": query, "key": key, "value": key}
    try:
        exec(block, names)
        want = key.mean(2, keepdim=True).repeat_interleave(2, 1).expand(2, 4, 3, 8)
        assert torch.equal(names["out"], want)
        with pytest.raises(errors.CallRefusedError, match="mean sees every key"):
            names["attention"](query, key, key, is_causal=True, backend="mean")
    finally:
        forget_registered()


def test_paths_exist(text, root):
    named = re.findall(r"(?:configs|scripts|hf_attn_backends)/[\w/.-]*", text)
    assert len(named) > 20
    for path in {name.rstrip("./") for name in named}:
        assert (root / path).exists(), path


def test_commands_exist(text):
    used = set(re.findall(r"hf-attn (\w+)", text))
    assert used == set(_COMMANDS)
    for block in blocks(text, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            shlex.split(line, comments=True)


def test_errors_that_are_shown_exist(text):
    shown = set(re.findall(r"^(\w+Error): ", text, re.MULTILINE))
    assert len(shown) >= 3
    for name in shown:
        assert issubclass(getattr(errors, name), errors.AttentionBackendError)


def test_no_machine_is_named(text):
    for word in ("/root/", "/home/", "/tmp/", "/mnt/"):
        assert word not in text
