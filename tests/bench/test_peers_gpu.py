"""Peers on a GPU: what is installed is verified and timed in every mode."""

from __future__ import annotations

import importlib
import math

import pytest

from hf_attn_backends.bench.measure import measure
from hf_attn_backends.bench.timing import MODES_GPU
from hf_attn_backends.bench.workload import Workload

pytestmark = pytest.mark.gpu
WORK = Workload(batch=1, seq_len=512, heads=8, kv_heads=2, head_dim=128, device="cuda")


def test_flex_has_a_backward_in_every_mode():
    rows = measure(
        WORK, ["flex_attention"], phases=("forward", "backward"), modes=MODES_GPU, budget_s=0.05
    )
    assert [(row.phase, row.mode) for row in rows] == [
        (phase, mode) for phase in ("forward", "backward") for mode in MODES_GPU
    ]
    for row in rows:
        assert row.timing.ms > 0, row.timing.reason
        assert row.errors["dq"]["rms"] > 0


def test_flash_attention_4_forward_and_backward_where_it_is_installed():
    try:
        importlib.import_module("flash_attn.cute")
    except ImportError as error:
        pytest.skip(f"flash_attn.cute (package flash-attn-4) cannot be imported: {error}")
    rows = measure(WORK, ["flash_attention_4"], phases=("forward", "backward"), budget_s=0.05)
    assert not any(math.isnan(row.timing.ms) for row in rows), rows[0].timing.reason
    assert "flash-attn-4" in rows[0].source
