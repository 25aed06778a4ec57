#!/usr/bin/env python3
"""Run NVIDIA's race detector on the sm_90 kernels, on controls beside them, and trace its hazards.

python scripts/race_check.py --json racecheck.json [CASE ..]

Needs a GPU and `compute-sanitizer` (CUDA toolkit). Every hazard is traced to the two machine
instructions: an access pair that a barrier of the whole block orders in the code as compiled, or an
mbarrier at which a lane arrives for its synchronised warp, is marked so (`ordered`). The controls
(`race_controls.py`) say what a report, and what silence, is worth: half of them are wrong on
purpose.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from race_controls import FAULTS, FILLS, HANDOVERS, READS
from race_trace import traced

from hf_attn_backends import environment
from hf_attn_backends.bench import results
from hf_attn_backends.kernels.hopper import sass

KINDS = ("full", "causal", "window", "intervals")
CONTROLS = tuple(
    "-".join(("control", *parts))
    for parts in (
        *itertools.product(FILLS, READS, HANDOVERS, FAULTS),
        ("exchange", "none"),
        ("exchange", "barrier"),
    )
)
KERNELS = tuple(
    f"hopper-{phase}-{kind}" for phase, kind in itertools.product(("forward", "backward"), KINDS)
)
PEERS = ("triton-forward-causal", "triton-backward-causal", "fa3")
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
            loose = sum(group["pairs"] for group in row["found"] if not group["ordered"])
            total = sum(group["pairs"] for group in row["found"])
            told = f"{row['reports']} reports, {total} pairs of instructions, {loose} not ordered"
            print(f"{row['case']:36} {row['outcome']:8} {told}", flush=True)
    if args.json:
        command = results.command_line("race_check.py", argv)
        results.write(
            {"command": command, "date": results.now(), **facts(), "cases": rows}, args.json
        )
    return 0


def facts() -> dict[str, str]:
    """What the results depend on."""
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
    command = ["compute-sanitizer", "--tool", args.tool, "--print-limit", "2000"]
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
        "reports": int(count[-1][1]) if count else None,
        "found": traced(said, codes),
        **({"said": _errors(said)} if args.tool == "synccheck" else {}),
    }


def _errors(said: str) -> dict[str, int]:
    """How often the tool said what, for tools that name no pair of accesses."""
    return dict(Counter(re.findall(r"========= (Barrier error detected\..*)", said)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
