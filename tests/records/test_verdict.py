"""The judgement itself, by hand-worked counts; and profiler events of kernels not present here."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hf_attn_backends.hf.observe import launches
from hf_attn_backends.hf.verdict import Verdict, judge, merge, same_backend
from hf_attn_backends.witness import Launch


def seen(**forward: int) -> dict[Launch, int]:
    found = {Launch(name, "v", "forward", "c"): n for name, n in forward.items()}
    return {**found, Launch("triton_fa2", "v", "backward", "c"): 99}


@pytest.mark.parametrize(
    ("decided", "needed", "counts", "blind", "verdict"),
    [
        ("triton_fa2", 4, seen(triton_fa2=4), None, "matched"),
        ("triton_fa2", 4, seen(triton_fa2=3), None, "mismatch"),
        ("triton_fa2", 0, seen(triton_fa2=1), None, "matched"),
        ("triton_fa2", 0, seen(), None, "mismatch"),  # backward launches alone prove nothing
        ("triton_fa2", 2, seen(sdpa=2), None, "mismatch"),
        ("auto", 2, seen(sdpa=1, triton_fa2=1), None, "matched"),
        ("auto", 2, seen(), None, "mismatch"),
        ("sdpa", 2, {}, "no profiler", "not_observed"),
        ("sdpa", 2, seen(sdpa=2), "no profiler", "matched"),
        ("sdpa", 2, {}, None, "not_observed"),
        ("sdpa", 2, seen(eager=2), None, "mismatch"),
        ("eager", 2, seen(sdpa=2), None, "mismatch"),
        ("flash_attention_2", 2, {}, None, "not_observed"),
    ],
)
def test_judge(decided: str, needed: int, counts: dict, blind: str | None, verdict: str) -> None:
    found = judge(decided, needed, counts, window="step 1", blind=blind)
    assert found.verdict == verdict
    assert found.reason


def test_hub_kernels_are_matched_by_family_and_not_by_wish() -> None:
    assert same_backend("kernels-community/flash-attn2", "flash_attention_2")
    assert same_backend("kernels-community/flash-attn3", "flash_attention_3")
    assert not same_backend("kernels-community/flash-attn3", "flash_attention_2")
    assert not same_backend("kernels-community/flash-attn2", "sdpa")
    assert not same_backend("flash_attention_2", "flash_attention_3")


def test_the_worst_rank_decides_and_is_named() -> None:
    good, blind, bad = (Verdict(v, v[0]) for v in ("matched", "not_observed", "mismatch"))
    assert merge([good]) == merge([good, good]) == good
    assert merge([good, bad, blind, bad]) == Verdict("mismatch", "rank 1, 3: m")
    assert merge([good, blind]) == Verdict("not_observed", "rank 1: n")


def event(name: str, *shapes: list[int], dtype: str = "c10::BFloat16", values: tuple = ()):
    return SimpleNamespace(
        name=lambda: name,
        shapes=lambda: list(shapes),
        dtypes=lambda: [dtype] * len(shapes),
        concrete_inputs=lambda: list(values),
    )


def test_operators_of_a_gpu_are_read_by_their_schemas() -> None:
    """In a backward operator the gradient comes first, and positions differ between kernels."""
    q = [2, 8, 64, 128]
    cudnn = event(
        "aten::_scaled_dot_product_cudnn_attention", q, q, q, [], [], [], [],
        values=(None, None, None, None, True, 0.0, True),
    )  # fmt: skip
    masked = event("aten::_scaled_dot_product_efficient_attention", q, q, q, [2, 1, 64, 64])
    gradient = event(
        "aten::_scaled_dot_product_flash_attention_backward", [2, 8, 64, 1], q, q, q,
        values=(None,) * 4,
    )  # fmt: skip
    flash = event("flash_attn::_flash_attn_varlen_backward", q)
    softmax = event("aten::_softmax", [2, 8, 64, 64])  # SDPA's own, or a router's
    found = launches([cudnn, masked, gradient, gradient, flash, softmax])
    assert found == {
        Launch("sdpa", "CUDNN_ATTENTION", "forward", "bfloat16/d128/causal"): 1,
        Launch("sdpa", "EFFICIENT_ATTENTION", "forward", "bfloat16/d128/dense"): 1,
        Launch("sdpa", "FLASH_ATTENTION", "backward", "bfloat16/d128/unknown"): 2,
        Launch("flash_attention_2", "flash_attn", "backward", "unknown"): 1,
    }


def test_a_softmax_is_eager_attention_only_over_four_dimensions() -> None:
    flat = event("aten::_softmax", [64, 8])
    scores = event("aten::_softmax", [2, 8, 64, 64], dtype="float")
    expected = Launch("eager", "torch", "forward", "softmax float32 [2, 8, 64, 64]")
    assert launches([flat, scores]) == {expected: 1}
