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
    # Per consumer: scores, dP, dV, dQ, dK. A further wait would be one that ptxas put in because
    # it serialised products.
    assert fact["waits"] == [1, 0, 2, 1, 0] * 2, fact
    # All exponentials while dP is on the tensor cores: between the first two waits.
    assert fact["exp"] == 64
    assert fact["exp_after_wait"] == [32, 0, 0, 0, 0, 32, 0, 0, 0], fact
    assert fact["reductions"] == 2
    assert fact["wide_stores"] >= 8
    # No accumulator is spilled; ptxas 13.4 keeps a few loop-invariant scalars in local memory.
    assert fact["spills"] <= 40, fact


def test_products_are_ordered_and_accumulators_stay_in_registers():
    for fact in facts(FAST):
        check(fact)


@pytest.mark.slow
def test_every_class():
    for fact in facts([cls for cls in ALL if cls not in FAST]):
        check(fact)
