#!/usr/bin/env python3
"""Run NVIDIA's race detector on the sm_90 kernels, on controls beside them, and trace its hazards.

python scripts/race_check.py --json racecheck.json [CASE ..]

Needs a GPU and `compute-sanitizer` (CUDA toolkit). Every hazard is traced to the two machine
instructions: an access pair that a barrier of the whole block orders in the code as compiled is
marked so (`ordered`). The controls (`race_controls.py`) say what a report, and what silence, is
worth: half of them are wrong on purpose.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from race_controls import FAULTS, FILLS, HANDOVERS, READS

from hf_attn_backends.kernels.hopper import sass

KINDS = ("full", "causal", "window", "intervals")
CONTROLS = tuple(
    "-".join(("control", *parts)) for parts in itertools.product(FILLS, READS, HANDOVERS, FAULTS)
)
KERNELS = tuple(
    f"hopper-{phase}-{kind}" for phase, kind in itertools.product(("forward", "backward"), KINDS)
)
PEERS = ("triton-forward-causal", "triton-backward-causal", "fa3")
_HAZARD = re.compile(
    r"Potential (\w+) hazard detected at __shared__ (0x[0-9a-f]+).*?\n"
    r".*?(Write|Read) Thread .*? at (.+?)\+(0x[0-9a-f]+).*?\n"
    r".*?(Write|Read) Thread .*? at (.+?)\+(0x[0-9a-f]+)"
)
_SUMMARY = re.compile(r"(RACECHECK|ERROR) SUMMARY: (\d+)")


def main(argv: Sequence[str]) -> int:
    """Run the cases side by side, print one line each, write the JSON; 2 without the tool."""
    parser = argparse.ArgumentParser(prog="race_check.py", description="Trace race reports.")
    parser.add_argument("cases", nargs="*", default=[*CONTROLS, *KERNELS, *PEERS])
    parser.add_argument("--tool", default="racecheck", choices=("racecheck", "synccheck"))
    parser.add_argument("--head-dim", default="128")
    parser.add_argument("--jobs", type=int, default=12, help="cases at a time (12)")
    parser.add_argument("--limit", type=int, default=90, help="seconds for a case (90)")
    parser.add_argument("--logs", type=Path, help="keep what the tool said there")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    if shutil.which("compute-sanitizer") is None:
        print("race_check: compute-sanitizer is not on the PATH (CUDA toolkit)", file=sys.stderr)
        return 2
    with ThreadPoolExecutor(args.jobs) as pool:
        rows = []
        for row in pool.map(lambda case: run_case(case, args), args.cases):
            rows.append(row)
            pairs = Counter((p["write"], p["read"], p["ordered"]) for p in row["pairs"])
            told = f"{row['hazards']} hazards, {len(pairs)} pairs of instructions"
            open_ = [pair for pair in pairs if not pair[2]]
            print(
                f"{row['case']:36} {row['outcome']:8} {told}, {len(open_)} not ordered", flush=True
            )
    if args.json:
        content = {"command": " ".join(["race_check.py", *argv]), "date": _now(), **facts()}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({**content, "cases": rows}, indent=1) + "\n")
    return 0


def facts() -> dict[str, str]:
    """What the results depend on."""
    from hf_attn_backends import environment

    said = subprocess.run(["compute-sanitizer", "--version"], capture_output=True, text=True)
    version = re.search(r"Version (\S+)", said.stdout)
    versions = environment.versions()
    return {
        "device": str(environment.device_facts("cuda")["name"]),
        "compute_sanitizer": version[1] if version else "unknown: it did not say",
        "torch": versions["torch"],
        "triton": versions["triton"],
    }


def run_case(case: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run one case under the tool and trace what it says."""
    command = ["compute-sanitizer", "--tool", args.tool, "--print-limit", "100000"]
    if args.tool == "racecheck":
        command += ["--racecheck-report", "hazard"]
    script = Path(__file__).with_name("race_cases.py")
    command += [sys.executable, str(script), case, "--head-dim", args.head_dim]
    with tempfile.TemporaryDirectory() as cache:
        environ = {**os.environ, "TRITON_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, env=environ, timeout=args.limit
            )
            said = done.stdout + done.stderr
            outcome = "ran" if f"ran {case}" in said else f"failed {done.returncode}"
        except subprocess.TimeoutExpired as late:
            said = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
            outcome = "timeout"
        if args.logs:
            args.logs.mkdir(parents=True, exist_ok=True)
            (args.logs / f"{args.tool}-{case}-{args.head_dim}.log").write_text(said)
        codes = {
            path.stem: sass.disassemble(path.read_bytes()) for path in Path(cache).rglob("*.cubin")
        }
    count = _SUMMARY.findall(said)
    return {
        "case": case,
        "head_dim": int(args.head_dim),
        "tool": args.tool,
        "outcome": outcome,
        "hazards": int(count[-1][1]) if count else None,
        "pairs": traced(said, codes),
    }


def traced(said: str, codes: dict[str, tuple[sass.Instruction, ...]]) -> list[dict[str, Any]]:
    """The pairs of instructions behind the hazards, with their shared-memory addresses."""
    found: dict[tuple[str, str, str, str], set[str]] = {}
    for kind, address, first, kernel, pc, _second, _kernel, other in _HAZARD.findall(said):
        write, read = (pc, other) if first == "Write" else (other, pc)
        found.setdefault((kernel.split("(")[0], kind, write, read), set()).add(address)
    rows = []
    for (kernel, kind, write, read), addresses in sorted(found.items()):
        code = codes.get(kernel, ())
        rows.append(
            {
                "kernel": kernel,
                "kind": kind,
                "write": f"{write} {_text(code, write)}",
                "read": f"{read} {_text(code, read)}",
                "addresses": [min(addresses), max(addresses), len(addresses)],
                "ordered": kind == "RAW" and ordered(code, int(write, 16), int(read, 16)),
            }
        )
    return rows


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
    return next((i.text for i in code if i.address == place), "not disassembled")


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
