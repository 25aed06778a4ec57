"""Mutants of the real kernel, and a stand-in for it that is right."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import hf_attn_backends
from hf_attn_backends.gate.attend import Attended, from_launches
from hf_attn_backends.reference import attention_reference_grads

KERNELS = Path(hf_attn_backends.__file__).parent / "kernels" / "triton"
_numbers = itertools.count()


@pytest.fixture
def mutant(tmp_path, monkeypatch, kernel_device) -> Callable:
    """Copy the kernel's sources, change a text in one file, and load the copy.

    A text that is no longer there fails the test: a mutant that changes nothing proves nothing.
    """
    if kernel_device != "cpu":
        pytest.skip("mutants run in Triton's interpreter: set TRITON_INTERPRET=1")

    def build(file: str | None = None, old: str = "", new: str = ""):
        package = f"mutant_{next(_numbers)}"
        folder = tmp_path / package
        folder.mkdir()
        for source in KERNELS.glob("*.py"):
            text = source.read_text()
            if source.name == file:
                assert old in text, f"{file} no longer holds the text to mutate: {old!r}"
                text = text.replace(old, new)
            text = text.replace("hf_attn_backends.kernels.triton", package)
            (folder / source.name).write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))
        forward = importlib.import_module(f"{package}.forward")
        backward = importlib.import_module(f"{package}.backward")
        return from_launches(forward.launch_forward, backward.launch_backward)

    yield build
    for name in [name for name in sys.modules if name.startswith("mutant_")]:
        del sys.modules[name]


def right(inputs) -> Attended:
    """A kernel without a fault: fp32 arithmetic, results rounded to the inputs' dtype."""
    found = attention_reference_grads(
        *inputs[:4], visibility=inputs.visibility, scale=inputs.scale, dtype=torch.float64
    )
    dtype = inputs.query.dtype
    out, dq, dk, dv = (x.to(dtype) for x in (found.out, found.dq, found.dk, found.dv))
    return Attended(out, found.lse.float(), dq, dk, dv)


@pytest.fixture
def right_attend():
    return right
