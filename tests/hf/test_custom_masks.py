"""Masks of a user's own, four-dimensional, boolean and additive."""

from __future__ import annotations

import pytest
import torch

from hf_attn_backends.errors import CallRefusedError
from hf_attn_backends.hf.custom_masks import visibility_of

N = 15


def _masks(models):
    i = torch.arange(N)
    prefix = models.causal(N, 2) | (i[None, None, :] < torch.tensor([4, 9])[:, None, None])
    parent = ((i - 1) // 2).clamp(min=0)
    tree = torch.eye(N, dtype=torch.bool)
    for node in range(1, N):
        tree[node] |= tree[parent[node]]
    heads = torch.stack([models.causal(N, 2, window=w) for w in (2, 4, 7, N)], 1)
    return {
        "prefix": (prefix[:, None], "intervals"),
        "tree": (tree[None, None], "dense"),
        "tree of each": (tree[None, None].expand(2, 1, N, N), "dense"),
        "heads": (heads, "dense"),
    }


@pytest.mark.parametrize("name", ["prefix", "tree", "tree of each", "heads"])
def test_boolean_and_additive_masks(models, calls, name):
    eager, tried = models.pair()
    seen, kind = _masks(models)[name]
    ids = models.ids(2, N)
    additive = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    outs = []
    for model, mask in ((eager, additive), (tried, additive), (tried, seen)):
        model.zero_grad()
        out = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        out.pow(2).mean().backward()
        outs.append(out)
        if model is tried:
            models.near(out, outs[0])
            models.near_grads(tried, eager)
    assert {call["visibility"].kind for call in calls} == {kind}


@pytest.mark.parametrize("low", [float("-inf"), -1e9, -1e4, torch.finfo(torch.float16).min])
def test_every_spelling_of_hidden(low):
    seen = torch.ones(4, 4).tril().bool()[None, None]
    mask = torch.zeros(1, 1, 4, 4).masked_fill(~seen, low)
    got = visibility_of(mask, 4, 4)
    assert got.intervals.tolist() == [[[0, 1], [0, 2], [0, 3], [0, 4]]]


@pytest.mark.parametrize("value", [0.5, -3.0, -9999.0, float("nan"), float("inf")])
def test_a_bias_is_refused_and_named(value):
    mask = torch.zeros(1, 1, 4, 4)
    mask[0, 0, 1, 2] = value
    with pytest.raises(CallRefusedError, match="additive bias") as refused:
        visibility_of(mask, 4, 4)
    assert f"{value:.4g}" in str(refused.value)
    assert "in 1 of 16 places" in str(refused.value)


@pytest.mark.parametrize(
    ("mask", "says"),
    [
        (torch.ones(1, 4, dtype=torch.bool), "4 dimensions, got shape (1, 4)"),
        (torch.ones(1, 1, 4, 4, dtype=torch.int64), "torch.int64"),
        (torch.ones(1, 1, 3, 4, dtype=torch.bool), "must end in (4, 4)"),
        (torch.ones(1, 1, 4, 3, dtype=torch.bool), "must end in (4, 4)"),
        (object(), "got object"),
    ],
)
def test_what_is_no_mask_is_refused(mask, says):
    with pytest.raises(CallRefusedError) as refused:
        visibility_of(mask, 4, 4)
    assert says in str(refused.value)


def test_longer_and_broadcast_masks():
    seen = torch.ones(1, 1, 2, 9, dtype=torch.bool)
    seen[..., 1, 3] = False
    got = visibility_of(seen, 2, 5)
    assert got.dense.shape == (1, 1, 2, 5)
    assert torch.equal(got.dense, seen[..., :5])
    one = torch.ones(2, 1, 1, 5, dtype=torch.bool)
    assert visibility_of(one, 3, 5).intervals.tolist() == [[[0, 5]] * 3] * 2


def test_a_mask_is_read_once_for_all_layers(models, calls, monkeypatch):
    from hf_attn_backends.hf import custom_masks

    _, tried = models.pair(num_hidden_layers=4)
    read = []
    original = custom_masks.intervals_from_dense
    monkeypatch.setattr(
        custom_masks, "intervals_from_dense", lambda m: read.append(1) or original(m)
    )
    for name, (seen, _) in _masks(models).items():
        del read[:]
        tried(input_ids=models.ids(2, N), attention_mask=seen, use_cache=False)
        assert len(read) == 1, name


def test_a_mask_that_is_written_to_is_read_again():
    seen = torch.ones(1, 1, 3, 3, dtype=torch.bool)
    assert visibility_of(seen, 3, 3).intervals[0, 0].tolist() == [0, 3]
    seen[..., 2] = False
    assert visibility_of(seen, 3, 3).intervals[0, 0].tolist() == [0, 2]
    seen[..., 0, 1] = False
    seen[..., 0, 2] = True
    assert visibility_of(seen, 3, 3).kind == "dense"


def test_masks_are_not_kept_alive():
    import gc
    import weakref

    from hf_attn_backends.hf.memo import MASKS

    gc.collect()
    before = len(MASKS)
    for mask in (
        torch.rand(1, 1, 6, 6) > 0.5,
        torch.zeros(1, 1, 6, 6),
        (torch.rand(1, 1, 6, 9) > 0.5).expand(2, 1, 6, 9),
    ):
        visibility_of(mask, 6, 6)
        gone = weakref.ref(mask)
    del mask
    gc.collect()
    assert gone() is None
    assert len(MASKS) == before
