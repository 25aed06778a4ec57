"""Cases, their inputs and masks: what the gate tries is what it says it tries."""

from __future__ import annotations

import pytest
import torch

from hf_attn_backends.call import CallClass
from hf_attn_backends.gate import offsets
from hf_attn_backends.gate.attend import operator, poisoned
from hf_attn_backends.gate.budgets import yardstick
from hf_attn_backends.gate.cases import cases_for
from hf_attn_backends.gate.inputs import make_inputs
from hf_attn_backends.gate.measure import measure_case
from hf_attn_backends.gate.results import ClassResult
from hf_attn_backends.kernels.visibility import KINDS
from hf_attn_backends.reference import attention_reference_grads

INF = float("inf")


def inputs_of(name: str, kind: str, dtype: str = "float32", d: int = 16):
    case = next(case for case in cases_for(kind, "cpu") if case.name == name)
    return case, make_inputs(case, CallClass(dtype, d, kind), "cpu")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_cases_of_a_class(kind, device):
    cases = cases_for(kind, device)
    tile = 32 if device == "cpu" else 128
    assert len({case.name for case in cases}) == len(cases)
    assert any(case.repeat for case in cases)
    assert any(case.q_len == 1 for case in cases) or kind == "window"
    assert any(case.k_len > 2 * tile and case.k_len % tile for case in cases)
    assert any(case.q_len < case.k_len for case in cases)
    layouts = {case.layout for case in cases}
    assert "copied" in layouts
    assert layouts & {"strided", "skewed"}
    assert any(case.grad == "ones" for case in cases)
    ratios = {case.heads // case.kv_heads for case in cases}
    assert ratios & {3, 4}
    assert len(ratios) > 1


def test_together_the_kinds_try_everything():
    cases = [case for kind in KINDS for case in cases_for(kind, "cpu")]
    assert {1, 3, 4} <= {case.heads // case.kv_heads for case in cases}
    assert any(case.q_len > case.k_len for case in cases)
    assert any(case.batch > 1 for case in cases)
    edges = {case.window - case.k_len for case in cases_for("window", "cpu")}
    assert {-1, 0, 1} <= edges
    with pytest.raises(ValueError, match="no cases"):
        cases_for("spiral", "cpu")


def test_inputs_are_what_the_case_says():
    case, inputs = inputs_of("chunk", "causal", "bfloat16", 24)
    again = make_inputs(case, CallClass("bfloat16", 24, "causal"), "cpu")
    assert torch.equal(inputs.query, again.query)
    assert inputs.query.stride() == (37 * 6 * 32, 32, 6 * 32, 1)
    assert inputs.query.dtype == torch.bfloat16
    assert inputs_of("single", "causal")[1].query.stride(-1) == 1  # of length 1: no other way
    assert inputs_of("decode", "intervals")[1].key.stride(-1) != 1
    assert inputs_of("tall", "causal")[1].grad_out.stride() == (0, 0, 0, 0)
    assert inputs_of("broadcast", "dense")[1].visibility.dense.stride()[:2] == (0, 0)
    other = make_inputs(case, CallClass("bfloat16", 24, "window"), "cpu")
    assert not torch.equal(inputs.query, other.query)


def test_interval_masks_by_hand():
    _, inputs = inputs_of("packed", "intervals")
    assert inputs.visibility.intervals.dtype == torch.int32
    packed = inputs.visibility.intervals[0].tolist()
    assert packed[0] == [0, 1]
    assert packed[30] == [0, 31]
    assert packed[31] == [31, 32]  # a document of one
    assert packed[32] == [32, 33]
    assert packed[66] == [32, 67]
    _, inputs = inputs_of("left padding", "intervals")
    assert inputs.visibility.intervals[1, 6].tolist() == [7, 7]
    assert inputs.visibility.intervals[1, 7].tolist() == [7, 8]
    assert inputs.visibility.intervals[0, 6].tolist() == [0, 7]


def test_poison_reaches_every_allocation_and_is_gone_afterwards():
    like = torch.zeros(2, 3)
    with poisoned():
        made = [
            torch.empty(2, 3), torch.empty_like(like), torch.empty_strided((2, 3), (3, 1)),
            like.new_empty(2, 3), like.new_empty_strided((2, 3), (3, 1)),
        ]  # fmt: skip
        assert torch.empty(2, dtype=torch.int32).dtype == torch.int32
    assert all(tensor.isnan().all() for tensor in made)
    assert "new_empty" not in vars(torch.Tensor)
    assert torch.empty.__name__ == "empty"


def test_far_offsets_measure_what_they_say(monkeypatch, kernel_device):
    """The views of the beyond-2^31 cases, with a smaller notion of far."""
    if kernel_device != "cpu":
        pytest.skip("the real ones run in the gate on a GPU")
    monkeypatch.setattr(offsets, "FAR", 136192 + 64)
    call_class = CallClass("float32", 128, "causal")
    assert not offsets.applies(CallClass("bfloat16", 128, "causal"), torch.device("cpu"))
    result = ClassResult(name=str(call_class))
    case, inputs = offsets.far_batches(call_class, torch.device("cpu"))
    assert inputs.query.stride(0) == inputs.key.stride(0) == offsets.FAR
    assert inputs.key.data_ptr() != inputs.query.data_ptr()
    want = attention_reference_grads(*make_inputs(case, call_class, "cpu")[:4], is_causal=True)
    assert torch.allclose(yardstick(inputs).exact.out, want.out, rtol=0, atol=1e-12)
    _, inputs = offsets.far_rows(call_class, torch.device("cpu"))
    assert inputs.value.stride(2) * 199 > offsets.FAR
    many = offsets.last_of_many(operator())
    case, inputs = inputs_of("single", "causal", d=16)
    seen = []

    def attend(big):
        seen.append(big.query.shape[0])
        return operator()(big)

    monkeypatch.setattr(offsets, "FAR", 64)
    measure_case(result, case, inputs, attend, offsets.last_of_many)
    assert result.failures == []
    assert seen == [64 // 32 + 2]
    assert many(inputs).out.shape == inputs.query.shape
