#!/usr/bin/env python3
"""Run every model family of tests/hf/families/ under `triton_fa2` and keep what came out.

python scripts/family_matrix.py --json families-cpu.json              # fp32, Triton's interpreter
python scripts/family_matrix.py --device cuda --json families.json    # bf16, where there is a GPU
python scripts/family_matrix.py --families gemma2 llama4              # some of them, printed

It runs the very checks of those tests: logits and gradients against eager attention in float64,
held to what SDPA errs by, and the launches that the witness counted. `readme_tables.py` makes
README's table out of the files. Exit code 1 if a family fails, with what is wrong in its row.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "hf" / "families")]

CASES = ("whole", "padded")


def main(argv: Sequence[str]) -> int:
    """Measure, print a line a family, write the JSON; returns the exit code."""
    args = _arguments(argv)
    on_gpu = args.device == "cuda"
    if not on_gpu:
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from family_table import FAMILIES, REFUSALS

    unknown = set(args.families) - FAMILIES.keys() - REFUSALS.keys()
    if unknown:
        raise SystemExit(f"unknown families: {', '.join(sorted(unknown))}")
    names = [name for name in (*FAMILIES, *REFUSALS) if not args.families or name in args.families]
    dtype = "bfloat16" if on_gpu else "float32"
    with tempfile.TemporaryDirectory() as home:
        os.environ["HF_ATTN_HOME"] = home
        rows = _rows(names, args.device, dtype, args.jobs)
    for row in rows:
        print(_printed(row), flush=True)
    if args.json:
        said = [word if Path(word) != args.json else args.json.name for word in argv]
        content = _content(said, args.device, dtype, rows)
        args.json.write_text(json.dumps(content, indent=1) + "\n")
    return int(any(row["status"] == "failed" for row in rows))


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="family_matrix.py", description="Families under triton_fa2."
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--families", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--jobs", type=int, default=1, help="processes (compiling takes long)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args(argv)


def _rows(names: Sequence[str], device: str, dtype: str, jobs: int) -> list[dict[str, Any]]:
    """One row a family, in the table's order."""
    from family_configs import CPU, GPU
    from family_coverage import cover

    cover(GPU if device == "cuda" else CPU, dtype, device)
    work = [(name, device, dtype) for name in names]
    if jobs == 1:
        return [row_of(one) for one in work]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        return list(pool.map(row_of, work))


def row_of(work: tuple[str, str, str]) -> dict[str, Any]:
    """Run one family in every case.

    Args:
        work: The family's name in the table, the device, the dtype's name.
    """
    import torch
    from family_check import measure, refusal_of
    from family_configs import CPU, GPU
    from family_table import FAMILIES, REFUSALS

    name, device, dtype = work
    began = time.perf_counter()
    row: dict[str, Any] = {"family": name, "title": "", "model_type": "", "status": "failed"}
    family = FAMILIES.get(name) or REFUSALS[name]
    row |= {"title": family.title, "model_type": family.model_type, "auto": family.auto}
    try:
        if name in REFUSALS:
            row |= {"status": "refused", "reason": refusal_of(REFUSALS[name])}
        else:
            row["cases"] = cases = {}
            size, kind = (GPU if device == "cuda" else CPU), getattr(torch, dtype)
            for case in CASES:
                found = measure(FAMILIES[name], case, size, kind, device)
                cases[case] = {
                    "classes": FAMILIES[name].classes(case, dtype, size),
                    "yardstick": FAMILIES[name].yardstick,
                    **{field: getattr(found, field) for field in found.__slots__},
                }
            if not any(one["problems"] for one in cases.values()):
                row["status"] = "served"
    except Exception as error:  # a family's failure is its row, and the others still run
        row["problems"] = [f"{type(error).__name__}: {error}"]
    return {**row, "seconds": round(time.perf_counter() - began, 1)}


def _printed(row: dict[str, Any]) -> str:
    """A line for people."""
    text = f"{row['title']:24} {row['status']:8} {row['seconds']:5.1f} s"
    if row["status"] == "refused":
        return f"{text}  {row['reason']}"
    for case, found in row.get("cases", {}).items():
        text += (
            f"  {case}: logits {found['error']:.1e} ({found['yardstick']} "
            f"{found['yardstick_error']:.1e}), budget {found['share']:.0%}"
        )
        text += "".join(f"\n    {problem}" for problem in found["problems"])
    return text + "".join(f"\n    {problem}" for problem in row.get("problems", ()))


def _content(
    argv: Sequence[str], device: str, dtype: str, rows: list[dict[str, Any]]
) -> dict[str, Any]:
    """What the file holds."""
    import dataclasses

    from family_configs import CPU, GPU
    from family_verdict import FACTORS

    from hf_attn_backends import environment, gate

    return {
        "schema_version": 1,
        "command": " ".join(["family_matrix.py", *argv]),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": environment.versions(),
        "device": environment.device_facts(device),
        "code": environment.code_state(),
        "kernel_source_sha256": gate.kernel_source_hash(),
        "dtype": dtype,
        "size": dataclasses.asdict(GPU if device == "cuda" else CPU),
        "factors": FACTORS,
        "rows": rows,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
