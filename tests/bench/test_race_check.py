"""Tracing race reports: what the tool said, the instructions behind it, the barrier in between."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

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


# A warp that stores, synchronises and arrives; a reader that waits unless its predicate is off.
HANDED = (
    "STS.128 [R2+0x100], R4",  # 0x00
    "NOP",
    "@SYNCS.ARRIVE.TRANS64 RZ, [UR9+0x300], R2",
    "BRA 0x30",
    "PLOP3.LUT P0, PT",  # 0x40
    "@BRA 0x80",  # nothing to wait for
    "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4+0x300], R5",
    "@BRA 0xb0",
    "LDS R0, [R14+0x100]",  # 0x80
    "BAR.SYNC.DEFER_BLOCKING 0x2, 0x80",
    "BRA 0x40",
    "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4+0x300], R5",  # 0xb0: waits out of line
    "@BRA 0xb0",
    "BRA 0x80",
)


def test_an_mbarrier_hands_over_what_a_whole_warp_wrote():
    assert race_trace.handed_over(code(*HANDED), 0x00, 0x80)
    assert not race_trace.ordered(code(*HANDED), 0x00, 0x80)


@pytest.mark.parametrize(
    ("place", "instead"),
    [
        (1, "IADD3 R0, R1"),  # the lane that arrives speaks for itself alone
        (1, "BAR.ARV 0x9, 0x100"),
        (2, "NOP"),  # nobody arrives
        (2, "@SYNCS.ARRIVE.TRANS64 RZ, [UR9+0x310], R2"),  # elsewhere
        (3, "BRA 0x80"),  # a way to the read without a wait
        (6, "NOP"),  # no wait
        (6, "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4+0x310], R5"),  # for another one
    ],
)
def test_less_than_that_hands_nothing_over(place, instead):
    lines = list(HANDED)
    lines[place] = instead
    assert not race_trace.handed_over(code(*lines), 0x00, 0x80)


_ROWS_OF_INTERVALS = """
import json, re, race_trace
from hf_attn_backends.kernels.hopper import sass
from hf_attn_backends.kernels.hopper.forward_aot import compile_forward
compiled = compile_forward("intervals", 64, "bf16")
code = sass.disassemble(compiled.asm["cubin"])
ptx = compiled.asm["ptx"]
behind = ptx[ptx.rindex("st.shared.v4.b32"):]
print(json.dumps({
    "warp": "bar.warp.sync" in behind[:behind.index("mbarrier.arrive.expect_tx")],
    "pairs": [
        race_trace.handed_over(code, write.address, read.address)
        for write in code if write.name == "STS.128" for read in code if read.name == "LDS"
    ],
}))
"""


def test_the_forward_hands_over_the_bounds_of_rows():
    """Compiled for sm_90: the pairs that the detector reports where visibility is intervals."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(race_trace.__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", _ROWS_OF_INTERVALS], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert said["warp"]  # between the last store and the arrival
    assert len(said["pairs"]) >= 16  # two stores; two bounds of two rows in each of two consumers
    assert all(said["pairs"])


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
