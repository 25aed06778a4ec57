"""What is right and wrong with the figures of one family; `family_check` gives the rule."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_attn_backends import witness

BACKEND = "triton_fa2"
FACTORS = {"rms": 2.0, "max": 3.0}
LOGITS, VECTORS = "logits", "the vectors together"


@dataclass(frozen=True, slots=True)
class Measured:
    """What one family did in one case; errors are relative to the tensor's largest entry.

    Attributes:
        error, yardstick_error: Largest error of the logits, ours and the yardstick's.
        gradient_error, yardstick_gradient_error: Likewise of the gradient that is worst for us.
        share: The largest share of its budget that any tensor took; more than 1 is a failure.
        worst: The tensor and the metric of that share.
        variants: Kernel variants that ran.
        problems: What is wrong, as sentences; empty if all is well.
    """

    error: float
    yardstick_error: float
    gradient_error: float
    yardstick_gradient_error: float
    share: float
    worst: str
    variants: tuple[str, ...]
    problems: tuple[str, ...]


def miscounts(counted: dict[witness.Launch, int], expected: dict[str, int]) -> list[str]:
    """What the witness counted otherwise than the table expects."""
    problems = []
    for phase in ("forward", "backward"):
        found: dict[str, int] = {}
        for launch, times in counted.items():
            if launch.phase == phase and launch.backend == BACKEND:
                found[launch.call_class] = found.get(launch.call_class, 0) + times
        if found != expected:
            problems.append(f"{phase} launches of {BACKEND} are {found}, and not {expected}")
    others = {launch.backend for launch in counted} - {BACKEND}
    if others:
        problems.append(f"other backends ran too: {', '.join(sorted(others))}")
    return problems


def compare(
    ours: dict[str, Tensor],
    yardstick: dict[str, Tensor],
    exact: dict[str, Tensor],
    dtype: torch.dtype,
    counted: dict[witness.Launch, int],
    expected: dict[str, int],
) -> Measured:
    """Hold every tensor to its budget, and the launches to what the table expects.

    Args:
        ours, yardstick, exact: The tensors by name, of the three implementations.
        dtype: Of the first two.
        counted: What the witness counted in ours.
        expected: Launches of each call class, in each phase.
    """
    problems = miscounts(counted, expected)
    if not ours.keys() == yardstick.keys() == exact.keys():
        odd = sorted(ours.keys() ^ exact.keys() | yardstick.keys() ^ exact.keys())
        problems.append(f"not every implementation gives a gradient to {', '.join(odd)}")
    share, worst, gradient = 0.0, "", (0.0, 0.0)
    logits = (0.0, 0.0)
    for tensor in sorted(ours.keys() & yardstick.keys() & exact.keys()):
        truth = exact[tensor]
        scale = float(truth.abs().max())
        mine, theirs = (_errors(found[tensor], truth) for found in (ours, yardstick))
        for metric, factor in FACTORS.items():
            budget = factor * theirs[metric] + torch.finfo(dtype).eps * scale
            taken = mine[metric] / budget if budget else float(mine[metric] > 0)
            if not taken <= share:  # so that NaN is the worst of all
                share, worst = taken, f"{metric} of {tensor}"
        relative = (mine["max"] / scale, theirs["max"] / scale) if scale else (0.0, 0.0)
        if tensor == LOGITS:
            logits = relative
        elif not relative[0] <= gradient[0]:
            gradient = relative
    if not share <= 1:
        problems.append(f"the {worst} takes {share:.2f} of its budget")
    variants = {launch.variant for launch in counted if launch.backend == BACKEND}
    return Measured(*logits, *gradient, share, worst, tuple(sorted(variants)), tuple(problems))


def _errors(found: Tensor, truth: Tensor) -> dict[str, float]:
    difference = (found.double() - truth).abs()
    return {"max": float(difference.max()), "rms": float(difference.square().mean().sqrt())}
