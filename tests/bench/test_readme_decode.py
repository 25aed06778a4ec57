"""README's tables of decode steps and of the host's cost."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import readme_decode

    yield readme_decode
    sys.modules.pop("readme_decode", None)


def row(arm, batch, us, reason=""):
    speed = None if us is None else 1.0
    return {"arm": arm, "batch": batch, "keys": 9, "us": us, "tb_per_s": speed, "reason": reason}


def test_arms_by_shapes_and_reasons_below(tables):
    content = {
        "rows": [row("a", 1, 10.04), row("b", 1, None, "wrong"), row("a", 2, 20.0)],
        "heads": [32, 8, 128], "dtype": "bfloat16", "device": {"name": "GPU"}, "date": "today",
        "versions": {"torch": "2", "triton": "3"}, "command": "hf-attn bench --decode",
    }  # fmt: skip
    lines = tables.decode(content).splitlines()
    assert lines[0] == "| us (TB/s), batch x keys | 1x9 | 2x9 |"
    assert lines[2:4] == ["| a | 10.0 (1.00) | 20.0 (1.00) |", "| b | NaN | not run |"]
    assert lines[-1] == "b: wrong."
    assert "32/8 heads, head_dim 128, bfloat16; GPU" in lines[-2]


def test_the_host_beside_its_figures(tables):
    content = {
        "microseconds": {"sdpa": 12.34}, "shape": "1x128", "device": {"name": "GPU"},
        "host": {"cpu": "Fast", "cpus": 4, "load_average": [0.1, 1, 1],
                 "load_average_after": [0.2, 1, 1]},
        "versions": {"torch": "2"}, "date": "today",
    }  # fmt: skip
    text = tables.host(content)
    assert "| sdpa | 12.3 |" in text
    assert "4 x Fast, load average before 0.1 and after 0.2" in text


def test_what_was_not_run_says_what_makes_it(tables):
    assert "bench --decode" in tables.decode(None)
    assert "scripts/host_cost.py" in tables.host(None)
