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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import triton

_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][^;]*);")
_TARGET = re.compile(r"0x([0-9a-f]+)\s*$")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One SASS instruction.

    Attributes:
        address: Byte offset in its function.
        text: Opcode and operands, without the predicate.
        guarded: Whether there is a predicate.
    """

    address: int
    text: str
    guarded: bool = False

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
        Instruction(int(match[1], 16), match[3].strip(), match[2] is not None)
        for match in _LINE.finditer(done.stdout)
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
    """The loops with an instruction `name` that share nothing with a shorter one.

    Waits that ptxas moves out of line jump back into a loop, which looks like a second one.
    """
    having = [loop for loop in loops(code) if loop.count(name)]
    return [
        loop
        for loop in having
        if not any(
            other.body[0].address <= loop.body[-1].address
            and other.body[-1].address >= loop.body[0].address
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


def _path(code: tuple[Instruction, ...], end: int, choose: Callable[[list[int]], int]) -> list[int]:
    """A way to `end` without backward branches; `choose` picks where control flow joins."""
    places = {instruction.address: n for n, instruction in enumerate(code)}
    before: list[list[int]] = [[] for _ in code]
    for n, instruction in enumerate(code):
        branch = instruction.name.startswith("BRA")
        target = _TARGET.search(instruction.text) if branch else None
        if target and places.get(int(target[1], 16), 0) > n:
            before[places[int(target[1], 16)]].append(n)
        leaves = branch or instruction.name.split(".")[0] in ("EXIT", "RET", "BRX")
        if n + 1 < len(code) and (instruction.guarded or not leaves):
            before[n + 1].append(n)
    path = []
    while before[end]:
        end = choose(before[end])
        path.append(end)
    return path[::-1]


_Value = tuple[str, int]  # an unknown and what was added to it


def _step(state: dict[int, _Value], instruction: Instruction) -> None:
    """Follow one instruction's effect on the uniform registers."""
    name, _, rest = instruction.text.partition(" ")
    words = [word.strip().removesuffix(".reuse") for word in rest.split(",")]
    if not re.fullmatch(r"UR\d+", words[0]):
        return
    register = int(words[0][2:])
    fresh = f"{instruction.address:#x}"

    def value(word: str) -> _Value | None:
        if word == "URZ":
            return "", 0
        if re.fullmatch(r"UR\d+", word):
            return state.setdefault(int(word[2:]), (f"before/{word}", 0))
        return ("", int(word, 16)) if re.fullmatch(r"-?0x[0-9a-f]+", word) else None

    terms = [value(w) for w in words[1:] if not w.startswith(("UP", "!UP"))]
    adds = name in ("UIADD3", "UIADD3.64", "UMOV") or (name == "ULOP3.LUT" and "0xfc" in words)
    if name == "ULOP3.LUT":
        terms = terms[:3]
    if name.endswith(".64"):
        state[register + 1] = (f"{fresh}+", 0)
    roots = [term[0] for term in terms if term and term[0]]
    if instruction.guarded or not adds or None in terms or len(roots) > 1:
        state[register] = (fresh, 0)
    else:
        state[register] = (roots[0] if roots else "", sum(t[1] for t in terms if t))


def value_descriptors(
    code: tuple[Instruction, ...], choose: Callable[[list[int]], int] = min
) -> list[list[_Value]]:
    """For each product with a register operand: where each of its steps reads shared memory.

    Every step is an unknown address plus an offset. See `uneven_products`.
    """
    found: list[list[_Value]] = []
    last = None
    for n, instruction in enumerate(code):
        match = re.match(r"HGMMA\S+ (R\d+), R\d+, gdesc\[UR(\d+)\]", instruction.text)
        if not match:
            continue
        state: dict[int, _Value] = {}
        for place in _path(code, n, choose):
            _step(state, code[place])
        register = int(match[2]) + 2
        if last != match[1]:
            found.append([])
        found[-1].append(state.get(register, (f"before/UR{register}", 0)))
        last = None if instruction.text.endswith("gsb0") else match[1]
    return found


def uneven_products(code: tuple[Instruction, ...]) -> int:
    """How many products read shared memory at places that are not one address and even steps.

    ptxas 12.8 (in Triton 3.6) was seen to compute the address of a product's later steps on one
    side of a branch and to use it on both: half of the results were garbage.
    """
    bad = 0
    for choose in (min, max):
        for steps in value_descriptors(code, choose):
            roots = {root for root, _ in steps}
            sizes = {b[1] - a[1] for a, b in itertools.pairwise(steps)}
            bad += len(roots) > 1 or len(sizes) > 1
    return bad
