"""Chosen scenarios through the real kernel; on a CPU through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from hf_attn_backends import witness
from hf_attn_backends.errors import CallRefusedError

N = 9


def _weigh(out):
    generator = torch.Generator().manual_seed(5)
    return (out.double() * torch.randn(out.shape, generator=generator).to(out.device)).sum()


def _scenarios(models):
    left, right = (models.padded((N, 5), N, side) for side in ("left", "right"))
    tree = torch.eye(N, dtype=torch.bool, device=models.device)
    for node in range(1, N):
        tree[node] |= tree[(node - 1) // 2]
    packed = torch.cat([torch.arange(n) for n in (4, 3, 2)])[None].expand(2, -1)
    packed = packed.to(models.device)
    positions, place = models.positions(left), torch.arange(N, device=models.device)
    return {
        "plain": ({}, "causal", models.causal(N, 2)),
        "left padding": (
            {"attention_mask": left, "position_ids": positions}, "intervals",
            models.causal(N, 2, keep=left),
        ),
        "right padding": (
            {"attention_mask": right}, "intervals", models.causal(N, 2, keep=right),
        ),
        "packed": (
            {"position_ids": packed}, "intervals",
            models.causal(N, 2) & (packed[0][None, :] - packed[0][:, None] == place[None]
                                   - place[:, None])[None],
        ),
        "tree": ({"attention_mask": tree[None, None]}, "dense", tree[None].expand(2, N, N)),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["plain", "left padding", "right padding", "packed", "tree"])
def test_logits_gradients_and_counts(kernel_models, gated, name):
    models = kernel_models
    kw, kind, seen = _scenarios(models)[name]
    eager, tried = models.pair(num_hidden_layers=1)
    ids = models.ids(2, N)
    real = kw.get("attention_mask") if name.endswith("padding") else None
    real = torch.ones(2, N, dtype=torch.bool, device=models.device) if real is None else real.bool()
    before = witness.snapshot()
    got = tried(input_ids=ids, use_cache=False, **kw).logits
    _weigh(got[real]).backward()
    counted = witness.since(before)
    mask = models.additive(
        seen | (torch.eye(N, dtype=torch.bool, device=models.device) & ~real[:, :, None])
    )
    positions = {"position_ids": kw["position_ids"]} if "position_ids" in kw else {}
    want = eager(input_ids=ids, attention_mask=mask, use_cache=False, **positions).logits
    _weigh(want[real]).backward()
    models.near(got[real], want[real])
    models.near_grads(tried, eager)
    assert {(c.backend, c.phase, c.call_class, n) for c, n in counted.items()} == {
        ("triton_fa2", "forward", f"float32/d16/{kind}", 1),
        ("triton_fa2", "backward", f"float32/d16/{kind}", 1),
    }


def test_a_window_and_a_step_with_a_cache(kernel_models, gated):
    models = kernel_models
    from transformers import DynamicCache

    eager, tried = models.pair(num_hidden_layers=1, sliding_window=4)
    ids = models.ids(1, 8)
    cache = DynamicCache(config=tried.config)
    kw = models.cache_kw(tried, cache)
    before = witness.snapshot()
    with torch.no_grad():
        parts = [
            tried(input_ids=ids[:, a:b], use_cache=True, **kw).logits for a, b in ((0, 7), (7, 8))
        ]
        models.near(torch.cat(parts, 1), eager(input_ids=ids).logits)
    classes = {launch.call_class for launch in witness.since(before)}
    assert classes == {"float32/d16/window", "float32/d16/full"}


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_counts_both_passes(kernel_models, gated, reentrant):
    models = kernel_models
    _, tried = models.pair(num_hidden_layers=1)
    tried.train()
    tried.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        tried.enable_input_require_grads()
    ids = models.ids(1, 4)
    before = witness.snapshot()
    tried(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    counted = {(c.phase): n for c, n in witness.since(before).items()}
    assert counted == {"forward": 2, "backward": 1}


def test_bfloat16_under_autocast(kernel_models, gated):
    models = kernel_models
    eager, tried = models.pair(num_hidden_layers=1)
    ids = models.ids(1, 5)
    with torch.autocast(models.device, torch.bfloat16):
        got = tried(input_ids=ids, use_cache=False).logits.float()
        base = eager(input_ids=ids, use_cache=False).logits.float()
    want = eager(input_ids=ids).logits
    yardstick = float((base - want).abs().max() / want.abs().max())
    models.near(got, want, limit=2 * yardstick + 1e-3)
    got.pow(2).mean().backward()


def test_the_context_overrides_the_model(kernel_models, gated):
    models = kernel_models
    from hf_attn_backends import attn_backend

    eager, tried = models.pair(num_hidden_layers=1)
    ids = models.ids(1, 6)
    before = witness.snapshot()
    with torch.no_grad(), attn_backend("sdpa"):
        models.near(tried(input_ids=ids).logits, eager(input_ids=ids).logits)
    assert {launch.backend for launch in witness.since(before)} == {"sdpa"}


@pytest.mark.parametrize("name", ["auto", "triton_decode"])
def test_the_other_names(kernel_models, gated, name):
    models = kernel_models
    eager, tried = models.pair(attn=name, num_hidden_layers=1)
    mask = models.padded((6, 4), 6, "left")
    kw = {"attention_mask": mask, "position_ids": models.positions(mask), "use_cache": True}
    ids = models.ids(2, 6)
    before = witness.snapshot()
    with torch.no_grad():
        got = tried(input_ids=ids, **kw).logits
        want = eager(input_ids=ids, **kw).logits
    models.near(got[mask.bool()], want[mask.bool()])
    backends = {launch.backend for launch in witness.since(before)}
    assert backends == ({"sdpa"} if name == "auto" else {name})
    if name == "triton_decode":
        with pytest.raises(CallRefusedError):
            tried(input_ids=ids, use_cache=False)


@pytest.mark.parametrize("length", [1, 2, 15, 17])
@pytest.mark.parametrize("heads", [(6, 2), (5, 1), (3, 3)])
def test_odd_lengths_and_head_ratios(kernel_models, gated, length, heads):
    models = kernel_models
    if length != 17 and heads != (5, 1):
        return
    over = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    eager, tried = models.pair(num_hidden_layers=1, **over)
    ids = models.ids(1, length)
    outs = [model(input_ids=ids, use_cache=False).logits for model in (eager, tried)]
    for out in outs:
        _weigh(out).backward()
    models.near(outs[1], outs[0])
    if length > 1:  # one key: query and key have no gradient but rounding
        models.near_grads(tried, eager)


def test_nothing_of_pytorchs_own_runs_in_its_place(kernel_models, gated):
    models = kernel_models
    from torch.utils._python_dispatch import TorchDispatchMode

    class Record(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen: dict[str, int] = {}

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func._schema.name
            self.seen[name] = self.seen.get(name, 0) + 1
            return func(*args, **(kwargs or {}))

    _, tried = models.pair(num_hidden_layers=2)
    mask = models.padded((4, 3), 4, "right")
    ids = models.ids(2, 4)
    for kw in ({}, {"attention_mask": mask}):
        tried(input_ids=ids, use_cache=False, **kw)  # what is checked once, is checked now
        record = Record()
        with record:
            tried(input_ids=ids, use_cache=False, **kw).logits.pow(2).sum().backward()
        foreign = [n for n in record.seen if "softmax" in n or "scaled_dot_product" in n]
        assert foreign == []
        assert record.seen["hf_attn_backends::attention_forward"] == 2
        assert record.seen["hf_attn_backends::attention_backward"] == 2
