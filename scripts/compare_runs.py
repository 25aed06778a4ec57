#!/usr/bin/env python3
"""Compare runs of `finetune.py`: losses and gradient norms, step by step.

python scripts/compare_runs.py runs/sdpa runs/triton_fa2
python scripts/compare_runs.py runs/sdpa runs/triton_fa2 --floor runs/sdpa_flash runs/sdpa_math

Each run after the first is compared with the first. `--floor X Y` (repeatable) gives pairs of runs
that differ only in which of PyTorch's own kernels computed them: what they differ by is the floor,
and the verdict says whether a run differs by more. Exit code 0: no drift; 1: drift; 2: not
comparable.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from run_comparison import (
    FLOOR_FACTOR,
    Comparison,
    Judgement,
    compare,
    floor_of,
    judge_by_floor,
    judge_by_tolerance,
)
from run_files import Run, load_run, obstacles

from hf_attn_backends.errors import LaunchError, compose


def main(argv: Sequence[str]) -> int:
    """Compare, print, plot; returns the exit code."""
    args = _parser().parse_args(argv)
    try:
        return _compare(args)
    except LaunchError as error:
        print(f"compare_runs: {error}", file=sys.stderr)
        return 2


def _compare(args: argparse.Namespace) -> int:
    runs = [load_run(path) for path in args.runs]
    first, others = runs[0], runs[1:]
    pairs = [(load_run(x), load_run(y)) for x, y in args.floor]
    for one, other in [*((first, other) for other in others), *pairs]:
        _need_comparable(one, other)
    for other in (run for pair in pairs for run in pair):
        _need_comparable(first, other)
    floors = [compare(x, y) for x, y in pairs]
    drifted = False
    report = []
    for other in others:
        found = compare(first, other)
        judged = (
            judge_by_floor(found, floor_of(floors), args.factor)
            if floors
            else judge_by_tolerance(found, first)
        )
        drifted |= judged.drift
        _print(first, other, found, judged, floors)
        report.append({"runs": [first.label, other.label], **found.as_dict(), **judged.as_dict()})
    if args.json:
        content = {
            "floor": [
                {"runs": [x.label, y.label], **c.as_dict()}
                for (x, y), c in zip(pairs, floors, strict=True)
            ],
            "factor": args.factor,
            "comparisons": report,
        }
        args.json.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    if args.plot:
        from run_plot import plot

        plot(first, others, pairs, args.plot)
        print(f"plot: {args.plot}")
    return int(drifted)


def _print(
    first: Run, other: Run, found: Comparison, judged: Judgement, floors: list[Comparison]
) -> None:
    print(f"{first.label} against {other.label}, {found.steps} steps")
    floor = floor_of(floors) if floors else None
    for name in ("loss", "grad_norm"):
        have = found.series[name]
        line = (
            f"  {name:<10} max |d| {have.max_abs:.3e}   mean |d| {have.mean_abs:.3e}   "
            f"mean d {have.mean:+.3e}   last {have.last_first:.4f} / {have.last_second:.4f}"
        )
        if floor is not None:
            limit = floor[name]
            line += f"   floor: max {limit.max_abs:.3e}, mean |d| {limit.mean_abs:.3e}"
        print(line)
    print(f"  verdict: {judged.text}")


def _need_comparable(one: Run, other: Run) -> None:
    reasons = obstacles(one, other)
    if reasons:
        raise LaunchError(
            compose(
                f"{one.label} and {other.label} cannot be compared",
                reasons,
                fix="run both with the same configuration, data and seed",
            )
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="compare_runs.py",
        description="Compare runs of finetune.py: losses and gradient norms, step by step.",
    )
    parser.add_argument("runs", nargs="+", type=Path, help="output folders; the first is the base")
    parser.add_argument(
        "--floor",
        nargs=2,
        type=Path,
        action="append",
        default=[],
        metavar=("X", "Y"),
        help="two runs of sdpa under different kernels; repeatable",
    )
    parser.add_argument(
        "--factor",
        type=float,
        default=FLOOR_FACTOR,
        help=f"how many times the floor is no drift ({FLOOR_FACTOR})",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="needs the extra 'plot'")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the figures, strict JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
