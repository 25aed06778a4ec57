"""Artifacts for selection: written through the gate's own writer, in a folder of the test's own."""

from __future__ import annotations

import pytest

from hf_attn_backends import gate


@pytest.fixture
def gate_dir(tmp_path):
    return tmp_path / "gate"


@pytest.fixture
def write_gate(gate_dir):
    """Write an artifact; without arguments one that states no classes."""

    def write(*classes, device="cpu"):
        return gate.write_equivalence_gate(
            tolerances={"factor": 2.0},
            shapes_covered=[[1, 4, 16, 64]],
            gate_dir=gate_dir,
            device=device,
            coverage=classes or None,
        )

    return write
