"""Seeded faults of the real kernel's arithmetic: the gate must refuse every one of them.

Each test changes one text of the kernel's own source, runs the changed kernel in Triton's
interpreter over a whole class, and names the tensors that the gate must find over their budgets:
those, and no others.
"""

from __future__ import annotations

from hf_attn_backends.call import CallClass
from hf_attn_backends.gate import run_gate
from hf_attn_backends.gate.cases import cases_for
from hf_attn_backends.gate.measure import measure_class
from hf_attn_backends.gate.results import ClassResult

FORWARD, BACKWARD, VISIBLE = "forward_kernels.py", "backward_kernels.py", "visibility_kernels.py"
ALL = {"out", "lse", "dq", "dk", "dv"}


def measured(attend, kind: str, *only: str) -> ClassResult:
    """Measure fp32, head_dim 16; `only` these cases of the class, for the interpreter's sake."""
    cases = [case for case in cases_for(kind, "cpu") if not only or case.name in only]
    return measure_class(CallClass("float32", 16, kind), "cpu", attend=attend, cases=cases)


def checks(result: ClassResult) -> set[str]:
    return {failure.check for failure in result.failures}


def test_the_kernel_itself_passes(mutant):
    """The way mutants are built is no fault of its own."""
    result = run_gate("cpu", classes=["float32/d16/causal"], attend=mutant())
    assert result.failures == []
    assert result.passed
    assert result.path is None  # a function of one's own is measured, and never vouched for


def test_wrong_scale(mutant):
    result = measured(
        mutant(FORWARD, "qk_scale = scale * LOG2E", "qk_scale = scale * 1.45"), "full", "tall"
    )
    assert result.over == ALL


def test_window_off_by_one(mutant):
    fault = mutant(VISIBLE, "+ 1 - window, 0)\n        end", "+ 2 - window, 0)\n        end")
    result = measured(fault, "window", "narrow", "edge - 1")
    assert result.over == ALL
    assert {"narrow", "edge - 1"} <= {failure.case for failure in result.failures}


def test_window_off_by_one_the_other_way(mutant):
    fault = mutant(VISIBLE, "+ 1 - window, 0)\n        end", "- window, 0)\n        end")
    assert {"one", "edge - 1"} <= {
        failure.case for failure in measured(fault, "window", "one", "edge - 1").failures
    }


def test_dropped_tile(mutant):
    """The ragged last tile of keys is never visited in the forward pass and in dQ."""
    fault = mutant(VISIBLE, "hi = tl.maximum(hi, 0)\n    lo = tl.minimum(lo, hi) // BN * BN",
                   "hi = tl.maximum(hi, 0) // BN * BN\n    lo = tl.minimum(lo, hi)")  # fmt: skip
    assert {"out", "lse", "dq"} <= measured(fault, "full", "odd").over


def test_dropped_query_tile_in_dkdv(mutant):
    fault = mutant(BACKWARD, "for m0 in tl.range(lo, hi, BM", "for m0 in tl.range(lo, hi, BM * 2")
    assert measured(fault, "full", "tall").over == {"dk", "dv"}


def test_gqa_heads_swapped(mutant):
    fault = mutant(FORWARD, "kv = h // group", "kv = h % (heads // group)")
    result = measured(fault, "full", "odd", "tall")
    assert {"out", "lse"} <= result.over
    assert {failure.case for failure in result.failures} == {"odd"}  # 6 heads over 2


def test_gradient_of_one_head_of_the_group(mutant):
    fault = mutant(BACKWARD, "for g in range(0, group):", "for g in range(0, 1):")
    assert measured(fault, "causal", "tall").over == {"dk", "dv"}


def test_dk_misses_a_term(mutant):
    """delta is left out of dS where dK is summed."""
    fault = mutant(BACKWARD, "dst = pt * (dpt - delta[None, :])", "dst = pt * dpt")
    assert measured(fault, "causal", "square").over == {"dk"}


def test_delta_left_out_of_dq(mutant):
    fault = mutant(BACKWARD, "ds = p * (dp - delta[:, None])", "ds = p * dp")
    assert measured(fault, "causal", "square").over == {"dq"}


def test_dq_not_scaled(mutant):
    assert measured(mutant(BACKWARD, "dq * scale", "dq"), "full", "tall").over == {"dq"}


def test_causal_aligned_to_the_first_key(mutant):
    """As in torch's own is_causal: invisible where M = N."""
    fault = mutant(VISIBLE, "end = tl.minimum(rows + (k_len - q_len) + 1, k_len)",
                   "end = tl.minimum(rows + 1, k_len)")  # fmt: skip
    result = measured(fault, "causal", "square", "chunk")
    assert {"out", "lse"} <= result.over
    assert {failure.case for failure in result.failures} == {"chunk"}


def test_lse_in_base_2(mutant):
    fault = mutant(FORWARD, "peak * LN2 + tl.log(", "peak + tl.log2(")
    assert measured(fault, "full", "tall").over == {"lse", "dq", "dk", "dv"}


def test_empty_rows_are_nan(mutant):
    fault = mutant(FORWARD, "tl.where(some, 1.0 / total, 0.0)", "(1.0 / denom)")
    result = measured(fault, "intervals", "scattered")
    assert "out" in result.over
    assert {"hidden rows", "finite"} <= checks(result)


def test_empty_rows_are_the_mean_of_the_values(mutant):
    """What a large negative number in place of -inf does; transformers' eager attention too."""
    result = measured(mutant(FORWARD, 's, float("-inf"))', "s, -1.0e30)"), "dense", "broadcast")
    assert ("out", "hidden rows") in {(f.tensor, f.check) for f in result.failures}


def test_keys_beyond_the_end_leak_in(mutant):
    """One key too many: it reads as zeros, and weighs exp(0)."""
    fault = mutant(VISIBLE, "end = start + k_len", "end = start + k_len + 1")
    assert {"out", "lse"} <= measured(fault, "full", "tall").over


def test_dense_mask_of_the_first_head_for_all(mutant):
    fault = mutant(FORWARD, "mask_ptr, b, h, stride_mb", "mask_ptr, b, h * 0, stride_mb")
    result = measured(fault, "dense", "decode", "broadcast")
    assert {"out", "lse"} <= result.over
    assert {failure.case for failure in result.failures} == {"decode"}  # a mask for each head


def test_intervals_of_the_first_sequence_for_all(mutant):
    fault = mutant(VISIBLE, "base = intervals_ptr + batch.to(tl.int64) * stride_ib",
                   "base = intervals_ptr")  # fmt: skip
    result = measured(fault, "intervals", "decode", "scattered")
    assert {failure.case for failure in result.failures} == {"decode"}  # two sequences


def test_running_output_not_rescaled(mutant):
    fault = mutant(FORWARD, "acc = acc * alpha[:, None]", "acc = acc")
    assert "out" in measured(fault, "causal", "square").over


def test_strides_taken_for_contiguous(mutant):
    fault = mutant(FORWARD, "m0, q_len, stride_qm,", "m0, q_len, HEAD_DIM,")
    result = measured(fault, "causal", "chunk", "single")
    assert {failure.case for failure in result.failures} == {"chunk"}  # the strided case


def test_last_row_not_written(mutant):
    """Outputs are poisoned, so that what is not written cannot be right by luck."""
    fault = mutant(
        "memory_kernels.py", "keep = (first + offs < limit)", "keep = (first + offs < limit - 1)"
    )
    assert ("out", "finite") in {
        (f.tensor, f.check) for f in measured(fault, "full", "tall").failures
    }


def test_products_of_lower_precision(mutant):
    """fp32 inputs multiplied with 11 bits, as TF32 does: no logical fault, and over budget."""
    fault = mutant(FORWARD, "s = tl.dot(q, ", "s = tl.dot(q.to(tl.float16).to(tl.float32), ")
    assert {"out", "lse"} <= measured(fault, "full", "tall").over


def test_gradients_that_change_from_run_to_run(right_attend):
    """Within every budget, and still refused: one bit of dQ differs between two runs."""
    calls = []

    def attend(inputs):
        calls.append(None)
        found = right_attend(inputs)
        if len(calls) % 2 == 0:
            found.dq[..., -1, -1] *= 1 + 2.0**-23
        return found

    result = measured(attend, "causal")
    assert [(f.tensor, f.check) for f in result.failures] == [("dq", "determinism")]
