"""What ptxas made of a kernel: loops, spills, and the order of events in SASS.

Needs no GPU: kernels are compiled ahead of time and disassembled with the `cuobjdump` inside the
triton wheel. The facts checked here cannot be seen in PTX: ptxas decides about spills and moves
waits across arithmetic.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import triton

_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][^;]*);")
_TARGET = re.compile(r"0x([0-9a-f]+)\s*$")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One SASS instruction.

    Attributes:
        address: Byte offset in its function.
        text: Opcode and operands, without the predicate.
    """

    address: int
    text: str

    @property
    def name(self) -> str:
        """The opcode with its modifiers: `MUFU.EX2`."""
        return self.text.split()[0]


@dataclass(frozen=True, slots=True)
class Loop:
    """The instructions from the target of a backward branch to the branch.

    Attributes:
        body: The instructions, inner loops included.
    """

    body: tuple[Instruction, ...]

    def count(self, prefix: str) -> int:
        """How many instructions begin with `prefix`."""
        return sum(i.name.startswith(prefix) for i in self.body)

    @property
    def spills(self) -> int:
        """Local-memory loads and stores."""
        return self.count("LDL") + self.count("STL")

    def between_waits(self, prefix: str) -> int:
        """How many `prefix` lie between the wgmma wait for one group and the wait for none.

        The loop is walked from the last wait with one group in flight to the next full wait.
        """
        waits = [n for n, i in enumerate(self.body) if i.name.startswith("WARPGROUP.DEPBAR")]
        total = 0
        for here, there in itertools.pairwise(waits):
            if self.body[here].text.endswith("0x1") and self.body[there].text.endswith("0x0"):
                part = self.body[here:there]
                total = max(total, sum(i.name.startswith(prefix) for i in part))
        return total


def disassemble(cubin: bytes) -> tuple[Instruction, ...]:
    """SASS of a cubin with one kernel."""
    tool = next(Path(triton.__file__).parent.glob("**/bin/cuobjdump"))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [str(tool), "--dump-sass", file.name], capture_output=True, text=True, check=True
        )
    return tuple(
        Instruction(int(match[1], 16), match[2].strip()) for match in _LINE.finditer(done.stdout)
    )


def loops(code: tuple[Instruction, ...]) -> list[Loop]:
    """Every loop, by its backward branch, in the order of the branches."""
    places = {instruction.address: n for n, instruction in enumerate(code)}
    found = []
    for n, instruction in enumerate(code):
        if not instruction.name.startswith("BRA"):
            continue
        target = _TARGET.search(instruction.text)
        start = places.get(int(target[1], 16)) if target else None
        if start is not None and start < n:
            found.append(Loop(code[start : n + 1]))
    return found


def innermost(code: tuple[Instruction, ...], name: str) -> list[Loop]:
    """The loops with an instruction `name` that contain no smaller loop with one."""
    having = [loop for loop in loops(code) if loop.count(name)]
    return [
        loop
        for loop in having
        if not any(
            other is not loop
            and other.body[0].address >= loop.body[0].address
            and other.body[-1].address <= loop.body[-1].address
            and len(other.body) < len(loop.body)
            for other in having
        )
    ]


def register_requests(code: tuple[Instruction, ...]) -> list[int]:
    """Register counts that partitions ask for by setmaxnreg, sorted."""
    found = Counter(
        int(word, 16)
        for i in code
        if i.name.startswith("USETMAXREG")
        for word in re.findall(r"0x([0-9a-f]+)", i.text)
    )
    return sorted(found)
