from __future__ import annotations

from pathlib import Path

import pytest

from hf_attn_backends.record import RunRecord


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of the test's own, so that no test writes to the user's registry."""
    folder = tmp_path / "home"
    monkeypatch.setenv("HF_ATTN_HOME", str(folder))
    return folder


@pytest.fixture
def make_record():
    """A complete launch record, with any key replaced."""

    def make(**changes: object) -> RunRecord:
        values = {
            "run_id": "run-1",
            "attempt": 1,
            "event": "launch",
            "seq": 0,
            "attention_requested": "sdpa",
            "attention_origin": "argument",
            "attention_backend": "sdpa",
            "attention_reason": "asked for by name",
            "attention_candidates": [{"name": "sdpa", "available": True, "reason": "in torch"}],
            "attention_verified": {"layers": 2, "names": {"sdpa": 2}, "ok": True},
            "attention_executed": "unknown: no step has run yet",
            "attention_verdict": "not_observed",
            "gate": None,
            "model": {"model_type": "mistral", "sliding_window": None},
            "device": {"type": "cpu"},
            "versions": {"torch": "2.13.0"},
            "code": {"repository": "not a repo"},
            "dist": {"world_size": 1},
            "flags": {"compile": False},
        }
        return RunRecord(**(values | changes))

    return make
