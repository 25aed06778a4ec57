"""What ptxas makes of the forward on the installed Triton, compiled ahead of time for sm_90.

Runs in a process of its own: this one may have Triton in interpreter mode.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from hf_attn_backends.kernels.hopper.sass import (
    Instruction,
    Loop,
    innermost,
    loops,
    uneven_products,
)

FAST = [("causal", 128, "bf16"), ("intervals", 64, "fp16")]
REST = [
    (kind, head_dim, element)
    for kind in ("full", "causal", "window", "intervals")
    for head_dim in (64, 128)
    for element in ("bf16", "fp16")
    if (kind, head_dim, element) not in FAST
]


def facts(classes):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    words = [str(word) for cls in classes for word in cls]
    done = subprocess.run(
        [sys.executable, "-m", "hf_attn_backends.kernels.hopper.forward_aot", *words],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def check(fact):
    assert fact["threads"] == 384
    assert fact["shared"] <= 227 * 1024
    assert {24, 240} <= set(fact["registers"])
    assert fact["uneven_products"] == 0
    if not fact["class"].endswith("/full"):  # there every tile has the same number of blocks
        assert fact["fixed_bounds"] == 0
    assert len(fact["loops"]) == 2, fact  # one loop over keys for each consumer
    for loop in fact["loops"]:
        assert loop["spills"] == 0
        assert loop["exp_between_waits"] <= 45
        assert loop["syncs"] <= 2
    # The first half of a block's weights is computed while the product of the block before it is on
    # the tensor cores, the second half beside what has to wait for that product. (ptxas 13.4 puts
    # all of them behind the wait in one of the two consumers where there is a window.)
    assert max(loop["exp_between_waits"] for loop in fact["loops"]) >= 20


def test_key_loops_neither_spill_nor_wait_early():
    for fact in facts(FAST):
        check(fact)


@pytest.mark.slow
def test_key_loops_of_every_class():
    found = facts(REST)
    assert len(found) == len(REST)
    for fact in found:
        check(fact)


def code(*lines):
    return tuple(Instruction(16 * n, text) for n, text in enumerate(lines))


def test_loops_are_found_by_their_backward_branches():
    program = code("MOV R0, R1", "HGMMA", "STL [R1], R2", "BRA 0x10", "BRA 0x0", "BRA 0x60", "EXIT")
    assert [len(loop.body) for loop in loops(program)] == [3, 5]
    assert [len(loop.body) for loop in innermost(program, "HGMMA")] == [3]
    assert innermost(program, "HGMMA")[0].spills == 1


def test_a_wait_out_of_line_is_not_a_second_loop():
    program = code("HGMMA", "BRA 0x50", "MOV R0, R1", "BRA 0x0", "EXIT", "NOP", "BRA 0x10")
    assert [len(loop.body) for loop in loops(program)] == [4, 6]
    assert [len(loop.body) for loop in innermost(program, "HGMMA")] == [4]


def test_between_waits_counts_only_from_one_in_flight_to_none():
    one, none = "WARPGROUP.DEPBAR.LE gsb0, 0x1", "WARPGROUP.DEPBAR.LE gsb0, 0x0"
    good = Loop(code("HGMMA", one, "MUFU.EX2 R0, R1", "MUFU.EX2 R2, R3", none, "MUFU.EX2 R4, R5"))
    hoisted = Loop(code("HGMMA", one, none, "MUFU.EX2 R0, R1", "MUFU.EX2 R2, R3"))
    assert good.between_waits("MUFU.EX2") == 2
    assert hoisted.between_waits("MUFU.EX2") == 0


def test_an_address_computed_on_one_side_of_a_branch_is_noticed():
    def product(later):
        return code(
            "USGXT.U32 UR24, UR4, 0xe",
            "BRA 0x50",
            "UIADD3 UR6, UP0, UR24, 0x80, URZ",
            "UMOV UR18, UR24",
            "BRA 0x60",
            "UMOV UR18, UR24",
            "HGMMA.64x128x16.F32.BF16 R88, R152, gdesc[UR16].tnspB, R88",
            f"UIADD3 UR18, UP0, {later}, URZ",
            "HGMMA.64x128x16.F32.BF16 R88, R156, gdesc[UR16].tnspB, R88, gsb0",
        )

    def guarded(program):
        return tuple(Instruction(i.address, i.text, guarded=i.text == "BRA 0x50") for i in program)

    assert uneven_products(guarded(product("UR24, 0x80"))) == 0
    assert uneven_products(guarded(product("UR6, 0x0"))) > 0
