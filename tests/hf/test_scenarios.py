"""Logits and gradients against eager in fp32, the oracle in the kernel's place.

Right values come from eager with the mask written out, or from the rows alone, so that the mask
code under test is not its own judge.
"""

from __future__ import annotations

import pytest
import torch

WINDOWS = (None, 6)


def _weigh(out, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return (out.double() * torch.randn(out.shape, generator=generator)).sum()


@pytest.mark.parametrize("window", WINDOWS)
def test_plain_batch_logits_and_gradients(models, calls, window):
    eager, tried = models.pair(sliding_window=window)
    ids = models.ids(2, 17)
    outs = []
    for model in (eager, tried):
        out = model(input_ids=ids, labels=ids, use_cache=False)
        out.loss.backward()
        outs.append(out.logits)
    models.near(outs[1], outs[0])
    models.near_grads(tried, eager)
    kind = "causal" if window is None else "window"
    assert [call["visibility"].kind for call in calls] == [kind, kind]


def test_float64_is_exact_to_eager(models, calls):
    eager, tried = models.pair(dtype=torch.float64)
    ids = models.ids(1, 13)
    for model in (eager, tried):
        _weigh(model(input_ids=ids).logits).backward()
    models.near_grads(tried, eager, limit=1e-5)  # eager's softmax is fp32


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_row_by_row(models, calls, window, side):
    eager, tried = models.pair(sliding_window=window)
    total, lengths = 19, (19, 8, 1)
    mask = models.padded(lengths, total, side)
    ids = torch.where(mask.bool(), models.ids(3, total), 0)
    got = tried(input_ids=ids, attention_mask=mask, position_ids=models.positions(mask)).logits
    _weigh(got[mask.bool()]).backward()
    want = torch.cat(
        [eager(input_ids=ids[r : r + 1][:, mask[r].bool()]).logits[0] for r in range(3)]
    )
    _weigh(want).backward()
    models.near(got[mask.bool()], want)
    models.near_grads(tried, eager)
    assert {call["visibility"].kind for call in calls} == {"intervals"}


def test_right_padding_with_labels_ignores_what_stands_there(models, calls):
    eager, tried = models.pair()
    mask = models.padded((15, 6), 15, "right")
    ids = torch.where(mask.bool(), models.ids(2, 15), 0)
    labels = ids.masked_fill(~mask.bool(), -100)
    losses = []
    for model in (eager, tried):
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        losses.append(loss.detach())
    models.near(losses[1], losses[0])
    models.near_grads(tried, eager)
    other = torch.where(mask.bool(), ids, 60)
    again = tried(input_ids=other, attention_mask=mask, labels=labels).loss
    assert float(again) == float(losses[1])


def test_a_padding_mask_with_a_hole_stays_dense_and_right(models, calls):
    eager, tried = models.pair()
    mask = torch.ones(1, 12, dtype=torch.long)
    mask[0, 4:6] = 0
    ids = models.ids(1, 12)
    models.near(
        tried(input_ids=ids, attention_mask=mask).logits,
        eager(input_ids=ids, attention_mask=mask).logits,
    )
    assert {call["visibility"].kind for call in calls} == {"dense"}


def test_rows_that_see_nothing_are_finite_and_leave_the_rest_alone(models, calls):
    eager, tried = models.pair()
    mask = models.padded((11, 0), 11, "left")
    ids = models.ids(2, 11)
    out = tried(input_ids=ids, attention_mask=mask).logits
    _weigh(out[:1]).backward()
    assert torch.isfinite(out).all()
    assert all(torch.isfinite(p.grad).all() for p in tried.parameters() if p.grad is not None)
    models.near(out[:1], eager(input_ids=ids[:1]).logits)
    assert {call["visibility"].kind for call in calls} == {"intervals"}


@pytest.mark.parametrize("length", [5, 6, 7, 13])
def test_the_window_counts_the_token_itself(models, calls, length):
    _, tried = models.pair(sliding_window=6)
    full = models.build(models.config(), "eager", weights=tried.state_dict())
    ids = models.ids(1, length)
    seen = models.causal(length, window=6)
    want = full(input_ids=ids, attention_mask=models.additive(seen)).logits
    models.near(tried(input_ids=ids, use_cache=False).logits, want)
    assert calls[0]["visibility"].kind == ("window" if length > 6 else "causal")


def _fed(models, model, ids, steps, cache, mask=None, positions=None):
    parts, at = [], 0
    for step in steps:
        rows = slice(at, at + step)
        at += step
        kw = {"input_ids": ids[:, rows], "use_cache": True, **models.cache_kw(model, cache)}
        if mask is not None:
            kw["attention_mask"] = mask[:, :at]
        if positions is not None:
            kw["position_ids"] = positions[:, rows]
        parts.append(model(**kw).logits)
    return torch.cat(parts, 1)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("steps", [(9, 5, 1, 1, 3), (1, 1, 14), (4,) * 4])
def test_chunks_and_steps_into_a_growing_cache(models, calls, window, steps):
    from transformers import DynamicCache

    _, tried = models.pair(sliding_window=window)
    full = models.build(models.config(), "eager", weights=tried.state_dict())
    total = sum(steps)
    ids = models.ids(2, total)
    with torch.no_grad():
        seen = models.additive(models.causal(total, 2, window))
        want = full(input_ids=ids, attention_mask=seen).logits
        got = _fed(models, tried, ids, steps, DynamicCache(config=tried.config))
    models.near(got, want)


@pytest.mark.parametrize("window", WINDOWS)
def test_decoding_a_left_padded_batch_past_the_window(models, calls, window):
    from transformers import DynamicCache

    _, tried = models.pair(sliding_window=window)
    full = models.build(models.config(), "eager", weights=tried.state_dict())
    steps = [9] + [1] * 6
    total = sum(steps)
    mask = models.padded((total, total - 5), total, "left")
    ids = torch.where(mask.bool(), models.ids(2, total), 0)
    positions = models.positions(mask)
    with torch.no_grad():
        seen = models.causal(total, 2, window, mask) | torch.eye(total, dtype=torch.bool)
        want = full(
            input_ids=ids, attention_mask=models.additive(seen), position_ids=positions
        ).logits
        cache = DynamicCache(config=tried.config)
        got = _fed(models, tried, ids, steps, cache, mask, positions)
    models.near(got[mask.bool()], want[mask.bool()])


@pytest.mark.parametrize("window", WINDOWS)
def test_a_static_cache_is_lined_up_with_its_first_keys(models, calls, window):
    from transformers import StaticCache

    _, tried = models.pair(sliding_window=window)
    full = models.build(models.config(), "eager", weights=tried.state_dict())
    steps = (7, 5, 1, 1)
    ids = models.ids(2, sum(steps))
    positions = torch.arange(sum(steps))[None].expand(2, -1)
    with torch.no_grad():
        seen = models.additive(models.causal(sum(steps), 2, window))
        want = full(input_ids=ids, attention_mask=seen).logits
        cache = StaticCache(config=tried.config, max_cache_len=24)
        got = _fed(models, tried, ids, steps, cache, positions=positions)
    models.near(got, want)


@pytest.mark.parametrize("kind", [None, "static"])
@pytest.mark.parametrize("beams", [1, 2])
def test_generate_agrees_with_eager(models, calls, kind, beams):
    eager, tried = models.pair()
    mask = models.padded((9, 5), 9, "left")
    ids = torch.where(mask.bool(), models.ids(2, 9, seed=3), 0)
    kw = {
        "attention_mask": mask, "max_new_tokens": 5, "do_sample": False, "num_beams": beams,
        "disable_compile": True,
    }  # fmt: skip
    if kind:
        kw["cache_implementation"] = kind
    want = eager.generate(ids, **kw)
    assert torch.equal(tried.generate(ids, **kw), want)


@pytest.mark.parametrize("side", ["config", "call"])
def test_a_decoder_that_sees_both_ways(models, calls, side):
    over = {"is_causal": False} if side == "config" else {}
    _, tried = models.pair(auto="AutoModel", **over)
    eager = models.build(models.config(), "eager", weights=tried.state_dict(), auto="AutoModel")
    call = {} if side == "config" else {"is_causal": False}
    mask = models.padded((10, 7), 10, "right")
    ids = models.ids(2, 10)
    seen = mask.bool()[:, None, :].expand(2, 10, 10)
    want = eager(input_ids=ids, attention_mask=models.additive(seen)).last_hidden_state
    got = tried(input_ids=ids, attention_mask=mask, use_cache=False, **call).last_hidden_state
    models.near(got[mask.bool()], want[mask.bool()])
    full = models.additive(torch.ones(2, 10, 10, dtype=torch.bool))
    want = eager(input_ids=ids, attention_mask=full).last_hidden_state
    models.near(tried(input_ids=ids, use_cache=False, **call).last_hidden_state, want)
    assert calls[-1]["visibility"].kind == "full"


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_meets_the_same_mask(models, calls, reentrant):
    eager, tried = models.pair()
    mask = models.padded((12, 7), 12, "left")
    ids = torch.where(mask.bool(), models.ids(2, 12), 0)
    # each row's first token would be predicted from a padding row, where backends may differ
    labels = ids.masked_fill(models.positions(mask) == 0, -100)
    kw = {
        "attention_mask": mask, "position_ids": models.positions(mask), "use_cache": False,
        "labels": labels,
    }  # fmt: skip
    eager(input_ids=ids, **kw).loss.backward()
    tried.train()
    tried(input_ids=ids, **kw).loss.backward()
    plain = {name: p.grad.clone() for name, p in tried.named_parameters()}
    tried.zero_grad(set_to_none=True)
    before = len(calls)
    tried.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        tried.enable_input_require_grads()
    tried(input_ids=ids, **kw).loss.backward()
    assert len(calls) - before == 4  # two layers, forward and recomputation
    models.near_grads(tried, eager)
    for name, parameter in tried.named_parameters():
        assert torch.equal(parameter.grad, plain[name]), name


@pytest.mark.parametrize(
    "auto",
    [
        "AutoModelForSequenceClassification",
        "AutoModelForTokenClassification",
        "AutoModelForQuestionAnswering",
    ],
)
def test_every_head_of_mistral(models, calls, auto):
    eager, tried = models.pair(auto=auto)
    mask = models.padded((9, 6), 9, "right")
    ids = torch.where(mask.bool(), models.ids(2, 9), 0)
    want = eager(input_ids=ids, attention_mask=mask)
    got = tried(input_ids=ids, attention_mask=mask)
    name = "start_logits" if auto.endswith("Answering") else "logits"
    if auto.endswith("SequenceClassification"):
        models.near(got[name], want[name])
    else:
        models.near(got[name][mask.bool()], want[name][mask.bool()])
    assert len(calls) == 2
