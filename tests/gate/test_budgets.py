"""Budgets: tight enough to see a fault, wide enough for an honest kernel."""

from __future__ import annotations

import pytest
import torch

from hf_attn_backends.call import CallClass
from hf_attn_backends.gate import budgets
from hf_attn_backends.gate.budgets import error_of, yardstick
from hf_attn_backends.gate.cases import cases_for
from hf_attn_backends.gate.inputs import make_inputs
from hf_attn_backends.gate.measure import measure_class
from hf_attn_backends.gate.results import ClassResult
from hf_attn_backends.kernels.visibility import KINDS
from hf_attn_backends.reference import visible_keys

INF = float("inf")


def inputs_of(name: str, kind: str, dtype: str = "float32", d: int = 16):
    case = next(case for case in cases_for(kind, "cpu") if case.name == name)
    return case, make_inputs(case, CallClass(dtype, d, kind), "cpu")


def test_error_by_hand():
    exact = torch.tensor([0.0, 1.0, -INF, 3.0], dtype=torch.float64)
    errors = error_of(torch.tensor([0.0, 1.5, -INF, 3.0]), exact)
    assert errors == {"max": 0.5, "rms": 0.25}
    assert error_of(torch.zeros(0), torch.zeros(0)) == {"max": 0.0, "rms": 0.0}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", KINDS)
def test_sdpa_is_within_its_own_budget_and_twice_plus_two_bands_is_not(kind, dtype):
    """The rule, both ways: what SDPA computes passes; a fault of relative size 8 eps does not."""
    case, inputs = inputs_of(cases_for(kind, "cpu")[0].name, kind, dtype)
    stick = yardstick(inputs)
    seen = visible_keys(1, case.heads, case.q_len, case.k_len, "cpu", visibility=inputs.visibility)
    sdpa = budgets._sdpa(inputs, seen)
    for name in ("out", "dq", "dk", "dv"):
        exact = getattr(stick.exact, name)
        found, allowed = error_of(sdpa[name], exact), stick.budgets[name, "max"]
        assert 0 < found["max"] <= allowed, name
        assert found["rms"] <= stick.budgets[name, "rms"], name
        # In fp32 the band also holds the scores' own rounding inside the exponential.
        size = 8 if dtype != "float32" else 400
        wrong = exact * (1 + size * torch.finfo(inputs.query.dtype).eps)
        assert error_of(wrong, exact)["max"] > allowed, name


def test_a_row_of_one_key_has_a_band():
    """Its dS is 0 by symmetry; SDPA's error may be exactly 0, an honest kernel's is not."""
    _, inputs = inputs_of("single", "full")
    stick = yardstick(inputs)
    assert stick.exact.dq.abs().max() < 1e-12
    assert 1e-8 < stick.budgets["dq", "max"] < 1e-4
    assert stick.name == "sdpa"


def test_hidden_rows_do_not_disturb_the_yardstick():
    """SDPA's gradients without the hidden rows equal the oracle's, NaN nowhere."""
    for name, kind in (("tall", "causal"), ("scattered", "intervals"), ("holes", "dense")):
        case, inputs = inputs_of(name, kind)
        stick = yardstick(inputs)
        assert (~stick.seen.any(-1)).any(), name
        assert all(0 < budget < 1e-3 for budget in stick.budgets.values()), name
        del case


def test_eager_stands_in_where_sdpa_has_no_such_call(monkeypatch):
    def none(*args, **kwargs):
        raise RuntimeError("No available kernel. Aborting execution.")

    _, inputs = inputs_of("square", "causal", "bfloat16")
    with_sdpa = yardstick(inputs)
    monkeypatch.setattr(budgets, "scaled_dot_product_attention", none)
    stick = yardstick(inputs)
    assert stick.name == "eager"
    assert stick.budgets["out", "max"] >= 0.5 * with_sdpa.budgets["out", "max"]

    def broken(*args, **kwargs):
        raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr(budgets, "scaled_dot_product_attention", broken)
    with pytest.raises(RuntimeError, match="illegal memory"):
        yardstick(inputs)


def test_a_refused_class_is_not_a_failure():
    result = measure_class(CallClass("float32", 512, "full"), "cpu")
    assert result.status == "refused"
    assert "512" in result.reasons[0]
    assert result.failures == []


def test_a_kernel_that_raises_fails_every_case():
    def attend(inputs):
        raise ValueError("shared memory exceeded\nand more")

    result = measure_class(CallClass("float32", 16, "causal"), "cpu", attend=attend)
    assert {f.check for f in result.failures} == {"raised"}
    assert len(result.failures) == len(cases_for("causal", "cpu"))
    assert "ValueError: shared memory exceeded" in result.failures[0].text


def test_wrong_form_is_named(right_attend):
    def attend(inputs):
        found = right_attend(inputs)
        return found._replace(out=found.out.transpose(1, 2), dk=found.dk[:, :, 1:])

    result = measure_class(CallClass("float32", 16, "causal"), "cpu", attend=attend)
    assert {(f.tensor, f.check) for f in result.failures} == {("out", "form"), ("dk", "form")}


def test_results_survive_the_trip_between_processes(right_attend):
    result = measure_class(CallClass("float16", 16, "dense"), "cpu", attend=right_attend)
    result.add_failure("dq", "error", "holes", "triton", "is wrong")
    assert ClassResult.from_dict(result.to_dict()) == result
    assert result.worst()[1]["ratio"] <= 1
