"""The mask function against transformers' own dense masks, and what form it answers in."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from transformers import masking_utils
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    packed_sequence_mask_function,
    sdpa_mask,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from hf_attn_backends.hf import families, masks
from hf_attn_backends.hf.masks import visibility_mask


def _config(model_type="mistral", **over):
    return SimpleNamespace(model_type=model_type, **over)


def _dense(mask, kv_length):
    """Whatever the mask function gave, as `[B, 1, M, N]` bool."""
    if mask.dtype == torch.bool:
        return mask
    assert mask.dtype == torch.int32
    assert mask.dim() == 4
    assert mask.shape[1:2] + mask.shape[3:] == (1, 2)
    keys = torch.arange(kv_length)
    return (keys >= mask[..., :1]) & (keys < mask[..., 1:])


def _both(**arguments):
    arguments = {"mask_function": causal_mask_function, **arguments}
    got = visibility_mask(**arguments)
    want = sdpa_mask(
        **{**arguments, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    )
    return got, want


PLACES = {
    "whole": (9, 9, 0, 0),
    "chunk": (4, 9, 5, 0),
    "step": (1, 9, 8, 0),
    "sliding cache": (3, 7, 8, 4),
    "static, first": (4, 12, torch.tensor(0), 0),
    "static, later": (3, 12, torch.tensor(4), 0),
    "static, step": (1, 12, torch.tensor(9), 0),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("padding", [None, "left", "right", "hole", "ones", "all"])
@pytest.mark.parametrize("family", ["mistral", "somebody-elses"])
def test_causal_and_window_with_padding(models, place, window, padding, family):
    m, n, q_offset, kv_offset = PLACES[place]
    so_far = min(n + kv_offset, int(q_offset) + m)
    mask = None
    if padding is not None:
        mask = torch.ones(2, so_far, dtype=torch.bool)
        if padding in ("left", "right"):
            mask = models.padded((so_far, max(1, so_far - 3)), so_far, padding).bool()
        elif padding == "hole" and so_far > 3:
            mask[1, 1:3] = False
        elif padding == "all":
            mask[1] = False
    rule = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
    got, want = _both(
        batch_size=2, q_length=m, kv_length=n, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=rule, attention_mask=mask, local_size=window,
        config=_config(family, sliding_window=window),
    )  # fmt: skip
    if got is None:  # causal to the last key, with the window as an argument
        reach = torch.arange(m)[:, None] + n - m - torch.arange(n)
        got = ((reach >= 0) & (reach < (window or n)))[None, None].expand(2, 1, m, n)
        assert isinstance(q_offset, int)
        assert padding in (None, "ones") or (mask[:, kv_offset:].all() and so_far == n + kv_offset)
    assert torch.equal(_dense(got, n), want)


@pytest.mark.parametrize("place", ["whole", "chunk", "static, first", "static, later"])
@pytest.mark.parametrize("left", [0, 2])
@pytest.mark.parametrize("sizes", [(3, None), (3, 8), (3, 3)])
def test_chunked_attention_is_not_taken_for_a_window(place, left, sizes):
    m, n, q_offset, kv_offset = PLACES[place]
    chunk, window = sizes
    so_far = int(q_offset) + m
    mask = torch.ones(2, so_far, dtype=torch.bool) if left else None
    if left:
        mask[1, :left] = False
    rule = chunked_causal_mask_function(chunk, torch.tensor([0, left]))
    got, want = _both(
        batch_size=2, q_length=m, kv_length=n, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=rule, attention_mask=mask, local_size=chunk,
        config=_config("llama4_text", attention_chunk_size=chunk, sliding_window=window),
    )  # fmt: skip
    assert got.dtype == torch.int32
    assert torch.equal(_dense(got, n), want)


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("padding", [None, "right", "left", "ones"])
@pytest.mark.parametrize("lengths", [(8, 8), (5, 9)])
def test_both_ways(models, window, padding, lengths):
    m, n = lengths
    if window is not None and m != n:
        return
    mask = None
    if padding is not None:
        mask = torch.ones(2, n, dtype=torch.bool)
        if padding != "ones":
            mask = models.padded((n, n - 3), n, padding).bool()
    rule = (
        bidirectional_mask_function
        if window is None
        else sliding_window_bidirectional_mask_function(window)
    )
    got, want = _both(
        batch_size=2, q_length=m, kv_length=n, mask_function=rule, attention_mask=mask,
        local_size=window, config=_config("bert"), allow_is_causal_skip=False,
        allow_is_bidirectional_skip=True,
    )  # fmt: skip
    if got is None:
        assert window is None
        assert padding in (None, "ones")
        assert want.all()
        return
    assert torch.equal(_dense(got, n), want.expand(2, 1, m, n))


@pytest.mark.parametrize("window", [None, 2, 1])
def test_packed_rows_are_intervals(window):
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 0, 1, 2]])
    packed = masking_utils.find_packed_sequence_indices(positions)
    rule = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
    rule = masking_utils.and_masks(rule, packed_sequence_mask_function(packed))
    got, want = _both(
        batch_size=2, q_length=9, kv_length=9, mask_function=rule, local_size=window,
        allow_is_causal_skip=False, config=_config(sliding_window=window),
    )  # fmt: skip
    assert got.dtype == torch.int32
    assert torch.equal(_dense(got, 9), want)


BLOCK = torch.tensor([[-1, 0, 0, 0, -1, -1, 1, 1, -1]] * 2)


@pytest.mark.parametrize("family", ["gemma3_text", "mistral", "somebody-elses"])
@pytest.mark.parametrize("overlay", ["image", "prefix", "holes"])
@pytest.mark.parametrize("rows_at_a_time", [1 << 26, 20])
def test_overlays_are_evaluated(family, overlay, rows_at_a_time, monkeypatch):
    from hf_attn_backends.hf import masks

    monkeypatch.setattr(masks, "_CHUNK", rows_at_a_time)
    rules = {
        "image": lambda b, h, q, k: (BLOCK[b, q] == BLOCK[b, k]) & (BLOCK[b, q] >= 0),
        "prefix": lambda b, h, q, k: k < 3,
        "holes": lambda b, h, q, k: k % 4 == 3,
    }
    rule = masking_utils.or_masks(causal_mask_function, rules[overlay])
    got, want = _both(
        batch_size=2, q_length=9, kv_length=9, mask_function=rule, allow_is_causal_skip=False,
        use_vmap=True, config=_config(family),
    )  # fmt: skip
    assert torch.equal(_dense(got, 9), want)
    known = family in families.WHOLE_ROWS
    assert (got.dtype == torch.int32) == (known and overlay != "holes")


def test_a_caller_that_needs_a_mask_gets_one_it_can_read():
    got, want = _both(
        batch_size=1, q_length=5, kv_length=5, allow_is_causal_skip=False,
        config=_config("deepseek_v32"),
    )  # fmt: skip
    assert torch.equal(got, want)


def test_no_value_is_read_more_than_once(monkeypatch):
    reads = []
    original = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: reads.append(1) or original(self))
    for name in ("item", "__bool__"):
        monkeypatch.setattr(torch.Tensor, name, lambda self: pytest.fail("synchronised"))
    mask = torch.ones(2, 9, dtype=torch.bool)
    kw = {"mask_function": causal_mask_function, "config": _config()}
    visibility_mask(2, 9, 9, attention_mask=mask, **kw)
    assert len(reads) == 1
    visibility_mask(2, 3, 12, q_offset=torch.tensor(4), **kw)
    visibility_mask(2, 9, 9, **kw)
    assert len(reads) == 1


def _source(family):
    import importlib
    import inspect

    folder = {
        "clip_text_model": "clip", "gemma3_text": "gemma3", "llama4_text": "llama4",
        "t5_gemma_module": "t5gemma", "xlm-roberta": "xlm_roberta",
    }.get(family, family)  # fmt: skip
    name = f"transformers.models.{folder}.modeling_{folder}"
    return inspect.getsource(importlib.import_module(name))


@pytest.mark.parametrize("family", sorted(families.WHOLE_ROWS))
def test_the_families_are_what_they_are_said_to_be(family):
    import re

    source = _source(family)
    overlays = r"or_mask_function=|and_mask_function=|block_sequence_ids=|allow_is_causal_skip="
    if family in families.PLAIN:
        assert not re.search(overlays, source)
    if family in families.PASSES_WINDOW:
        assert re.search(r"\bsliding_window=", source)
    body = source[source.index("class ") :]
    touched = re.findall(r"(?:causal_mask|attention_mask)\[[^\]]*:[^\]]*\]", body)
    assert not touched, touched


def test_keys_that_are_still_to_come_are_hidden():
    """A causal row never reaches them; a rule that sees both ways would."""
    padding = torch.tensor([[0, 1, 1], [1, 1, 1]], dtype=torch.bool)
    place = masks._Place(2, 1, 5, 0, 0, lambda *_: True, padding, False, "cpu")
    assert place.keys().int().tolist() == [[0, 1, 1, 0, 0], [1, 1, 1, 0, 0]]
    later = dataclasses.replace(place, kv_offset=1, kv_length=4)
    assert later.keys().int().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0]]
    assert dataclasses.replace(place, attention_mask=None).keys() is None
