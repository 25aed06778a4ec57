"""Mutants of the real kernel, a stand-in that is right, and artifacts without measurements."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import hf_attn_backends
from hf_attn_backends import gate
from hf_attn_backends.gate import run
from hf_attn_backends.gate.attend import Attended, from_launches
from hf_attn_backends.gate.results import ClassResult, VariantResult
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


SHAPES = [{"dtype": "torch.bfloat16", "head_dim": 64, "visibility": ["full", "causal"]}]


@pytest.fixture
def written(tmp_path):
    return gate.write_equivalence_gate(
        tolerances={"rule": "2x"}, shapes_covered=SHAPES, gate_dir=tmp_path
    )


def passing(name: str) -> ClassResult:
    result = ClassResult(name=name)
    tensors = {"out": {"error": 1e-3, "budget": 2e-3, "ratio": 0.5, "metric": "max", "case": "odd"}}
    result.variants["triton"] = VariantResult(cases=3, yardsticks=["sdpa"], tensors=tensors)
    return result


def failing(name: str) -> ClassResult:
    result = passing(name)
    result.add_failure("dk", "error", "odd", "triton", "has max error 1.0 over its budget 0.1")
    return result


@pytest.fixture
def measured(monkeypatch):
    """Replace the workers by an instant answer; notes what was measured."""
    seen: list[str] = []
    answers: dict[str, ClassResult] = {}

    def fake(classes, device, jobs, done):
        results = [answers.get(str(one)) or passing(str(one)) for one in classes]
        seen.extend(str(one) for one in classes)
        for result in results:
            done(result)
        return results

    monkeypatch.setattr(run, "measure_in_workers", fake)
    fake.seen, fake.answers = seen, answers
    fake.fail = lambda name: answers.update({name: failing(name)})
    return fake
