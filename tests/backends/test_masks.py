"""Visibility written out: the kept mask is never a stale one."""

from __future__ import annotations

import torch

from hf_attn_backends.backends.masks import seen_mask, split_bias
from hf_attn_backends.dispatch import attention
from hf_attn_backends.kernels.visibility import CAUSAL, FULL, Visibility
from hf_attn_backends.reference import visible_keys

CPU = torch.device("cpu")


def test_each_form_agrees_with_the_definition():
    rows = torch.tensor([[[0, 2], [1, 1], [2, 5]], [[0, 5], [4, 5], [0, 1]]]).int()
    dense = torch.rand(2, 1, 3, 5) > 0.5
    for visibility in (
        CAUSAL, Visibility(causal=True, window=2), Visibility(intervals=rows),
        Visibility(dense=dense),
    ):  # fmt: skip
        want = visible_keys(2, 1, 3, 5, CPU, visibility=visibility)
        assert torch.equal(seen_mask(visibility, 3, 5, CPU).expand(2, 1, 3, 5), want)
    assert seen_mask(FULL, 3, 5, CPU) is None


def test_the_layers_of_a_model_share_one_mask():
    assert seen_mask(CAUSAL, 4, 6, CPU) is seen_mask(Visibility(causal=True), 4, 6, CPU)
    assert seen_mask(CAUSAL, 4, 7, CPU).shape == (1, 1, 4, 7)


def test_intervals_that_changed_in_place_are_written_anew():
    rows = torch.tensor([[[0, 1], [0, 2]]]).int()
    visibility = Visibility(intervals=rows)
    first = seen_mask(visibility, 2, 2, CPU).clone()
    rows[0, 0, 1] = 2
    assert not torch.equal(seen_mask(visibility, 2, 2, CPU), first)
    with torch.inference_mode():
        frozen = torch.tensor([[[0, 1], [0, 2]]]).int()
        before = seen_mask(Visibility(intervals=frozen), 2, 2, CPU).clone()
        frozen[0, 0, 1] = 2  # no version counter: must not be kept
        assert not torch.equal(seen_mask(Visibility(intervals=frozen), 2, 2, CPU), before)


def test_both_spellings_of_hidden_are_split_off_a_bias():
    lowest = torch.finfo(torch.float32).min
    seen, bias = split_bias(torch.tensor([0.0, -torch.inf, lowest, 1.5, -1e9]))
    assert seen.tolist() == [True, False, False, True, True]
    assert bias.tolist() == [0.0, 0.0, 0.0, 1.5, -1e9]


def test_a_mask_of_inference_mode_does_not_reach_training():
    tensors = [torch.randn(1, 1, n, 8) for n in (3, 5, 5)]
    with torch.inference_mode():
        attention(*tensors, is_causal=True, backend="sdpa")
    leaves = [tensor.requires_grad_() for tensor in tensors]
    attention(*leaves, is_causal=True, backend="sdpa").sum().backward()
    assert all(torch.isfinite(leaf.grad).all() for leaf in leaves)
