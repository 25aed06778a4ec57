"""Keyword arguments of the attention function: honoured, refused, or known to change nothing."""

from __future__ import annotations

import logging

import pytest
import torch

from hf_attn_backends.errors import CallRefusedError
from hf_attn_backends.hf import arguments
from hf_attn_backends.hf.adapter import attention_function


class _Module(torch.nn.Module):
    is_causal = True


def _attend(calls, m=3, n=3, module=None, **kw):
    query = torch.randn(1, 2, m, 16)
    key = torch.randn(1, 1, n, 16)
    function = attention_function("triton_fa2")
    out, weights = function(module or _Module(), query, key, key, **{"attention_mask": None, **kw})
    assert weights is None
    assert out.shape == (1, m, 2, 16)
    assert out.is_contiguous()
    return calls[-1]


@pytest.mark.parametrize("name", sorted(arguments.REFUSED))
def test_what_would_be_dropped_is_refused_by_name(calls, name):
    value = True if name == "output_attentions" else torch.ones(1)
    with pytest.raises(CallRefusedError, match=name) as refused:
        _attend(calls, **{name: value})
    assert "eager" in str(refused.value)
    assert not calls
    _attend(calls, **{name: None})
    _attend(calls, output_attentions=False)


def test_every_reason_is_given_at_once(calls):
    with pytest.raises(CallRefusedError) as refused:
        _attend(calls, position_bias=torch.ones(1), head_mask=torch.ones(1), wonder=torch.ones(1))
    assert len(refused.value.reasons) == 3
    assert all(name in str(refused.value) for name in ("position_bias", "head_mask", "wonder"))


def test_what_models_and_trainers_leak_is_accepted(calls):
    _attend(
        calls, use_cache=True, num_items_in_batch=torch.tensor(3), seq_idx=torch.zeros(1, 3),
        logits_to_keep=1, output_hidden_states=True, max_length_q=3, max_length_k=3,
        cache_position=torch.arange(3), deterministic=True, position_ids=torch.arange(3)[None],
    )  # fmt: skip
    assert calls[0]["visibility"].kind == "causal"


def test_the_unknown(calls, caplog):
    for value in (torch.ones(1), [torch.ones(1)], (1, (torch.ones(1),))):
        with pytest.raises(CallRefusedError, match="brand_new"):
            _attend(calls, brand_new=value)
    with caplog.at_level(logging.WARNING):
        _attend(calls, brand_new_flag=3)
        _attend(calls, brand_new_flag=3)
    assert sum("brand_new_flag=3" in record.getMessage() for record in caplog.records) == 1


def test_the_call_says_causal_over_the_module(calls):
    assert _attend(calls)["visibility"].kind == "causal"
    assert _attend(calls, is_causal=False)["visibility"].kind == "full"
    encoder = _Module()
    encoder.is_causal = False
    assert _attend(calls, module=encoder)["visibility"].kind == "full"
    assert _attend(calls, module=encoder, is_causal=True)["visibility"].kind == "causal"
    assert _attend(calls, module=encoder, m=3, n=7)["visibility"].kind == "full"


def test_one_query_sees_every_key_and_more_see_up_to_the_last(calls):
    assert _attend(calls, m=1, n=9)["visibility"].kind == "full"
    assert _attend(calls, m=4, n=9)["visibility"].kind == "causal"


@pytest.mark.parametrize(
    ("window", "n", "kind"),
    [(4, 9, "window"), (9, 9, "causal"), (20, 9, "causal"), (4, 3, "causal")],
)
def test_a_window_that_binds(calls, window, n, kind):
    call = _attend(calls, m=3, n=n, sliding_window=window)
    assert call["visibility"].kind == kind
    assert call["visibility"].window == (window if kind == "window" else None)
    one = _attend(calls, m=1, n=n, sliding_window=window)["visibility"]
    assert one.kind == ("window" if kind == "window" else "full")


def test_a_mask_says_everything_and_the_window_argument_nothing(calls):
    mask = torch.ones(1, 1, 3, 5, dtype=torch.bool)
    assert _attend(calls, n=5, attention_mask=mask, sliding_window=2)[
        "visibility"
    ].intervals.tolist() == [[[0, 5]] * 3]


def test_softcap_sinks_dropout_and_scale_go_along(calls):
    sinks = torch.randn(2)
    call = _attend(calls, softcap=2.0, s_aux=sinks, dropout=0.25, scaling=0.3)
    assert (call["softcap"], call["dropout_p"], call["scale"]) == (2.0, 0.25, 0.3)
    assert call["sinks"] is sinks
    assert _attend(calls)["scale"] is None


def test_whether_there_is_a_cache(calls):
    assert not _attend(calls)["has_cache"]
    assert _attend(calls, use_cache=True)["has_cache"]
    assert _attend(calls, m=2, n=5)["has_cache"]


def test_position_ids_of_images_and_of_other_lengths_are_no_packing(calls):
    for ids in (torch.zeros(3, 1, 4), torch.zeros(1, 7), torch.zeros(4)):
        assert _attend(calls, m=4, n=4, position_ids=ids.long())["visibility"].kind == "causal"
    assert (
        _attend(calls, m=4, n=4, position_ids=torch.tensor([[0, 1, 0, 1]]))["visibility"].kind
        == "intervals"
    )


def test_one_query_for_a_larger_batch(gated, monkeypatch):
    from hf_attn_backends.hf import adapter

    seen = []
    monkeypatch.setattr(
        adapter, "run_call", lambda b, q, k, v, vis, **kw: seen.append(q.shape) or q
    )
    key = torch.randn(3, 1, 5, 16)
    attention_function("auto")(_Module(), torch.randn(1, 2, 4, 16), key, key, None, is_causal=False)
    assert seen == [(3, 2, 4, 16)]


@pytest.mark.parametrize(
    ("over", "word"), [({"softcap": 2.0}, "softcap"), ({"s_aux": torch.ones(2)}, "sink"),
                       ({"dropout": 0.1}, "dropout")]
)  # fmt: skip
def test_the_backend_itself_refuses_what_it_cannot(gated, over, word):
    query = torch.randn(1, 2, 3, 16, dtype=torch.float16)  # of which no feature was measured
    with pytest.raises(CallRefusedError, match=rf"does not cover float16/d16/causal\+{word}"):
        attention_function("triton_fa2")(_Module(), query, query, query, None, **over)


def test_output_attentions_of_a_whole_model(models, calls):
    _, tried = models.pair()
    with pytest.raises(CallRefusedError, match="output_attentions"):
        tried(input_ids=models.ids(1, 5), output_attentions=True)


def test_dropout_that_was_not_measured_is_refused_in_training_and_absent_in_evaluation(
    models, gated
):
    model = models.build(models.config(attention_dropout=0.3), "triton_fa2", torch.float16)
    with torch.no_grad():
        model(input_ids=models.ids(1, 3))
    with pytest.raises(CallRefusedError, match=r"does not cover float16/d16/causal\+dropout"):
        model.train()(input_ids=models.ids(1, 3))
