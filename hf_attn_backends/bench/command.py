"""`hf-attn bench`: times, verdicts against the baseline, peers side by side."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from hf_attn_backends.bench import baselines, decode_command, pin, results
from hf_attn_backends.bench.ablations import ablation_names
from hf_attn_backends.bench.arms import PEERS, SDPA_KERNELS
from hf_attn_backends.bench.backends import DEFAULT_NAMES
from hf_attn_backends.bench.measure import Progress, Row, measure
from hf_attn_backends.bench.timing import MODES_CPU, MODES_GPU
from hf_attn_backends.bench.verdicts import TOLERANCE, verdicts
from hf_attn_backends.bench.workload import (
    PHASES,
    SHAPES_CPU,
    SHAPES_GPU,
    Workload,
    parse_shape,
)
from hf_attn_backends.errors import BenchmarkError

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `hf-attn bench`."""
    add = parser.add_argument
    add("--peers", action="store_true", help="every peer: forward, backward, memory, all modes")
    add("--decode", action="store_true", help="a decode step instead: one query over BxN keys")
    add("--names", metavar="A,B", help="what to time instead (SDPA kernels, backends, variants)")
    add("--shapes", metavar="BxS,..", help="batch x length; default by device")
    add("--heads", type=int, default=32, help="query heads (32)")
    add("--kv-heads", type=int, default=8, help="key/value heads (8)")
    add("--head-dim", type=int, default=128, help="(128)")
    add("--dtype", choices=_DTYPES, default="bfloat16", help="(bfloat16)")
    add("--non-causal", action="store_true", help="every key seen by every row")
    add("--backward", action="store_true", help="the backward pass too")
    add("--eager", action="store_true", help="on a GPU: eager calls too, the host's cost included")
    add("--warm", action="store_true", help="on a GPU: replays with a warm L2 cache too")
    add("--memory", action="store_true", help="on a GPU: peak memory too")
    add("--ablate", action="append", default=[], metavar="FIELD=0", help="sm_90 forward without it")
    add("--no-verify", action="store_true", help="do not compare with the oracle first")
    add("--seconds", type=float, default=0.6, help="timed work for a shape, phase and mode (0.6)")
    add("--device", help="cuda, cuda:N or cpu; default: the GPU where there is one")
    add("--tolerance", type=float, default=TOLERANCE, help="factor against the baseline (2.0)")
    add("--json", type=Path, metavar="FILE", help="write rows, clocks and versions there")
    add("--pin", action="store_true", help="measure and write this GPU's baseline file")
    add("--commit", help="the commit, where the code lies in no repository: for --pin, --json")
    add("--output", type=Path, help="with --pin: write there instead of into the package")


def run(args: argparse.Namespace) -> int:
    """Run the command; 1 when a pinned kernel became slower than the tolerance, or does not run."""
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise BenchmarkError(f"device {device!r} was asked for, and torch sees no CUDA device")
    console = Console(width=None if sys.stdout.isatty() else 150)  # a file has no edge to wrap at
    if args.decode:
        return decode_command.run(args, device, console)
    if args.pin:
        found, path = pin.pin(device, commit=args.commit, path=args.output, progress=_progress())
        console.print(f"pinned {found.device}: {path}")
        return 0
    phases = PHASES if args.backward or args.peers else PHASES[:1]
    modes = _modes_gpu(args) if device.startswith("cuda") else MODES_CPU
    chosen = args.names.split(",") if args.names else (PEERS if args.peers else DEFAULT_NAMES)
    clocks = [results.clocks(device, "start")]
    rows: list[Row] = []
    for workload in _workloads(args, device):
        rows += measure(
            workload,
            [*chosen, *ablation_names(args.ablate)],
            phases=phases,
            modes=modes,
            verify=not args.no_verify,
            memory=args.memory or args.peers,
            budget_s=args.seconds,
            progress=_progress(),
        )
        clocks.append(results.clocks(device, f"after {workload.label}"))
        if args.json:  # after every shape: a run that is cut short keeps what it measured
            content = results.document(rows, device=device, clocks=clocks, commit=args.commit)
            results.write(content, args.json)
    print_rows(rows, console)
    if args.json:
        console.print(f"written: {args.json}")
    return _judge(rows, device, args.tolerance, console)


def print_rows(rows: Sequence[Row], console: Console) -> None:
    """One table for each phase and mode, peak memory; below it, why something is NaN."""
    for phase, mode in dict.fromkeys((row.phase, row.mode) for row in rows):
        part = [row for row in rows if (row.phase, row.mode) == (phase, mode)]
        shapes = list(dict.fromkeys(row.workload.label for row in part))
        console.print(f"{phase}, {mode}: ms (TFLOP/s)", markup=False)
        table = Table()
        table.add_column("", no_wrap=True)
        for shape in shapes:
            table.add_column(shape, justify="right", no_wrap=True)
        for name in dict.fromkeys(row.arm for row in part):
            by_shape = {row.workload.label: row for row in part if row.arm == name}
            table.add_row(name, *(_cell(by_shape[shape]) for shape in shapes))
        console.print(table)
    for phase in dict.fromkeys(row.phase for row in rows if row.peak_mib == row.peak_mib):
        what = "forward" if phase == "forward" else "forward + backward"
        console.print(f"{what}: peak MiB above the inputs", markup=False)
        console.print(_memory_table(rows, phase))
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if math.isnan(row.timing.ms):
            where = f"{row.workload.label} {row.phase}"
            reasons.setdefault((row.arm, row.timing.reason), []).append(where)
    for (name, reason), places in reasons.items():
        where = ", ".join(dict.fromkeys(places))
        console.print(f"NaN {name} ({where}): {reason}", markup=False, soft_wrap=True)


def _memory_table(rows: Sequence[Row], phase: str) -> Table:
    """Peak memory of the arms that ran; every mode of a phase has the same."""
    part = [row for row in rows if row.phase == phase and not math.isnan(row.peak_mib)]
    shapes = list(dict.fromkeys(row.workload.label for row in part))
    table = Table()
    table.add_column("", no_wrap=True)
    for shape in shapes:
        table.add_column(shape, justify="right", no_wrap=True)
    for name in dict.fromkeys(row.arm for row in part):
        peaks = {row.workload.label: f"{row.peak_mib:,.0f}" for row in part if row.arm == name}
        table.add_row(name, *(peaks.get(shape, "NaN") for shape in shapes))
    return table


def _cell(row: Row) -> str:
    if math.isnan(row.timing.ms):
        return "NaN"
    tflops = f"{row.tflops:.0f}" if row.tflops >= 100 else f"{row.tflops:.2g}"
    return f"{row.timing.ms:.4f} ({tflops})"


def _modes_gpu(args: argparse.Namespace) -> list[str]:
    wanted = {"graph": True, "graph_warm": args.warm, "eager": args.eager}
    return [mode for mode in MODES_GPU if wanted[mode] or args.peers]


def _workloads(args: argparse.Namespace, device: str) -> list[Workload]:
    default = SHAPES_GPU if device.startswith("cuda") else SHAPES_CPU
    shapes = args.shapes.split(",") if args.shapes else default
    return [
        Workload(
            batch=batch,
            seq_len=length,
            heads=args.heads,
            kv_heads=args.kv_heads,
            head_dim=args.head_dim,
            dtype=_DTYPES[args.dtype],
            causal=not args.non_causal,
            device=device,
        )
        for batch, length in map(parse_shape, shapes)
    ]


def _judge(rows: Sequence[Row], device: str, tolerance: float, console: Console) -> int:
    """Compare what was timed like the baseline with it; 1 when something regressed."""
    if not device.startswith("cuda"):
        console.print("baseline: none for a CPU; baselines are pinned for GPUs", markup=False)
        return 0
    try:
        pinned = baselines.load_baseline(device)
    except BenchmarkError as error:
        console.print(f"baseline: {error}", markup=False, soft_wrap=True)
        return 0
    regressed = False
    for length in baselines.LENGTHS:
        like = pin.baseline_workload(length, device)
        measured = {
            row.arm: row.timing.ms
            for row in rows
            if row.workload == like and row.phase == "forward" and row.mode == pin.MODE
        }
        known = {k: ms for k, ms in pinned.median_ms[str(length)].items() if k in measured}
        for name, judged in verdicts(measured, known, tolerance).items():
            regressed |= judged.is_regression
            console.print(f"baseline {like.label} {name}: {judged}", markup=False)
    if not any(row.arm in SDPA_KERNELS for row in rows):
        console.print("baseline: none of SDPA's kernels was timed", markup=False)
    return int(regressed)


def _progress() -> Progress:
    """Report on stderr where it is a terminal, else nothing."""
    status = Console(file=sys.stderr)
    return lambda text: status.print(text, style="dim") if status.is_terminal else None
