"""What a variant's results are held to; every failure is noted, never only the first.

Shapes: `B` batch, `H` query heads, `M` query length.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_attn_backends.gate.attend import Attended
from hf_attn_backends.gate.budgets import METRICS, Yardstick, error_of
from hf_attn_backends.gate.cases import Case
from hf_attn_backends.gate.results import ClassResult, VariantResult

# Variants whose backward pass adds in an order that may change are not held to equal bits there;
# the artifact says so of each.
DETERMINISTIC_BACKWARD = frozenset({"triton"})


def check(
    result: ClassResult,
    kept: VariantResult,
    case: Case,
    stick: Yardstick,
    name: str,
    found: Tensor | None,
    variant: str,
) -> None:
    """Form, finite, exactly zero where nothing is seen, then the errors against the budgets."""

    def fail(check: str, what: str) -> None:
        result.add_failure(name, check, case.name, variant, what)

    exact: Tensor = getattr(stick.exact, name)
    if found is None or found.shape != exact.shape:
        return fail("form", f"must have shape {exact.shape}, got {getattr(found, 'shape', None)}")
    rows = ~stick.seen.any(-1)  # [B, H, M]
    keys = (
        ~stick.seen.any(2).unflatten(1, (exact.shape[1], -1)).any(2) if name[1:] in "kv" else None
    )
    bad = ~torch.isfinite(found)
    sinks = stick.exact.dsinks is not None  # every row sees its head's
    if name == "lse" and not sinks:
        bad &= ~rows
        if not bool((found[rows] == float("-inf")).all()):
            fail("hidden rows", "must be -inf where a row sees nothing, and is not")
    elif name in ("out", "dq") and not bool((found[rows] == 0).all()):
        fail("hidden rows", "must be exactly 0 where a row sees nothing, and is not")
    elif keys is not None and not bool((found[keys] == 0).all()):
        fail("hidden keys", "must be exactly 0 for keys that nobody sees, and is not")
    if bool(bad.any()):
        return fail("finite", f"has {int(bad.sum())} elements that are not finite (or not written)")
    if name == "lse" and not sinks:
        found = torch.where(rows, float("-inf"), found)
    errors = error_of(found, exact)
    for metric in METRICS:
        error, budget = errors[metric], stick.budgets[name, metric]
        kept.add(name, metric, case.name, error, budget)
        if not error <= budget:
            fail("error", f"has {metric} error {error:.2e} over its budget {budget:.2e}")
    return None


def check_repeat(
    result: ClassResult, kept: VariantResult, case: Case, one: Attended, two: Attended, variant: str
) -> None:
    """Two runs must give the same bits: the forward pass always, gradients where promised."""
    for name, first, second in zip(one._fields, one, two, strict=True):
        if first is None or second is None or torch.equal(first.nan_to_num(), second.nan_to_num()):
            continue
        backward = variant.partition("/")[2] or variant
        if name not in ("out", "lse"):
            kept.deterministic = False
            if backward not in DETERMINISTIC_BACKWARD:
                continue
        what = "differs between two runs on the same inputs"
        result.add_failure(name, "determinism", case.name, variant, what)
