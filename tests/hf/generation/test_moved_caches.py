"""Caches that keep their keys elsewhere or in fewer bits: quantised and offloaded ones."""

from __future__ import annotations

import pytest
import torch

STEPS = 64

GROUPS = {"residual_length": 16, "q_group_size": 16}
QUANTISED = {"quanto": GROUPS, "hqq": {**GROUPS, "axis_key": 1, "axis_value": 1}, "fp8": {}}


@pytest.mark.parametrize("backend", list(QUANTISED))
def test_quantised(pair, backend):
    """Where it cannot quantise, transformers says what is missing, and the same to eager."""
    made = pair("mistral")
    prompt = made.prompt(16)
    options = {
        "cache_implementation": "quantized",
        "cache_config": {"backend": backend, **QUANTISED[backend]},
    }
    said = [
        _said(made, model, prompt, {"max_new_tokens": 2, **options})
        for model in (made.eager, made.tried)
    ]
    assert said[0] == said[1]
    if said[0]:
        assert backend in said[0].lower()
    else:
        made.run(prompt, **options)
        made.assert_made_by(triton=1, decode=STEPS - 1)


def _said(made, model, prompt, options):
    """What transformers says against a call; nothing where it serves it."""
    try:
        made.generate(model, prompt, options)
    except (ImportError, ValueError) as refused:
        return str(refused)
    return ""


def test_quantised_by_a_cache_of_ones_own(pair):
    """A layer that rounds its keys and values as it stores them, without any library."""
    from transformers import Cache
    from transformers.cache_utils import DynamicLayer

    class Rounded(DynamicLayer):
        def update(self, keys, values, *args, **kwargs):
            kept = [(x * 16).round() / 16 for x in (keys, values)]
            return super().update(*kept, *args, **kwargs)

    made = pair("mistral")
    made.run(
        made.prompt(9),
        past_key_values=lambda model: Cache(layer_class_to_replicate=Rounded),
    )
    made.assert_made_by(triton=1, decode=STEPS - 1)


class _NoStream:
    """In a stream's place where there is no second device: moves are none, and take no time."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def wait_stream(self, other):
        return None


@pytest.fixture
def no_streams(monkeypatch):
    """Offloading without a second device."""
    from transformers import cache_utils

    monkeypatch.setattr(cache_utils.torch, "Stream", _NoStream)
    monkeypatch.setattr(cache_utils.torch.cuda, "default_stream", lambda device=None: _NoStream())


@pytest.mark.parametrize("kind", ["offloaded", "offloaded_static"])
def test_offloaded(pair, no_streams, kind):
    """The order of moves and steps; the moves themselves are tested on a GPU."""
    made = pair("mistral", num_hidden_layers=2)
    made.run(made.prompt(9), steps=16, cache_implementation=kind)
    assert sum(made.launches.values()) == 32


@pytest.mark.parametrize("kind", ["offloaded", "offloaded_static"])
def test_offloaded_windows(pair, no_streams, kind):
    """A static cache of sliding layers alone has none to move, which transformers trips over,
    whatever the attention is."""
    made = pair("mistral_window", num_hidden_layers=2)
    prompt, options = made.prompt(9), {"cache_implementation": kind}
    said = [
        _said(made, model, prompt, {"max_new_tokens": 2, "disable_compile": True, **options})
        for model in (made.eager, made.tried)
    ]
    assert said[0] == said[1]
    if said[0]:
        assert (kind, said[0].endswith("is not in list")) == ("offloaded_static", True)
    else:
        made.run(prompt, steps=16, **options)
        assert sum(made.launches.values()) == 32


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device to move from")
@pytest.mark.parametrize("kind", ["offloaded", "offloaded_static"])
def test_offloading_needs_a_device(pair, kind):
    """What transformers says, whatever the attention is."""
    made = pair("mistral")
    for model in (made.eager, made.tried):
        with pytest.raises(AssertionError, match="CUDA"):
            made.generate(
                model, made.prompt(9), {"max_new_tokens": 2, "cache_implementation": kind}
            )
