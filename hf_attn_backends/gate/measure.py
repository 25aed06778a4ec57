"""Measure one call class: the kernel, forward and backward, on every case, against its budgets.

Every failure is noted, never only the first. Before the kernel runs, whatever it allocates is
filled with NaN, so that an element it forgets to write is an error and not luck.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from hf_attn_backends import witness
from hf_attn_backends.call import CallClass
from hf_attn_backends.errors import CallRefusedError
from hf_attn_backends.gate import offsets, pages
from hf_attn_backends.gate.attend import (
    WITNESS_NAME,
    Attend,
    ieee_products,
    operator,
    poisoned,
)
from hf_attn_backends.gate.budgets import Yardstick, yardstick
from hf_attn_backends.gate.cases import Case, cases_for
from hf_attn_backends.gate.checks import check, check_repeat
from hf_attn_backends.gate.inputs import Inputs, make_inputs
from hf_attn_backends.gate.results import ClassResult, VariantResult


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
    if variant is not None and pages.applies(case, inputs):
        _measure_pages(result, case, inputs, stick)


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
        check(result, kept, case, stick, name, getattr(found, name), variant)
    if again is not None:
        check_repeat(result, kept, case, found, again, variant)
    return variant


def _measure_pages(result: ClassResult, case: Case, inputs: Inputs, stick: Yardstick) -> None:
    """Run and check the kernel for pages, which has a forward pass alone."""
    kept = result.variants.setdefault("paged", VariantResult())
    for page_size in pages.PAGE_SIZES:
        try:
            with poisoned():
                found, again = (pages.attend(inputs, page_size) for _ in range(2))
        except Exception as error:
            what = f"raised {type(error).__name__} over pages of {page_size} keys: {error}"
            result.add_failure("call", "raised", case.name, "paged", what)
            return
        kept.cases += 1
        check(result, kept, case, stick, "out", found, "paged")
        if not torch.equal(found, again):
            what = "differs between two runs on the same inputs"
            result.add_failure("out", "determinism", case.name, "paged", what)
    if stick.name not in kept.yardsticks:
        kept.yardsticks.append(stick.name)


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
