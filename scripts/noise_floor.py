"""Whether a run differs from others by more than they differ from each other.

Two runs of one training under two correct kernels differ: the kernels round in another order, and
training amplifies it. How much is measured, not typed: the floor is n runs of `sdpa` that differ
only in which of PyTorch's own kernels computed them (repeats count, where a kernel's backward pass
adds in no fixed order). The question is whether a run is one more of their kind, which is what a
prediction interval answers: with `m` and `s` the mean and standard deviation of the n runs, one
more stays within

    |x - m| <= t(n - 1, level) * s * sqrt(1 + 1 / n)

in all but `level` of the cases, t being Student's quantile (any textbook, "prediction interval of
one further observation"). It asks for noise near to normal, so for a training that is not chaotic.

Three figures of a run are tested, for the loss and for the gradient norm, six in all:
    step: the median over the steps of a step's own `|x - m| / (s * sqrt(1 + 1 / n))`. However the
        steps hang together, the median exceeds the quantile at most twice as often as one step
        does (half of the steps have to exceed it: Markov's inequality).
    whole: the mean over all steps, which a small systematic shift moves.
    end: the mean over the last quarter, which a slow drift moves.
The six share `level` (Bonferroni): each of the two medians may spend 2 of 8 parts, the others 1.
A run that is one more of its kind is hence called DRIFT in at most `level` of the cases.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from run_comparison import Judgement
from run_files import Run
from student import two_sided_quantile

from hf_attn_backends.errors import LaunchError, compose

LEVEL = 0.05  # how often a run without drift may be called DRIFT: the customary one in twenty
FEWEST = 3  # two runs give one difference, and no spread of it
ROUNDING = 2.0**-23  # one float32 rounding of the mean: what two equal numbers may be apart
_SERIES = ("loss", "grad_norm")
_PARTS = 2 * (2 + 1 + 1)  # two series; the median counts twice, `whole` and `end` once


def judge_by_floor(run: Run, floor: Sequence[Run], level: float = LEVEL) -> Judgement:
    """Whether a run is one more of the floor's kind.

    Raises:
        LaunchError: Fewer than three runs in the floor, or a level outside 0 to 1.
    """
    reasons = []
    if len(floor) < FEWEST:
        reasons.append(f"it must have at least {FEWEST} runs (the first is one), got {len(floor)}")
    if not 0.0 < level < 1.0:
        reasons.append(f"level must lie between 0 and 1, got {level}")
    if reasons:
        fix = "finetune.py --attn_implementation sdpa --sdpa_kernel flash (cudnn, math)"
        raise LaunchError(compose("the floor cannot judge", reasons, fix=fix))
    figures = {
        f"{name} {figure}": value
        for name in _SERIES
        for figure, value in _figures(run, floor, name).items()
    }
    limit = two_sided_quantile(level / _PARTS, len(floor) - 1)
    beyond = {name: value for name, value in figures.items() if not value <= limit}
    shown = beyond or dict([max(figures.items(), key=lambda item: item[1])])
    listed = ", ".join(f"{name} {value:.1f}" for name, value in shown.items())
    text = (
        f"{'DRIFT' if beyond else 'no drift'} beyond the floor: {'' if beyond else 'at most '}"
        f"{listed} standard deviations off the mean of {len(floor)} runs; one more of these stays "
        f"within {limit:.1f} in all but {level:.0%} of the cases"
    )
    return Judgement(bool(beyond), text, figures, limit)


def _figures(run: Run, floor: Sequence[Run], name: str) -> dict[str, float]:
    """The three tested figures of one series; infinite where the run is not finite."""
    mine, others = run.series[name], [other.series[name] for other in floor]
    last = max(1, len(mine) // 4)
    steps = [_off(x, rest) for x, *rest in zip(mine, *others, strict=True)]
    return {
        "step": statistics.median(steps) if all(map(math.isfinite, mine)) else math.inf,
        "whole": _off(statistics.fmean(mine), [statistics.fmean(other) for other in others]),
        "end": _off(
            statistics.fmean(mine[-last:]), [statistics.fmean(other[-last:]) for other in others]
        ),
    }


def _off(value: float, others: Sequence[float]) -> float:
    """How far a value is from the mean of others, in standard deviations of one more of them."""
    if not all(map(math.isfinite, (value, *others))):
        return math.inf
    mean = statistics.fmean(others)
    spread = math.hypot(statistics.stdev(others), ROUNDING * abs(mean))
    off = abs(value - mean)
    return off / (spread * math.sqrt(1 + 1 / len(others))) if off else 0.0
