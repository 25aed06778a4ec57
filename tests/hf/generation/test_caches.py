"""Every cache class, 64 new tokens, equal to eager's: the prompt by the portable kernel, the steps
by the decode kernel, and by nobody else."""

from __future__ import annotations

import pytest
import torch

STEPS = 64
FAMILIES = ["mistral", "mistral_window", "llama", "qwen3", "gemma3_text"]


@pytest.mark.parametrize("family", FAMILIES)
def test_dynamic(pair, family):
    made = pair(family)
    made.run(made.prompt(9))
    made.assert_made_by(triton=1, decode=STEPS - 1)


# keys of the whole buffer: a prompt of few rows is a step of the decode kernel, too; a sliding
# layer gives a first prompt its own keys
STATIC = {
    "mistral": {"decode": STEPS},
    "mistral_window": {"triton": 1, "decode": STEPS - 1},
    "gemma3_text": {"triton": 1, "decode": 2 * STEPS - 1},
}


@pytest.mark.parametrize("lengths", [(9,), (9, 4)])
@pytest.mark.parametrize("family", list(STATIC))
def test_static(pair, family, lengths):
    """The first chunk meets a buffer longer than itself, whose empty tail must not be seen."""
    made = pair(family)
    made.run(made.prompt(*lengths), cache_implementation="static")
    assert made.variants() == STATIC[family]


def test_static_with_a_prompt_longer_than_a_step(pair):
    made = pair("mistral")
    made.run(made.prompt(21), steps=8, cache_implementation="static")
    made.assert_made_by(triton=1, decode=7)


def test_the_tail_of_a_static_cache_is_not_seen(pair):
    """A buffer that holds what an earlier use left in it gives the same tokens."""
    from transformers import StaticCache

    made = pair("mistral")
    cache = StaticCache(config=made.tried.config, max_cache_len=24)
    options = {"max_new_tokens": 8, "disable_compile": True, "do_sample": False}
    runs = []
    for _ in range(2):
        cache.reset()
        for layer in cache.layers:
            if layer.is_initialized:
                layer.keys.normal_(std=30.0)
                layer.values.normal_(std=30.0)
        runs.append(made.tried.generate(**made.prompt(9), past_key_values=cache, **options))
    assert torch.equal(*runs)
    assert torch.equal(runs[0], made.eager.generate(**made.prompt(9), **options))


def test_static_of_a_window_beyond_it(pair):
    """A prompt longer than the window into a buffer as long as the window."""
    made = pair("mistral_window")
    made.run(made.prompt(19), steps=16, cache_implementation="static")
    assert sum(made.launches.values()) == 16


@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize("family", ["mistral", "mistral_window", "gemma3_text"])
def test_a_prompt_in_chunks(pair, family, size):
    made = pair(family)
    made.run(made.prompt(19), steps=16, prefill_chunk_size=size)
    chunks = -(-19 // size)
    made.assert_made_by(triton=1, decode=chunks - 1 + 15)


@pytest.mark.parametrize("family", ["mistral", "mistral_window"])
def test_a_prompt_in_chunks_into_a_static_cache(pair, family):
    made = pair(family)
    made.run(made.prompt(19), steps=16, prefill_chunk_size=8, cache_implementation="static")
    assert sum(made.launches.values()) == 18


@pytest.mark.parametrize("family", ["mistral", "mistral_window", "gemma3_text"])
def test_a_second_prompt_behind_a_first(pair, family):
    """Keys and values of a prefix are used again, by two prompts in turn."""
    from transformers import DynamicCache

    made = pair(family)
    prefix = made.prompt(11)["input_ids"]
    for seed in (5, 6):
        more = made.prompt(6, seed=seed)["input_ids"]
        ids = torch.cat([prefix, more], dim=1)

        def filled(model):
            cache = DynamicCache(config=model.config)
            model(input_ids=prefix, past_key_values=cache)
            return cache

        made.run(
            {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, steps=24,
            past_key_values=filled,
        )  # fmt: skip
        made.assert_made_by(triton=1, decode=24)  # the prefix alone is as long as its keys


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


@pytest.mark.parametrize("kind", ["offloaded", "offloaded_static"])
def test_offloaded(pair, monkeypatch, kind):
    """The order of moves and steps; the moves themselves are tested on a GPU."""
    from transformers import cache_utils

    made = pair("mistral", num_hidden_layers=2)
    options = {"cache_implementation": kind}
    if not torch.cuda.is_available():  # transformers' offloading needs CUDA, whatever the backend
        for model in (made.eager, made.tried):
            with pytest.raises(AssertionError, match="CUDA"):
                made.generate(model, made.prompt(9), {"max_new_tokens": 2, **options})
    monkeypatch.setattr(cache_utils.torch, "Stream", _NoStream)
    monkeypatch.setattr(cache_utils.torch.cuda, "default_stream", lambda device=None: _NoStream())
    made.run(made.prompt(9), steps=16, **options)
    assert sum(made.launches.values()) == 32
