"""Every cache class, 64 new tokens, equal to eager's: the prompt by the portable kernel, the steps
by the decode kernel, and by nobody else."""

from __future__ import annotations

import pytest
import torch

STEPS = 64
FAMILIES = [
    "mistral", "mistral_window", "gemma3_text",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "qwen3")),
]  # fmt: skip


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


@pytest.mark.parametrize("lengths", [pytest.param((9,), marks=pytest.mark.slow), (9, 4)])
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
