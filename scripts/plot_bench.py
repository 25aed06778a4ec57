#!/usr/bin/env python3
"""Plot what `hf-attn bench --json FILE` wrote: TFLOP/s over shapes, forward and backward.

python scripts/plot_bench.py hf_attn_backends/bench/results/h200-peers.json bench.png
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from hf_attn_backends.errors import LaunchError


def main(argv: Sequence[str]) -> int:
    """Read, plot; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="plot_bench.py", description="Plot what `hf-attn bench --json FILE` wrote."
    )
    parser.add_argument("results", type=Path, help="JSON of hf-attn bench --json")
    parser.add_argument("output", type=Path, help=".png or .svg")
    parser.add_argument("--mode", default="graph", help="graph (default), graph_warm, eager, wall")
    args = parser.parse_args(argv)
    try:
        plot(json.loads(args.results.read_text()), args.output, args.mode)
    except (LaunchError, OSError, ValueError) as error:
        print(f"plot_bench: {error}", file=sys.stderr)
        return 1
    print(f"plot: {args.output}")
    return 0


def plot(content: dict, output: Path, mode: str) -> None:
    """Grouped bars, one panel a phase; what is NaN has no bar.

    Raises:
        LaunchError: No rows of that mode, or the `plot` extra is not installed.
    """
    rows = [row for row in content["rows"] if row["mode"] == mode]
    if not any(row["tflops"] is not None for row in rows):
        modes = sorted({row["mode"] for row in content["rows"]})
        raise LaunchError(f"no times of mode {mode!r} in the file; it has {', '.join(modes)}")
    try:
        import matplotlib
    except ImportError as error:
        raise LaunchError(
            "plots need the extra 'plot': pip install 'hf-attn-backends[plot]'"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    phases = list(dict.fromkeys(row["phase"] for row in rows))
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    arms = [
        arm
        for arm in dict.fromkeys(row["arm"] for row in rows)
        if any(row["arm"] == arm and row["tflops"] is not None for row in rows)
    ]
    figure, axes = pyplot.subplots(
        1, len(phases), figsize=(6.5 * len(phases), 4), constrained_layout=True, squeeze=False
    )
    colours = pyplot.get_cmap("tab10")
    for axis, phase in zip(axes[0], phases, strict=True):
        values = {
            (row["arm"], row["shape"]): row["tflops"] for row in rows if row["phase"] == phase
        }
        width = 0.85 / len(arms)
        for index, arm in enumerate(arms):
            heights = [values.get((arm, shape)) or 0.0 for shape in shapes]
            places = [place + index * width for place in range(len(shapes))]
            ours = arm.startswith("triton_fa2")
            axis.bar(
                places,
                heights,
                width,
                label=arm,
                color=colours(index % 10),
                edgecolor="black" if ours else "none",
                linewidth=0.8 if ours else 0.0,
            )
        axis.set_xticks([place + 0.425 - width / 2 for place in range(len(shapes))], shapes)
        axis.set_title(phase)
        axis.set_ylabel("TFLOP/s")
        axis.grid(axis="y", alpha=0.3)
    axes[0][0].legend(fontsize=7, ncol=2)
    sample, versions = rows[0], content["versions"]
    figure.suptitle(
        f"{content['device']['name']}, torch {versions['torch']}, triton {versions['triton']}; "
        f"{sample['heads']}/{sample['kv_heads']} heads, head_dim {sample['head_dim']}, "
        f"{sample['dtype']}, {'causal' if sample['causal'] else 'full'}; batch x length; "
        f"median, {mode}, {sample.get('l2', 'unknown')} L2 cache",
        fontsize=9,
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=130)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
