"""Measure one call class: the kernel, forward and backward, on every case, against its budgets.

Every failure is noted, never only the first. Before the kernel runs, whatever it allocates is
filled with NaN, so that an element it forgets to write is an error and not luck.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from hf_attn_backends import witness
from hf_attn_backends.call import CallClass
from hf_attn_backends.errors import CallRefusedError
from hf_attn_backends.gate import offsets
from hf_attn_backends.gate.attend import (
    WITNESS_NAME,
    Attend,
    Attended,
    ieee_products,
    operator,
    poisoned,
)
from hf_attn_backends.gate.budgets import METRICS, Yardstick, error_of, yardstick
from hf_attn_backends.gate.cases import Case, cases_for
from hf_attn_backends.gate.inputs import Inputs, make_inputs
from hf_attn_backends.gate.results import ClassResult, VariantResult

# Variants whose backward pass adds in an order that may change are not held to equal bits there;
# the artifact says so of each.
DETERMINISTIC_BACKWARD = frozenset({"triton"})


def measure_class(
    call_class: CallClass,
    device: torch.device | str,
    *,
    attend: Attend | None = None,
    cases: list[Case] | None = None,
) -> ClassResult:
    """Measure a class of calls.

    Args:
        call_class: What to measure.
        device: Where.
        attend: The function under test, held to everything that the portable variant is held to.
            Default: the operator, as `auto` resolves it and as the portable variant serves it.
        cases: Default: `cases_for` the class.
    """
    began = time.perf_counter()
    result = ClassResult(name=str(call_class))
    device = torch.device(device)
    if cases is None:
        cases = cases_for(call_class.visibility, device.type)
    with ieee_products():
        for case in cases:
            measure_case(result, case, make_inputs(case, call_class, device), attend)
            if result.status == "refused":
                break
        if result.status != "refused" and offsets.applies(call_class, device):
            for build in (offsets.far_batches, offsets.far_rows, offsets.far_outputs):
                case, inputs = build(call_class, device)
                around = offsets.last_of_many if build is offsets.far_outputs else None
                measure_case(result, case, inputs, attend, around)
                del inputs
                torch.cuda.empty_cache()
    result.seconds = time.perf_counter() - began
    return result


def measure_case(
    result: ClassResult,
    case: Case,
    inputs: Inputs,
    attend: Attend | None,
    around: Callable[[Attend], Attend] | None = None,
) -> None:
    """Measure one case with every variant that would serve it, and note what is found.

    `around`, if given, wraps each function before it is measured.
    """
    stick = yardstick(inputs)
    around = around or (lambda plain: plain)
    if attend is not None:
        _measure_variant(result, case, inputs, stick, around(attend), "triton")
        return
    variant = _measure_variant(result, case, inputs, stick, around(operator()), None)
    if variant not in (None, "triton"):
        _measure_variant(result, case, inputs, stick, around(operator("triton")), "triton")


def _measure_variant(
    result: ClassResult,
    case: Case,
    inputs: Inputs,
    stick: Yardstick,
    attend: Attend,
    variant: str | None,
) -> str | None:
    """Run and check one variant; None for its name: whichever the operator chooses."""
    before = witness.snapshot()
    try:
        with poisoned():
            found = attend(inputs)
            again = attend(inputs) if case.repeat else None
    except CallRefusedError as error:
        result.status, result.reasons = "refused", list(error.reasons)
        return None
    except Exception as error:  # a kernel that does not compile or launch fails the gate
        text = str(error).strip().splitlines()
        what = f"raised {type(error).__name__}: {text[0] if text else 'no message'}"
        result.add_failure("call", "raised", case.name, variant or "auto", what)
        return None
    variant = variant or _ran(witness.since(before))
    kept = result.variants.setdefault(variant, VariantResult())
    kept.cases += 1
    if stick.name not in kept.yardsticks:
        kept.yardsticks.append(stick.name)
    for name in stick.tensors:
        _check(result, kept, case, stick, name, getattr(found, name), variant)
    if again is not None:
        _check_repeat(result, kept, case, found, again, variant)
    return variant


def _ran(launches: dict[witness.Launch, int]) -> str:
    """Variant of both phases, such as `hopper`, or `hopper/triton` where they differ."""
    names = {
        phase: {
            launch.variant
            for launch in launches
            if launch.backend == WITNESS_NAME and launch.phase == phase
        }
        for phase in ("forward", "backward")
    }
    forward, backward = ("+".join(sorted(names[phase])) for phase in ("forward", "backward"))
    return forward if forward == backward else f"{forward}/{backward}"


def _check(
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


def _check_repeat(
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
