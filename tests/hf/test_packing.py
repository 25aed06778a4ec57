"""Packed samples, where transformers sees them and where it loses them."""

from __future__ import annotations

import pytest
import torch

from hf_attn_backends.errors import CallRefusedError
from hf_attn_backends.hf.packing import intersect
from hf_attn_backends.kernels.visibility import FULL, Visibility

SAMPLES = (5, 8, 4)


def _positions(*rows):
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])


def _one_by_one(eager, ids, samples):
    parts, start = [], 0
    for n in samples:
        parts.append(eager(input_ids=ids[:, start : start + n]).logits)
        start += n
    return torch.cat(parts, 1)


def _weigh(out):
    generator = torch.Generator().manual_seed(5)
    return (out.double() * torch.randn(out.shape, generator=generator)).sum()


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("how", ["no cache", "cache", "cache and ones", "ones"])
def test_position_ids_tell_samples_apart(models, calls, window, how):
    eager, tried = models.pair(sliding_window=window)
    rows = (SAMPLES, (10, 7))
    ids, positions = models.ids(2, 17), _positions(*rows)
    kw = {"use_cache": "cache" in how and how != "no cache"}
    if "ones" in how:
        kw["attention_mask"] = torch.ones_like(ids)
    got = tried(input_ids=ids, position_ids=positions, **kw).logits
    want = torch.cat([_one_by_one(eager, ids[r : r + 1], rows[r]) for r in range(2)])
    _weigh(got).backward()
    _weigh(want).backward()
    models.near(got, want)
    models.near_grads(tried, eager)
    assert {call["visibility"].kind for call in calls} == {"intervals"}


def test_the_default_call_of_a_loop_of_ones_own(models, calls):
    # neither mask nor use_cache: transformers makes a cache, and forgets the packing
    eager, tried = models.pair()
    ids = models.ids(1, 17)
    with torch.no_grad():
        got = tried(input_ids=ids, position_ids=_positions(SAMPLES)).logits
        models.near(got, _one_by_one(eager, ids, SAMPLES))


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("cache", [False, True])
def test_cu_seq_lens_alone(models, calls, window, cache):
    eager, tried = models.pair(sliding_window=window)
    ids = models.ids(1, 17)
    bounds = torch.tensor([0, *torch.tensor(SAMPLES).cumsum(0)], dtype=torch.int32)
    # rotary attention only sees differences of positions, so that none need to be given
    got = tried(
        input_ids=ids, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, max_length_q=8,
        max_length_k=8, use_cache=cache,
    ).logits  # fmt: skip
    want = _one_by_one(eager, ids, SAMPLES)
    _weigh(got).backward()
    _weigh(want).backward()
    models.near(got, want)
    models.near_grads(tried, eager)


def test_cu_seq_lens_cut_a_mask_too(models, calls):
    eager, tried = models.pair()
    ids = models.ids(1, 17)
    bounds = torch.tensor([0, *torch.tensor(SAMPLES).cumsum(0)], dtype=torch.int32)
    mask = torch.ones(1, 17, dtype=torch.long)
    mask[0, -1] = 0
    got = tried(input_ids=ids, attention_mask=mask, cu_seq_lens_q=bounds).logits
    models.near(got[:, :16], _one_by_one(eager, ids, SAMPLES)[:, :16])
    seen = models.causal(17).unsqueeze(1)
    got = tried(input_ids=ids, attention_mask=seen, cu_seq_lens_q=bounds).logits
    models.near(got, _one_by_one(eager, ids, SAMPLES))


def test_a_mask_is_cut_at_both_ends_of_a_sample():
    """Hand-worked: causal masks reach no later sample anyway, others do."""
    rows = torch.tensor([[[1, 3], [2, 6]]], dtype=torch.int32)
    intervals = Visibility(intervals=torch.tensor([[[0, 5], [3, 8]]], dtype=torch.int32))
    assert intersect(intervals, rows).intervals.tolist() == [[[1, 3], [3, 6]]]
    dense = torch.ones(1, 1, 2, 7, dtype=torch.bool)
    dense[0, 0, 1, 4] = False
    cut = intersect(Visibility(dense=dense), rows).dense[0, 0].int().tolist()
    assert cut == [[0, 1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 0, 1, 0]]
    assert intersect(FULL, rows).intervals is rows


def test_the_collator_of_transformers(models, calls):
    from transformers import DataCollatorWithFlattening

    eager, tried = models.pair()
    rows = [{"input_ids": models.ids(1, n, seed=n)[0].tolist()} for n in SAMPLES]
    batch = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)(rows)
    labels = batch.pop("labels")
    got = tried(**batch).logits
    models.near(got, _one_by_one(eager, batch["input_ids"], SAMPLES))
    assert labels.shape == batch["input_ids"].shape


def test_left_padding_is_no_packing(models, calls):
    # generate gives padding the positions 0, 0, 0, ...: the mask has the word
    eager, tried = models.pair()
    mask = models.padded((6,), 10, "left")
    ids = torch.where(mask.bool(), models.ids(1, 10), 0)
    got = tried(input_ids=ids, attention_mask=mask, position_ids=models.positions(mask)).logits
    models.near(got[:, -6:], eager(input_ids=ids[:, -6:]).logits)


def test_positions_that_do_not_begin_at_zero_are_one_sample(models, calls):
    eager, tried = models.pair()
    ids = models.ids(1, 9)
    positions = torch.arange(9)[None] + 4
    models.near(
        tried(input_ids=ids, position_ids=positions).logits,
        eager(input_ids=ids, position_ids=positions).logits,
    )
    assert calls[0]["visibility"].kind == "causal"


def test_a_restart_behind_a_cache_is_refused(models, calls):
    from transformers import DynamicCache

    _, tried = models.pair()
    cache = DynamicCache(config=tried.config)
    kw = models.cache_kw(tried, cache)
    ids = models.ids(1, 9)
    tried(input_ids=ids[:, :4], use_cache=True, **kw)
    with pytest.raises(CallRefusedError, match="position_ids restart within a chunk of 5 tokens"):
        tried(input_ids=ids[:, 4:], position_ids=_positions((2, 3)), use_cache=True, **kw)


def test_position_ids_are_read_once_for_all_layers(models, calls, monkeypatch):
    from hf_attn_backends.hf import packing

    _, tried = models.pair(num_hidden_layers=4)
    made = []
    run_starts = packing.run_starts
    monkeypatch.setattr(packing, "run_starts", lambda x: made.append(1) or run_starts(x))
    tried(input_ids=models.ids(1, 17), position_ids=_positions(SAMPLES))
    assert len(calls) == 4
    assert len(made) == 1


def test_what_is_kept_of_a_tensor_goes_with_it_and_with_its_version():
    from hf_attn_backends.hf.memo import TensorMemo

    memo = TensorMemo()
    ids = torch.arange(4)
    memo.of(ids)["x"] = 1
    assert memo.of(ids) == {"x": 1}
    ids[0] = 7
    assert memo.of(ids) == {}
    del ids
    assert len(memo) == 0


def _rows_by_definition(bounds_q, bounds_k, batch, q_length, k_length, causal, window):
    seen = torch.zeros(batch, q_length, k_length, dtype=torch.bool)
    edges = list(zip(bounds_q[:-1], bounds_q[1:], bounds_k[:-1], bounds_k[1:], strict=True))
    for q0, q1, k0, k1 in edges:
        for i in range(q0, q1):
            b, place = i // q_length, k1 - 1 - (q1 - 1 - i)
            for j in range(k0, k1):
                near = not causal or (j <= place and (window is None or place - j < window))
                if near and j // k_length == b:
                    seen[b, i % q_length, j % k_length] = True
    return seen


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 2])
def test_rows_of_lengths_by_definition(causal, window):
    from hf_attn_backends.hf.packing import rows_of_lengths

    if window and not causal:
        window = None
    for bounds_q, bounds_k, batch, m, n in (
        ([0, 3, 4, 9], [0, 3, 4, 9], 1, 9, 9),
        ([0, 3, 8, 12, 16], [0, 3, 8, 12, 16], 2, 8, 8),
        ([0, 2, 3, 5], [0, 4, 5, 9], 1, 5, 9),
    ):
        rows = rows_of_lengths(
            torch.tensor(bounds_q, dtype=torch.int32), torch.tensor(bounds_k, dtype=torch.int32),
            batch, m, n, causal, window,
        )  # fmt: skip
        keys = torch.arange(n)
        got = (keys >= rows[..., :1]) & (keys < rows[..., 1:])
        want = _rows_by_definition(bounds_q, bounds_k, batch, m, n, causal, window)
        assert torch.equal(got, want)
        assert rows.dtype == torch.int32
