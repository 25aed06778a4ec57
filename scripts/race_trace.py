"""What a race detector said, traced to machine instructions and to the barrier between them."""

from __future__ import annotations

import re
from typing import Any

from hf_attn_backends.kernels.hopper import sass

_HAZARD = re.compile(
    r"Potential (\w+) hazard detected at __shared__ (0x[0-9a-f]+).*?\n"
    r".*?(Write|Read) Thread .*? at (.+?)\+(0x[0-9a-f]+).*?\n"
    r".*?(Write|Read) Thread .*? at (.+?)\+(0x[0-9a-f]+)"
)


def traced(said: str, codes: dict[str, tuple[sass.Instruction, ...]]) -> list[dict[str, Any]]:
    """The pairs of instructions behind the hazards, in groups of one kind of access each.

    Args:
        said: What `compute-sanitizer --tool racecheck --racecheck-report hazard` printed.
        codes: The kernels' instructions by name.

    Returns:
        Groups of pairs that agree in kernel, kind of hazard, opcodes and whether they are
        `ordered`: how many pairs, the shared addresses, and one pair as an example.
    """
    pairs: dict[tuple[str, str, str, str], set[int]] = {}
    for kind, address, first, kernel, pc, _second, _kernel, other in _HAZARD.findall(said):
        write, read = (pc, other) if first == "Write" else (other, pc)
        pairs.setdefault((kernel.split("(")[0], kind, write, read), set()).add(int(address, 16))
    groups: dict[tuple[str, str, str, str, bool], dict[str, Any]] = {}
    for (kernel, kind, write, read), addresses in sorted(pairs.items()):
        code = codes.get(kernel, ())
        texts = [_text(code, place) for place in (write, read)]
        at = int(write, 16), int(read, 16)
        between = kind == "RAW" and (ordered(code, *at) or handed_over(code, *at))
        group = groups.setdefault(
            (kernel, kind, texts[0].split()[0], texts[1].split()[0], between),
            {
                "kernel": kernel,
                "kind": kind,
                "ordered": between,
                "pairs": 0,
                "addresses": [min(addresses), max(addresses)],
                "example": f"{write} {texts[0]} -> {read} {texts[1]}",
            },
        )
        group["pairs"] += 1
        low, high = group["addresses"]
        group["addresses"] = [min(low, *addresses), max(high, *addresses)]
    for group in groups.values():
        group["addresses"] = [hex(address) for address in group["addresses"]]
    return list(groups.values())


def ordered(code: tuple[sass.Instruction, ...], write: int, read: int) -> bool:
    """Whether a barrier of the whole block lies behind the write and in front of the read.

    It does when every way on from the write and every way to the read passes a barrier, the first
    one on each is waited for by all threads (no count), and it is the same barrier everywhere. A
    guarded one counts, and so does the way past it.
    """
    places = {instruction.address: n for n, instruction in enumerate(code)}
    if write not in places or read not in places:
        return False
    after, before = _ways(code)
    barriers = _barriers(code, places[write], after) | _barriers(code, places[read], before)
    return len(barriers) == 1 and None not in barriers


def handed_over(code: tuple[sass.Instruction, ...], write: int, read: int) -> bool:
    """Whether an mbarrier hands what the lanes of a warp wrote to the read.

    Behind the write, without a branch, the warp synchronises (`bar.warp.sync`, which orders the
    memory accesses of its lanes, and of which ptxas leaves a NOP where the warp is known to be
    converged), then one lane arrives at an mbarrier, which releases what it knows. Every way to the
    read comes from a wait for an mbarrier of the same array, or from a branch that skips just this
    wait (a predicate of the wait: nothing was to be waited for).

    The detector sees the lane that arrives, not that it speaks for the others: it reports what all
    the other lanes wrote.
    """
    places = {instruction.address: n for n, instruction in enumerate(code)}
    if write not in places or read not in places:
        return False
    array = _arrival(code, places[write])
    if array is None:
        return False
    _after, before = _ways(code)
    seen, behind = set(), [places[read]]
    while behind:
        place = behind.pop()
        if not before[place]:
            return False
        for origin in before[place]:
            instruction = code[origin]
            if _waits(instruction, array) or (
                place != origin + 1 and _skips_a_wait(code, origin, array)
            ):
                continue
            if instruction.name.startswith(("BAR", "SYNCS", "BRX", "EXIT")):
                return False
            if origin not in seen:
                seen.add(origin)
                behind.append(origin)
    return True


def _arrival(code: tuple[sass.Instruction, ...], place: int) -> str | None:
    """The mbarriers at one of which a lane arrives behind a write, if its warp synchronises first.

    They are named by their place in shared memory, without the register that chooses one.
    """
    synchronised = False
    for instruction in code[place + 1 :]:
        if instruction.name.startswith("SYNCS.ARRIVE"):
            found = re.search(r"\+(0x[0-9a-f]+)\]", instruction.text)
            return found[1] if found and synchronised else None
        if instruction.name.startswith(("BRA", "BRX", "BAR", "EXIT", "RET", "SYNCS", "UTMA")):
            return None
        synchronised |= instruction.name.startswith(("WARPSYNC", "NOP"))
    return None


def _waits(instruction: sass.Instruction, array: str) -> bool:
    return instruction.name.startswith("SYNCS.PHASECHK") and f"+{array}]" in instruction.text


def _skips_a_wait(code: tuple[sass.Instruction, ...], place: int, array: str) -> bool:
    """Whether a guarded branch jumps over a wait for `array` that nothing else lies in front of."""
    if not code[place].guarded or not code[place].name.startswith("BRA"):
        return False
    for instruction in code[place + 1 :]:
        if _waits(instruction, array):
            return True
        if instruction.name.startswith(("BRA", "BRX", "BAR", "EXIT", "RET", "SYNCS")):
            return False
    return False


def _barriers(
    code: tuple[sass.Instruction, ...], start: int, ways: list[list[int]]
) -> set[str | None]:
    """The first barrier on every way from `start`; None for a way without, or for a partial one."""
    found: set[str | None] = set()
    seen, ahead = {start}, list(ways[start])
    if not ahead:
        found.add(None)
    while ahead:
        place = ahead.pop()
        if place in seen:
            continue
        seen.add(place)
        instruction = code[place]
        if instruction.name.startswith(("BAR", "EXIT")):
            operands = instruction.text.partition(" ")[2].strip()
            whole = instruction.name.startswith("BAR.SYNC") and "," not in operands
            found.add(operands if whole else None)
            if not instruction.guarded:
                continue
        if not ways[place]:
            found.add(None)
        ahead += ways[place]
    return found


def _ways(code: tuple[sass.Instruction, ...]) -> tuple[list[list[int]], list[list[int]]]:
    """What may run directly after, and directly before, each instruction.

    An indirect branch (the dispatch of partitions) may go to whatever nothing else leads to.
    """
    places = {instruction.address: n for n, instruction in enumerate(code)}
    after: list[list[int]] = [[] for _ in code]
    for n, instruction in enumerate(code):
        base = instruction.name.split(".")[0]
        if n + 1 < len(code) and (instruction.guarded or base not in ("BRA", "BRX", "EXIT", "RET")):
            after[n].append(n + 1)
        target = re.search(r"0x([0-9a-f]+)\s*$", instruction.text) if base == "BRA" else None
        if target and int(target[1], 16) in places:
            after[n].append(places[int(target[1], 16)])
    reached = {place for following in after for place in following} | {0}
    for n, instruction in enumerate(code):
        if instruction.name.startswith("BRX"):
            after[n] += [place for place in range(len(code)) if place not in reached]
    before: list[list[int]] = [[] for _ in code]
    for n, following in enumerate(after):
        for place in following:
            before[place].append(n)
    return after, before


def _text(code: tuple[sass.Instruction, ...], address: str) -> str:
    place = int(address, 16)
    return next((i.text for i in code if i.address == place), "unknown: not disassembled")
