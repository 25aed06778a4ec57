"""torch.compile: the mask function and the adapter trace without a graph break."""

from __future__ import annotations

import pytest
import torch

from hf_attn_backends.kernels.visibility import intervals_of


@torch.library.custom_op("hf_attn_tests::attend", mutates_args=())
def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    intervals: torch.Tensor | None,
    dense: torch.Tensor | None,
) -> torch.Tensor:
    from hf_attn_backends.kernels.visibility import Visibility
    from hf_attn_backends.reference import attention_reference

    visibility = Visibility(intervals=intervals, dense=dense)
    return attention_reference(query, key, value, visibility=visibility)[0].to(query.dtype)


@_attend.register_fake
def _(query, key, value, intervals, dense):
    return torch.empty_like(query)


@pytest.fixture
def compiled_calls(gated, monkeypatch):
    """The oracle as one opaque operator, as the kernel is one."""
    from hf_attn_backends.hf import adapter

    kinds: list[str] = []

    def run_call(backend, query, key, value, visibility, **options):
        kinds.append(visibility.kind)
        rows = visibility.intervals
        if visibility.kind in ("causal", "window", "full"):
            rows = intervals_of(visibility, query.shape[2], key.shape[2], query.device)
            rows = rows.expand(query.shape[0], -1, -1)
        return _attend(query, key, value, rows, visibility.dense)

    monkeypatch.setattr(adapter, "run_call", run_call)
    torch._dynamo.reset()
    yield kinds
    torch._dynamo.reset()


def _compiled(model):
    return torch.compile(model, backend="eager", fullgraph=True)


@pytest.mark.parametrize(("window", "padding"), [(4, None), (None, "left")])
def test_a_whole_model_in_one_graph(models, compiled_calls, window, padding):
    eager, tried = models.pair(sliding_window=window, num_hidden_layers=1)
    ids = models.ids(2, 9)
    mask = None if padding is None else models.padded((9, 5), 9, padding)
    kw = {"attention_mask": mask, "use_cache": False}
    if mask is not None:
        kw["position_ids"] = models.positions(mask)
    real = torch.ones(2, 9, dtype=torch.bool) if mask is None else mask.bool()
    with torch.no_grad():
        want = eager(input_ids=ids, **kw).logits
        got = _compiled(tried)(input_ids=ids, **kw).logits
    models.near(got[real], want[real])
    # a traced mask cannot be read, so that padding stays dense; causal rows come as intervals
    assert set(compiled_calls) == {"intervals" if padding is None else "dense"}


def test_packing_in_one_graph(models, compiled_calls):
    eager, tried = models.pair(num_hidden_layers=1)
    ids = models.ids(1, 9)
    positions = torch.cat([torch.arange(n) for n in (4, 3, 2)])[None]
    with torch.no_grad():
        got = _compiled(tried)(input_ids=ids, position_ids=positions, use_cache=False).logits
        want = [eager(input_ids=ids[:, a:b]).logits for a, b in ((0, 4), (4, 7), (7, 9))]
    models.near(got, torch.cat(want, 1))


def test_a_boolean_mask_in_one_graph(models, compiled_calls):
    eager, tried = models.pair(num_hidden_layers=1)
    ids = models.ids(2, 7)
    seen = models.causal(7, 2, window=3)[:, None]
    with torch.no_grad():
        got = _compiled(tried)(input_ids=ids, attention_mask=seen, use_cache=False).logits
        want = eager(input_ids=ids, attention_mask=models.additive(seen[:, 0])).logits
    models.near(got, want)
    assert set(compiled_calls) == {"dense"}


def test_a_static_decode_step_in_one_graph(models, compiled_calls):
    from transformers import StaticCache

    eager, tried = models.pair(num_hidden_layers=1)
    ids = models.ids(1, 8)
    cache = StaticCache(config=tried.config, max_cache_len=12)
    kw = models.cache_kw(tried, cache)
    with torch.no_grad():
        tried(input_ids=ids[:, :5], use_cache=True, **kw)
        step = _compiled(tried)
        got = torch.cat(
            [step(input_ids=ids[:, i : i + 1], use_cache=True, **kw).logits for i in (5, 6, 7)], 1
        )
        want = eager(input_ids=ids).logits[:, 5:]
    models.near(got, want)
