"""What ptxas makes of the backward on the installed Triton, compiled ahead of time for sm_90.

Runs in a process of its own: this one may have Triton in interpreter mode.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

ALL = [
    (kind, head_dim, element)
    for kind in ("full", "causal", "window", "intervals")
    for head_dim in (64, 128)
    for element in ("bf16", "fp16")
]
FAST = [("causal", 128, "bf16"), ("intervals", 64, "fp16")]


def facts(classes):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    words = [str(word) for cls in classes for word in cls]
    done = subprocess.run(
        [sys.executable, "-m", "hf_attn_backends.kernels.hopper.backward_aot", *words],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(found) == len(classes)
    return found


def check(fact):
    assert fact["threads"] == 384
    assert fact["shared"] <= 227 * 1024
    assert {24, 240} <= set(fact["registers"])
    # Per consumer: scores, dP, dV, dQ, dK. In one consumer ptxas puts a wait of its own before the
    # others where dP's sum begins at -delta (head_dim 64); more would mean serialised products.
    wide = "/d64/" in fact["class"]
    own = 1 if wide and fact["waits"][0] == 0 else 0
    assert fact["waits"][own:] == [1, 0, 2, 1, 0] * 2, fact
    # All exponentials lie while dP is on the tensor cores: before the wait for it.
    count = 64 if wide else 32
    assert fact["exp"] == 2 * count
    assert sum(fact["exp_after_wait"][: own + 1]) == count, fact
    assert fact["exp_after_wait"][own + 5] == count, fact
    assert fact["reductions"] == 2
    assert fact["wide_stores"] >= 16
    # A spilled accumulator would be 32 stores and 32 loads in each consumer; a few numbers that the
    # loop does not change may be kept in local memory.
    assert fact["spills"] <= 120, fact


def test_products_are_ordered_and_accumulators_stay_in_registers():
    for fact in facts(FAST):
        check(fact)


@pytest.mark.slow
def test_every_class():
    for fact in facts([cls for cls in ALL if cls not in FAST]):
        check(fact)
