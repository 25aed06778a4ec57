#!/usr/bin/env python3
"""Compare runs of `finetune.py`: losses and gradient norms, step by step.

python scripts/compare_runs.py runs/sdpa runs/triton_fa2
python scripts/compare_runs.py runs/sdpa runs/triton_fa2 --floor runs/sdpa_flash runs/sdpa_math

Each run after the first is compared with the first. `--floor` gives more runs of the first one's
backend that differ from it only in which of PyTorch's own kernels computed them: what all of them
differ by is the floor, and the verdict says whether a run is one more of their kind
(`noise_floor.py` says how). Exit code 0: no drift; 1: drift; 2: not comparable.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from noise_floor import LEVEL, judge_by_floor
from run_comparison import (
    Comparison,
    Difference,
    Judgement,
    compare,
    judge_by_tolerance,
    pairs_of,
    widest,
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
    floor = [first, *(load_run(path) for path in dict.fromkeys(args.floor))] if args.floor else []
    for other in (*others, *floor[1:]):
        _need_comparable(first, other)
    for run in floor:
        _need_finite(run)
    pairs = pairs_of(floor)
    floors = [compare(x, y) for x, y in pairs]
    drifted = False
    report = []
    for other in others:
        found = compare(first, other)
        judged = (
            judge_by_floor(other, floor, args.level) if floor else judge_by_tolerance(found, first)
        )
        drifted |= judged.drift
        _print(first, other, found, judged, widest(floors) if floors else None)
        report.append({"runs": [first.label, other.label], **found.as_dict(), **judged.as_dict()})
    if args.json:
        content = {
            "floor": [
                {"runs": [x.label, y.label], **c.as_dict()}
                for (x, y), c in zip(pairs, floors, strict=True)
            ],
            "level": args.level,
            "comparisons": report,
        }
        args.json.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    if args.plot:
        from run_plot import plot

        plot(first, others, pairs, args.plot)
        print(f"plot: {args.plot}")
    return int(drifted)


def _print(
    first: Run,
    other: Run,
    found: Comparison,
    judged: Judgement,
    floor: dict[str, Difference] | None,
) -> None:
    print(f"{first.label} against {other.label}, {found.steps} steps")
    for name in ("loss", "grad_norm"):
        have = found.series[name]
        line = (
            f"  {name:<10} max |d| {have.max_abs:.3e}   mean |d| {have.mean_abs:.3e}   "
            f"mean d {have.mean:+.3e}   last {have.last_first:.4f} / {have.last_second:.4f}"
        )
        if floor is not None:
            most = floor[name]
            line += f"   widest of the floor: {most.max_abs:.3e}, {most.mean_abs:.3e}"
        print(line)
    for name, value in (judged.figures or {}).items():
        print(f"  {name:<16} {value:6.2f} of {judged.limit:.2f} standard deviations")
    print(f"  verdict: {judged.text}")


def _need_finite(run: Run) -> None:
    broken = [name for name, values in run.series.items() if not all(map(math.isfinite, values))]
    if broken:
        raise LaunchError(
            compose(
                f"{run.label} cannot be part of a floor",
                [f"its {name} is not finite at some step" for name in broken],
                fix="leave it out of --floor, or look why sdpa itself diverges",
            )
        )


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
        nargs="+",
        type=Path,
        action="extend",
        default=[],
        metavar="RUN",
        help="runs like the first under other kernels of PyTorch; two or more",
    )
    parser.add_argument(
        "--level",
        type=float,
        default=LEVEL,
        help=f"how often a run without drift may be called DRIFT ({LEVEL:g})",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="needs the extra 'plot'")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the figures, strict JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
