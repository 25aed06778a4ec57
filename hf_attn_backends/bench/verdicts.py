"""Compares a measured time with a pinned one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

TOLERANCE = 2.0  # runs on one device drift by about 5 %; a machine under another load by more


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a measured time says about the pinned one.

    Attributes:
        kind: `ok`, `slower`, `faster`, `nan->value` (a kernel that could not run when the baseline
            was pinned now can, as on a newer torch) or `value->nan` (one that ran no longer does).
        factor: measured / pinned; NaN unless both are numbers.
    """

    kind: str
    factor: float

    def __str__(self) -> str:
        if self.kind == "slower":
            return f"slower x{self.factor:.2f}"
        if self.kind == "faster":
            return f"faster x{1 / self.factor:.2f}"
        return self.kind

    @property
    def is_regression(self) -> bool:
        """Slower than the tolerance, or no longer running."""
        return self.kind in ("slower", "value->nan")


def verdict(measured_ms: float, pinned_ms: float, tolerance: float = TOLERANCE) -> Verdict:
    """Judge one time; `ok` within a factor of `tolerance` either way, and for NaN as pinned."""
    if math.isnan(pinned_ms):
        return Verdict("ok" if math.isnan(measured_ms) else "nan->value", math.nan)
    if math.isnan(measured_ms):
        return Verdict("value->nan", math.nan)
    factor = measured_ms / pinned_ms
    if factor > tolerance:
        return Verdict("slower", factor)
    return Verdict("faster" if factor < 1 / tolerance else "ok", factor)


def verdicts(
    measured: Mapping[str, float], pinned: Mapping[str, float], tolerance: float = TOLERANCE
) -> dict[str, Verdict]:
    """Judge every pinned kernel; one that was not measured counts as NaN."""
    return {
        name: verdict(measured.get(name, math.nan), pinned_ms, tolerance)
        for name, pinned_ms in pinned.items()
    }
