"""The attention function over a paged cache that was built by hand."""

from __future__ import annotations

import pytest
import torch

from hf_attn_backends import witness
from hf_attn_backends.backends import proof
from hf_attn_backends.errors import CallRefusedError
from hf_attn_backends.hf import paged, paged_rows
from hf_attn_backends.reference import attention_reference


def _pages(seed):
    """Two caches of 12 pages of 4 places, a table and lengths; the third sequence is padding."""
    generator = torch.Generator().manual_seed(seed)
    caches = [torch.randn(12, 4, 1, 16, generator=generator) for _ in range(2)]
    for cache in caches:  # nobody has written there, and nobody may look
        cache[2, 1:], cache[1], cache[9, 3:] = torch.nan, torch.nan, torch.nan
    table = torch.tensor([[7, 2, -1], [0, 5, 9], [-1, -1, -1]], dtype=torch.int32)
    return (*caches, table), torch.tensor([5, 12, 0], dtype=torch.int32)


def _new_tokens(seed):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(1, h, 3, 16, generator=generator) for h in (2, 1, 1))


def _bounds(lengths):
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def _by_hand(pages, query, lengths, *, scale, window=None, softcap=None, sinks=None):
    """Each sequence by the oracle, its keys gathered one by one."""
    out = torch.zeros(1, 2, 3, 16)
    for row, length in enumerate(lengths.tolist()):
        if length:
            places = [(int(pages[2][row, n // 4]), n % 4) for n in range(length)]
            if window:
                places = places[-window:]
            keys, values = (torch.stack([c[p] for p in places], dim=1)[None] for c in pages[:2])
            one, _ = attention_reference(
                query[:, :, row : row + 1], keys, values, scale=scale, softcap=softcap, sinks=sinks
            )
            out[:, :, row] = one[:, :, 0].float()
    return out


def _near(got, want):
    assert got.shape == want.shape
    assert float((got - want).abs().max()) < 1e-5


@pytest.mark.parametrize("window", [None, 3])
def test_the_function_on_pages_built_by_hand(pair, window):
    """New keys land in the page of each sequence's newest place; padding rows change nothing."""
    made = pair("mistral" if window is None else "mistral_window")
    module = made.tried.model.layers[0].self_attn
    pages, lengths = _pages(seed=6)
    was = [cache.clone() for cache in pages[:2]]
    query, key, value = _new_tokens(seed=7)
    out = paged.attend(
        "triton_fa2", module, query, key, value, window, None, _bounds(lengths),
        paged.Extras(0.25, None, None, 0.0),
        {"k_cache": pages[0], "v_cache": pages[1], "block_table": pages[2], "write_index": None},
    )  # fmt: skip
    for cache, old, new in zip(pages, was, (key, value), strict=False):
        for row, length in enumerate(lengths.tolist()):
            if length:
                page, slot = divmod(length - 1, 4)
                old[pages[2][row, page], slot] = new[0, :, row]
        assert torch.equal(cache.nan_to_num(9.0), old.nan_to_num(9.0))
    _near(out, _by_hand(pages, query, lengths, scale=0.25, window=window))
    assert not out[:, :, 2].any()  # the padding row


@pytest.mark.parametrize("feature", ["softcap", "sinks"])
def test_softcap_or_sinks_over_block_tables(pair, feature):
    """The kernel for pages has neither: the portable one serves, from a copy of the pages."""
    made = pair("mistral")
    module = made.tried.model.layers[0].self_attn
    pages, lengths = _pages(seed=4)
    query, key, value = _new_tokens(seed=5)
    softcap, sinks = (3.0, None) if feature == "softcap" else (None, torch.randn(2))
    extras = paged.Extras(0.25, softcap, sinks, 0.0)
    before = witness.snapshot()
    out = paged.attend(
        "triton_fa2", module, query, key, value, None, None, _bounds(lengths), extras,
        {"k_cache": pages[0], "v_cache": pages[1], "block_table": pages[2], "write_index": None},
    )  # fmt: skip
    _near(out, _by_hand(pages, query, lengths, scale=0.25, softcap=softcap, sinks=sinks))
    (launch,) = witness.since(before)
    assert (launch.variant, launch.call_class) == ("triton", f"float32/d16/intervals+{feature}")


def test_rows_are_found_once_a_pass_and_anew_in_the_next(pair, monkeypatch):
    """Buffers are written to between passes, and a captured pass has to hold the kernels."""
    made, found = pair("mistral", num_hidden_layers=3), []
    segment_intervals = paged_rows.segment_intervals
    monkeypatch.setattr(
        paged_rows, "segment_intervals", lambda *a: found.append(1) or segment_intervals(*a)
    )
    bounds = torch.tensor([0, 3, 7], dtype=torch.int32)
    query, key, value = (torch.randn(1, h, 7, 16) for h in (2, 1, 1))
    results = []
    for lengths in ((3, 4), (5, 2)):
        bounds.copy_(torch.tensor([0, *lengths]).cumsum(0))
        for layer in made.tried.model.layers:
            results.append(
                paged.attend(
                    "triton_fa2", layer.self_attn, query, key, value, None, bounds, bounds,
                    paged.Extras(0.25, None, None, 0.0), {"write_index": None},
                )
            )  # fmt: skip
    assert len(found) == 2
    assert torch.equal(results[0], results[2])
    assert not torch.equal(results[2], results[3])


def test_the_gate_is_asked(pair, tmp_path, monkeypatch):
    """Without an artifact neither form of the call is served."""
    made = pair("mistral")
    module = made.tried.model.layers[0].self_attn
    pages, lengths = _pages(seed=8)
    query, key, value = _new_tokens(seed=9)
    over = {"k_cache": pages[0], "v_cache": pages[1], "block_table": pages[2]}
    monkeypatch.setenv("HF_ATTN_HOME", str(tmp_path))
    proof.forget()
    for rest in ({}, over):
        with pytest.raises(CallRefusedError, match="equivalence gate"):
            paged.attend(
                "triton_fa2", module, query, key, value, None, _bounds(lengths), _bounds(lengths),
                paged.Extras(None, None, None, 0.0), {"write_index": None, **rest},
            )  # fmt: skip
    proof.forget()


def test_an_argument_that_would_be_dropped_is_refused(pair):
    made = pair("mistral")
    query, key, value = _new_tokens(seed=9)
    bounds = torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises(CallRefusedError, match="position_bias was given"):
        paged.attend(
            "triton_fa2", made.tried.model.layers[0].self_attn, query, key, value, None, bounds,
            bounds, paged.Extras(None, None, None, 0.0),
            {"write_index": None, "position_bias": torch.zeros(1)},
        )  # fmt: skip


def test_the_paged_name_makes_no_masks_and_serves_no_other_calls(pair):
    """transformers 5.17 looks it up; 5.24 takes the prefix off before."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    name = "paged|triton_fa2"
    assert name not in AttentionMaskInterface._global_mapping
    function = AttentionInterface._global_mapping[name]
    module = pair("mistral").tried.model.layers[0].self_attn
    query, key, value = _new_tokens(seed=10)
    with pytest.raises(CallRefusedError, match="without a paged cache") as refused:
        function(module, query, key, value, None, scaling=0.25)
    assert 'set_attn_implementation("triton_fa2")' in str(refused.value)
    pages, lengths = _pages(seed=6)
    out, _ = function(
        module, query, key, value, None, scaling=0.25, cu_seq_lens_q=_bounds(lengths),
        cu_seq_lens_k=_bounds(lengths), k_cache=pages[0], v_cache=pages[1], block_table=pages[2],
        write_index=[],
    )  # fmt: skip
    _near(out.transpose(1, 2), _by_hand(pages, query, lengths, scale=0.25))
