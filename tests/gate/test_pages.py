"""The kernel for pages is measured with the classes whose calls it serves."""

from __future__ import annotations

import pytest
import torch

from hf_attn_backends.call import CallClass
from hf_attn_backends.gate import pages
from hf_attn_backends.gate.cases import cases_for
from hf_attn_backends.gate.inputs import make_inputs
from hf_attn_backends.gate.measure import measure_class


def _measured(kind, name, device):
    call_class = CallClass("float32", 16, kind)
    cases = [case for case in cases_for(kind, device) if case.name == name]
    return measure_class(call_class, device, cases=cases)


@pytest.mark.parametrize("kind", ["full", "window"])
def test_it_is_within_the_budgets_of_the_class(kernel_device, kind):
    result = _measured(kind, "decode", kernel_device)
    assert result.failures == []
    assert result.variants["paged"].cases == len(pages.PAGE_SIZES)
    assert set(result.variants["paged"].tensors) == {"out"}


@pytest.mark.parametrize(("kind", "name"), [("causal", "few"), ("window", "few")])
def test_a_few_rows_are_measured_by_the_decode_kernel_and_not_over_pages(kernel_device, kind, name):
    result = _measured(kind, name, kernel_device)
    assert result.failures == []
    assert "decode/triton" in result.variants
    assert "paged" not in result.variants


@pytest.mark.parametrize(
    "fault", ["a page too early", "window off by one", "wrong scale", "raises"]
)
def test_faults_are_found(kernel_device, monkeypatch, fault):
    from hf_attn_backends.kernels import paged

    right = paged.paged_attention

    def wrong(query, key_cache, value_cache, table, lengths, *, scale, window, backend):
        if fault == "raises":
            raise RuntimeError("no such page")
        if fault == "a page too early":
            table = table.roll(1, dims=1)
        elif fault == "window off by one":
            window += 1
        else:
            scale = scale * 1.01
        return right(
            query, key_cache, value_cache, table, lengths, scale=scale, window=window,
            backend=backend,
        )  # fmt: skip

    monkeypatch.setattr(paged, "paged_attention", wrong)
    result = _measured("window", "decode", kernel_device)
    assert {failure.variant for failure in result.failures} == {"paged"}


def test_pages_are_scattered_and_hold_nothing_else():
    case = next(case for case in cases_for("full", "cpu") if case.name == "decode")
    inputs = make_inputs(case, CallClass("float32", 16, "full"), "cpu")
    table = torch.tensor([[2, 1], [4, 3]], dtype=torch.int32)
    keys = inputs.key[:, :, :20]
    cache = pages._laid(keys, table, 16)
    assert torch.equal(cache[2], keys[0, :, :16].transpose(0, 1))
    assert torch.equal(cache[3, :4], keys[1, :, 16:].transpose(0, 1))
    assert bool(cache[0].isnan().all())
    assert bool(cache[3, 4:].isnan().all())
