"""scripts/ on the import path, and made-up runs for the comparison."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture
def make_run(tmp_path):
    """Write a run's losses.json; `shift` is added to every loss, `facts` overrides a room."""

    def make(name, *, shift=0.0, wiggle=0.0, steps=4, backend="sdpa", kernel="auto", **facts):
        rows = [
            {
                "step": step,
                "loss": 10.0 - step + shift + wiggle * (-1) ** step,
                "grad_norm": 2.0 + 10 * wiggle * (-1) ** step,
            }
            for step in range(1, steps + 1)
        ]
        content = {
            "schema_version": 1,
            "attention": {"requested": backend, "resolved": backend, "sdpa_kernel": kernel},
            "corpus": {"sha256": "c", "tokens": 100},
            "tokenizer": {"sha256": "t"},
            "model": {"parameters": 7, "dtype": "float32"},
            "training": {
                "seed": 0,
                "sequence_length": 8,
                "batch": 1,
                "accumulation": 1,
                "world_size": 1,
                "learning_rate": 0.1,
                "bf16": False,
            },
            "device": {"name": "a device"},
            "versions": {"torch": "2", "triton": "3"},
            "steps": rows,
        }
        for room, values in facts.items():
            content[room] = {**content[room], **values}
        folder = tmp_path / name
        folder.mkdir()
        (folder / "losses.json").write_text(json.dumps(content))
        return folder

    return make
