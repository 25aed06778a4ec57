"""Student's t distribution for whole degrees of freedom; torch has none, and scipy is not needed.

The distribution function is the closed sum of Abramowitz and Stegun, 26.7.3 (odd degrees) and
26.7.4 (even); the quantile is found by halving an interval.
"""

from __future__ import annotations

import math


def two_sided_share(t: float, freedom: int) -> float:
    """The share of values beyond `t` on either side, P(|T| > t), for `freedom` >= 1."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine = math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = 0.0
    for index in range(freedom // 2):
        total += term
        term *= (
            cosine**2 * (2 * index + 2) / (2 * index + 3)
            if odd
            else (cosine**2 * (2 * index + 1) / (2 * index + 2))
        )
    inside = math.sin(angle) * total
    if odd:
        inside = (angle + inside) * 2 / math.pi
    return 1.0 - inside


def two_sided_quantile(share: float, freedom: int) -> float:
    """The `t` that a share (0 < share < 1) of the values exceeds on either side."""
    low, high = 0.0, 1.0
    while two_sided_share(high, freedom) > share:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        if two_sided_share(middle, freedom) > share:
            low = middle
        else:
            high = middle
    return high
