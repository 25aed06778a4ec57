"""Tracing race reports: what the tool said, the instructions behind it, the barrier in between."""

from __future__ import annotations

import pytest
import race_check
import race_trace
from race_controls import FAULTS, FILLS, HANDOVERS, READS

from hf_attn_backends.kernels.hopper.sass import Instruction

SAID = """========= COMPUTE-SANITIZER
========= Error: Potential RAW hazard detected at __shared__ 0x4441 in block (0,0,0) :
=========     Write Thread (63,0,0) at kernel+0x20 in file.py:98
=========     Read Thread (128,0,0) at kernel+0x60 in file.py:76
=========     Current Value : 3
=========
========= Error: Potential RAW hazard detected at __shared__ 0x4440 in block (0,0,0) :
=========     Write Thread (31,0,0) at kernel+0x20 in file.py:98
=========     Read Thread (160,0,0) at kernel+0x60 in file.py:76
=========     Current Value : 3
=========
========= Error: Potential WAR hazard detected at __shared__ 0x10 in block (1,0,0) :
=========     Read Thread (0,0,0) at kernel+0x60 in file.py:76
=========     Write Thread (32,0,0) at kernel+0x20 in file.py:98
========= RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)
"""


def code(*lines):
    """Instructions 16 bytes apart; `@` in front is a predicate."""
    return tuple(
        Instruction(16 * n, line.removeprefix("@"), line.startswith("@"))
        for n, line in enumerate(lines)
    )


# A default partition that stores and a worker that loads, both through barrier 1.
DISPATCH = (
    "@BRA 0x50",  # 0x00: the workers go
    "NOP",
    "STS [UR4], R0",  # 0x20
    "BAR.SYNC.DEFER_BLOCKING 0x1",
    "EXIT",
    "BAR.SYNC.DEFER_BLOCKING 0x1",  # 0x50
    "LDS.U8 R0, [R0]",  # 0x60
    "BRX R2 -0x70",
    "LDS R1, [UR4]",  # 0x80: reached by the indirect branch alone
    "EXIT",
)


def test_hazards_are_gathered_by_instructions():
    reads, writes = race_trace.traced(SAID, {"kernel": code(*DISPATCH, "NOP")})
    assert (reads["kind"], reads["pairs"]) == ("RAW", 1)
    assert reads["addresses"] == ["0x4440", "0x4441"]
    assert reads["example"] == "0x20 STS [UR4], R0 -> 0x60 LDS.U8 R0, [R0]"
    assert reads["ordered"] is True
    assert (writes["kind"], writes["addresses"]) == ("WAR", ["0x10", "0x10"])
    assert writes["ordered"] is False  # only reads after writes are argued


def test_pairs_of_one_kind_are_one_group():
    more = SAID.replace("kernel+0x60", "kernel+0x80")
    (group, _other) = race_trace.traced(SAID + more, {})
    assert group["pairs"] == 2
    assert group["ordered"] is False
    assert "unknown: not disassembled" in group["example"]


@pytest.mark.parametrize("read", [0x60, 0x80])
def test_a_barrier_of_the_whole_block_orders(read):
    assert race_trace.ordered(code(*DISPATCH), 0x20, read)


@pytest.mark.parametrize(
    ("place", "instead"),
    [
        (3, "NOP"),  # no barrier behind the write
        (3, "BAR.SYNC.DEFER_BLOCKING 0x2"),  # another one
        (3, "BAR.SYNC.DEFER_BLOCKING 0x1, 0x80"),  # for some threads
        (3, "BAR.ARV 0x1, 0x100"),  # nobody waits there
        (3, "@BRA 0x40"),  # a way around
        (5, "NOP"),  # no barrier in front of the read
        (5, "BAR.SYNC.DEFER_BLOCKING R3, 0xa0"),
    ],
)
def test_anything_less_does_not(place, instead):
    lines = list(DISPATCH)
    lines[place] = instead
    assert not race_trace.ordered(code(*lines), 0x20, 0x60)


def test_an_address_that_is_not_in_the_code_is_not_ordered():
    assert not race_trace.ordered(code(*DISPATCH), 0x20, 0x1000)
    assert not race_trace.ordered((), 0x20, 0x60)


def test_every_control_is_run_right_and_wrong():
    rings = len(FILLS) * len(READS) * len(HANDOVERS) * len(FAULTS)
    assert len(race_check.CONTROLS) == len(set(race_check.CONTROLS)) == rings + 2 == 26
    assert "control-tma-wgmma-named-none" in race_check.CONTROLS


def test_without_the_tool_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(race_check.shutil, "which", lambda name: None)
    assert race_check.main(["control-tma-load-named-none"]) == 2
    assert "compute-sanitizer is not on the PATH" in capsys.readouterr().err
