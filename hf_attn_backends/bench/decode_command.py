"""`hf-attn bench --decode`."""

from __future__ import annotations

import argparse

from rich.console import Console

from hf_attn_backends.bench import decode, results
from hf_attn_backends.bench.decode_arms import ARMS
from hf_attn_backends.bench.workload import parse_shape


def run(args: argparse.Namespace, device: str, console: Console) -> int:
    """Measure, print, write the JSON; 0 also where an arm has no number but a reason."""
    shapes = (
        [parse_shape(text) for text in args.shapes.split(",")] if args.shapes else decode.SHAPES
    )
    names = args.names.split(",") if args.names else ARMS
    content = decode.measure(
        shapes, names, device, lambda row: console.print(line(row), markup=False)
    )
    if args.json:
        results.write(content, args.json)
        console.print(f"written: {args.json}")
    return 0


def line(row: decode.Row) -> str:
    """One row as text."""
    where = f"{row.batch}x{row.keys} {row.arm}"
    if row.us is None:
        return f"{where:32} NaN: {row.reason}"
    return f"{where:32} {row.us:8.2f} us {row.tb_per_s:5.2f} TB/s"
