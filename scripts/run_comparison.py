"""Differences of two runs, and whether they are more than noise.

Two runs of one training under two correct kernels differ: the kernels round in another order, and
training amplifies it. How much is measured, not typed: two runs under two of PyTorch's own kernels
(`--sdpa_kernel flash` and `math`, say) give the floor. A run drifts when the largest or the mean
absolute difference is more than `factor` times the floor's plus one rounding band, or when the
signed differences do not cancel: their mean is more than that of the floor's mean absolute
difference. The band is what float32 sums over thousands of terms may differ by; it decides only
where a floor is near to zero, as it is after a few steps in float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from run_files import Run

FLOOR_FACTOR = 2.0  # one pair is one draw of the noise; the gate allows twice SDPA's error, too
ROUNDING = 2.0**-23  # one float32 rounding of the mean: what two equal numbers may be apart
# Without a floor, typed limits: trl's invariance tests allow a loss to differ by 1.5e-2 in
# bfloat16 and 1e-3 in float32, a gradient norm (here: relative to its mean) by 5 % and 1 %.
_TOLERANCES = {"bfloat16": (1.5e-2, 5e-2), "float32": (1e-3, 1e-2)}


@dataclass(frozen=True, slots=True)
class Difference:
    """Differences of one series, second run minus first.

    Attributes:
        max_abs, mean_abs, mean: Over the steps; `mean` keeps the sign.
        scale: Mean absolute value of the first run.
        last_first, last_second: The last values.
    """

    max_abs: float
    mean_abs: float
    mean: float
    scale: float
    last_first: float
    last_second: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs: `series["loss"]` and `series["grad_norm"]`."""

    steps: int
    series: dict[str, Difference]

    def as_dict(self) -> dict[str, Any]:
        """For JSON; a value that is not finite becomes null."""
        plain = {
            name: {k: v if math.isfinite(v) else None for k, v in asdict(difference).items()}
            for name, difference in self.series.items()
        }
        return {"steps": self.steps, **plain}


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict: whether a run drifts, and in words against what."""

    drift: bool
    text: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"drift": self.drift, "verdict": self.text}


def compare(first: Run, second: Run) -> Comparison:
    """Difference of every series; a NaN in either makes every figure of the series NaN."""
    return Comparison(
        len(first.steps),
        {name: _difference(first.series[name], second.series[name]) for name in first.series},
    )


def floor_of(pairs: Sequence[Comparison]) -> dict[str, Difference]:
    """The largest differences over all pairs."""
    merged = {}
    for name in pairs[0].series:
        several = [pair.series[name] for pair in pairs]
        merged[name] = Difference(
            max(d.max_abs for d in several),
            max(d.mean_abs for d in several),
            max((d.mean for d in several), key=abs),
            several[0].scale,
            several[0].last_first,
            several[0].last_second,
        )
    return merged


def judge_by_floor(
    found: Comparison, floor: dict[str, Difference], factor: float = FLOOR_FACTOR
) -> Judgement:
    """Whether a run differs by more than the floor."""
    problems, worst = [], 0.0
    for name, have in found.series.items():
        limit = floor[name]
        band = ROUNDING * have.scale
        for what, value, most in (
            ("max |d|", have.max_abs, limit.max_abs),
            ("mean |d|", have.mean_abs, limit.mean_abs),
            ("|mean d|", abs(have.mean), limit.mean_abs),
        ):
            share = _ratio(value, factor * most + band)
            worst = max(worst, share)
            if not share <= 1.0:
                times = f"{_ratio(value, most):.2f}x the floor's {most:.3e}"
                problems.append(f"{name} {what} is {value:.3e}, {times}")
    if problems:
        return Judgement(True, "DRIFT beyond the floor: " + "; ".join(problems))
    return Judgement(
        False,
        f"no drift beyond the floor (at most {worst:.0%} of {factor:g}x the floor + rounding)",
    )


def judge_by_tolerance(found: Comparison, first: Run) -> Judgement:
    """Whether a run differs by more than limits typed for the precision; weaker than a floor."""
    facts = first.facts
    low = facts["training"]["bf16"] or facts["model"]["dtype"] != "float32"
    loss_limit, norm_limit = _TOLERANCES["bfloat16" if low else "float32"]
    loss, norm = found.series["loss"], found.series["grad_norm"]
    norm_most = _ratio(norm.max_abs, norm.scale)
    text = (
        f"loss within {loss.max_abs:.3e} (limit {loss_limit:g}), "
        f"gradient norm within {norm_most:.2%} (limit {norm_limit:.0%})"
    )
    drift = not (loss.max_abs <= loss_limit and norm_most <= norm_limit)
    word = "DRIFT" if drift else "no drift"
    return Judgement(drift, f"{word} by typed limits: {text}; --floor X Y measures them instead")


def _difference(first: Sequence[float], second: Sequence[float]) -> Difference:
    deltas = [b - a for a, b in zip(first, second, strict=True)]
    absolute = [abs(delta) for delta in deltas]
    broken = any(math.isnan(delta) for delta in deltas)  # max() would skip a NaN
    return Difference(
        math.nan if broken else max(absolute),
        math.nan if broken else sum(absolute) / len(absolute),
        math.nan if broken else sum(deltas) / len(deltas),
        sum(map(abs, first)) / len(first),
        first[-1],
        second[-1],
    )


def _ratio(value: float, most: float) -> float:
    """`value / most`; no difference over no floor is 0, a NaN is infinite."""
    if math.isnan(value) or math.isnan(most):
        return math.inf
    if value == 0.0:
        return 0.0
    return value / most if most else math.inf
