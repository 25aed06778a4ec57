"""Seeded faults of softcap, sinks, dropout and unequal head dims: the gate refuses every one."""

from __future__ import annotations

import pytest

from hf_attn_backends.call import CallClass
from hf_attn_backends.gate.cases import cases_for
from hf_attn_backends.gate.measure import measure_class
from hf_attn_backends.gate.results import ClassResult

FORWARD, BACKWARD, SCORES = "forward_kernels.py", "backward_kernels.py", "score_kernels.py"
LAUNCH = "backward.py"


def measured(attend, kind: str, features: str, *only: str) -> ClassResult:
    """Measure fp32, head_dim 16; `only` these cases of the class, for the interpreter's sake."""
    cases = [case for case in cases_for(kind, "cpu") if case.name in only]
    assert len(cases) == len(only)
    call_class = CallClass("float32", 16, kind, features)
    return measure_class(call_class, "cpu", attend=attend, cases=cases)


@pytest.mark.parametrize("features", ["softcap", "sinks", "dropout", "value_dim"])
def test_the_kernel_itself_passes(mutant, features):
    result = measured(mutant(), "causal", features, "square", "single")
    assert result.failures == []
    assert ("dsinks" in result.variants["triton"].tensors) == (features == "sinks")


def test_softcap_ignored(mutant):
    fault = mutant(
        FORWARD,
        "        if SOFTCAP:\n            s = tanh(",
        "        if False:\n            s = tanh(",
    )
    assert {"out", "lse"} <= measured(fault, "causal", "softcap", "square").over


def test_softcap_without_its_factor(mutant):
    fault = mutant(FORWARD, "qk_scale = softcap * LOG2E", "qk_scale = LOG2E * 1.0")
    assert {"out", "lse"} <= measured(fault, "full", "softcap", "tall").over


def test_softcap_gradient_without_its_slope_in_dk(mutant):
    fault = mutant(BACKWARD, "dst = dst * (1.0 - st * st)", "dst = dst * 1.0")
    assert measured(fault, "causal", "softcap", "square").over == {"dk"}


def test_softcap_gradient_without_its_slope_in_dq(mutant):
    fault = mutant(BACKWARD, "ds = ds * (1.0 - s * s)", "ds = ds * 1.0")
    assert measured(fault, "causal", "softcap", "square").over == {"dq"}


def test_softcap_by_a_rough_tanh(mutant):
    """Five terms fewer of the series: no logical fault, and over the budget of fp32."""
    fault = mutant(SCORES, "series * x + x, result", "x, result")
    assert {"out", "lse"} <= measured(fault, "full", "softcap", "tall").over


def test_sink_ignored(mutant):
    fault = mutant(
        FORWARD, "denom = tl.full([BM], 1.0, tl.float32)", "denom = tl.zeros([BM], tl.float32)"
    )
    assert {"out", "lse"} <= measured(fault, "causal", "sinks", "square").over


def test_sink_of_the_first_head_for_all(mutant):
    fault = mutant(FORWARD, "tl.load(sinks_ptr + h)", "tl.load(sinks_ptr + h * 0)")
    assert {"out", "lse", "dsinks"} <= measured(fault, "full", "sinks", "tall").over


def test_sink_without_gradient(mutant):
    fault = mutant(LAUNCH, "return -(share * delta)", "return 0.0 * (share * delta)")
    assert measured(fault, "causal", "sinks", "square").over == {"dsinks"}


def test_sink_gradient_of_the_wrong_sign(mutant):
    fault = mutant(LAUNCH, "return -(share * delta)", "return (share * delta)")
    assert measured(fault, "causal", "sinks", "square").over == {"dsinks"}


def test_dropout_not_scaled_up(mutant):
    fault = mutant(FORWARD, "out = out * (1.0 / (1.0 - dropout_p))", "out = out * 1.0")
    assert "out" in measured(fault, "causal", "dropout", "square").over


def test_dropout_not_scaled_up_in_dv(mutant):
    fault = mutant(BACKWARD, "dv = dv * (1.0 / (1.0 - dropout_p))", "dv = dv * 1.0")
    assert measured(fault, "causal", "dropout", "square").over == {"dv"}


def test_dropout_that_normalises_by_what_it_kept(mutant):
    fault = mutant(FORWARD, "p = tl.where(kept(seed_ptr, bh, drawn_m, drawn_n, dropout_p), p, 0.0)",
                   "p = tl.where(kept(seed_ptr, bh, drawn_m, drawn_n, dropout_p), p, 0.0)\n"
                   "            denom = denom - tl.sum(p, 1) * 0.1")  # fmt: skip
    assert {"out", "lse"} <= measured(fault, "causal", "dropout", "square").over


def test_another_mask_in_dq_than_in_the_forward_pass(mutant):
    fault = mutant(BACKWARD, "keep = kept(seed_ptr, bh, drawn_m, drawn_n, dropout_p)",
                   "keep = kept(seed_ptr, bh, drawn_m + 1, drawn_n, dropout_p)")  # fmt: skip
    assert measured(fault, "causal", "dropout", "square").over == {"dq"}


def test_the_same_mask_for_every_head(mutant):
    """Statistics would not show it; the exact mask does."""
    fault = mutant(SCORES, "head + zero", "zero")
    assert "out" in measured(fault, "full", "dropout", "tall").over


def test_a_mask_that_depends_on_the_tile(mutant):
    fault = mutant(FORWARD, "drawn_n = n0 + tl.arange(0, BN)[None, :]",
                   "drawn_n = tl.arange(0, BN)[None, :] + 0")  # fmt: skip
    result = measured(fault, "full", "dropout", "odd", "single")
    assert {failure.case for failure in result.failures} == {"odd"}  # three tiles of keys


def test_value_dim_taken_for_the_head_dim(mutant):
    fault = mutant(FORWARD, "BN, VALUE_DIM, BV, MASKED", "BN, HEAD_DIM, BV, MASKED")
    assert "out" in measured(fault, "full", "value_dim", "tall", "odd").over
