"""The figure of a comparison: losses, and differences over the floor's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from run_files import Run

from hf_attn_backends.errors import LaunchError


def plot(first: Run, others: Sequence[Run], floor: Sequence[tuple[Run, Run]], path: Path) -> None:
    """Write a PNG or SVG: loss curves above, |difference| of loss and gradient norm below.

    Raises:
        LaunchError: The `plot` extra is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise LaunchError(
            "--plot needs the extra 'plot': pip install 'hf-attn-backends[plot]'"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 3.8), constrained_layout=True)
    colours = {run.label: f"C{index}" for index, run in enumerate((first, *others))}
    for run in (first, *others):
        colour = colours[run.label]
        axes[0].plot(run.steps, run.series["loss"], label=run.label, color=colour, linewidth=1.2)
    axes[0].set_title("loss")
    for axis, name in ((axes[1], "loss"), (axes[2], "grad_norm")):
        for index, (x, y) in enumerate(floor):
            label = "" if index else f"floor: the {len(floor)} pairs of sdpa runs"
            axis.plot(x.steps, _apart(x, y, name), label=label, color="0.7", linewidth=0.8)
        for run in others:
            apart, colour = _apart(first, run, name), colours[run.label]
            axis.plot(run.steps, apart, label=run.label, color=colour, linewidth=1.2)
        axis.set_title(f"|difference| of {name} from {first.label}", fontsize=9)
        axis.set_yscale("symlog", linthresh=1e-6)
    for axis in axes:
        axis.set_xlabel("step")
        axis.legend(fontsize=7)
        axis.grid(alpha=0.3)
    device, versions = first.facts["device"]["name"], first.facts["versions"]
    figure.suptitle(
        f"{device}, torch {versions['torch']}, triton {versions['triton']}, "
        f"{first.facts['model']['parameters'] / 1e6:,.1f} M parameters, "
        f"length {first.facts['training']['sequence_length']}",
        fontsize=9,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _apart(one: Run, other: Run, name: str) -> list[float]:
    return [abs(b - a) for a, b in zip(one.series[name], other.series[name], strict=True)]
