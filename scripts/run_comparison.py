"""Differences of two runs, and the verdict by typed limits; `noise_floor.py` measures them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from run_files import Run

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
    """The verdict: whether a run drifts, and in words against what.

    Attributes:
        drift: More than the floor explains, or than the typed limits allow.
        text: The verdict.
        figures: Against a floor: each tested figure, in standard deviations of the floor.
        limit: What they may be at most.
    """

    drift: bool
    text: str
    figures: dict[str, float] | None = None
    limit: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON; a figure that is not finite becomes null."""
        plain: dict[str, Any] = {"drift": self.drift, "verdict": self.text}
        if self.figures is not None:
            plain["standard_deviations"] = {
                name: value if math.isfinite(value) else None
                for name, value in self.figures.items()
            }
            plain["limit"] = self.limit
        return plain


def compare(first: Run, second: Run) -> Comparison:
    """Difference of every series; a NaN in either makes every figure of the series NaN."""
    return Comparison(
        len(first.steps),
        {name: _difference(first.series[name], second.series[name]) for name in first.series},
    )


def pairs_of(floor: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Every pair of the floor's runs."""
    return list(combinations(floor, 2))


def widest(pairs: Sequence[Comparison]) -> dict[str, Difference]:
    """The largest differences over all pairs: what sdpa differs from itself by."""
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
    return Judgement(drift, f"{word} by typed limits: {text}; --floor measures them instead")


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
