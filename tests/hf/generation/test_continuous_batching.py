"""`generate_batch`: every prompt's tokens equal to eager's own `generate` of it alone."""

from __future__ import annotations

import inspect

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from hf_attn_backends import attn_backend, decision_of, witness

NEW = 12
LENGTHS = (5, 13, 1, 9)


def _config(**over):
    known = inspect.signature(ContinuousBatchingConfig).parameters
    page = "page_size" if "page_size" in known else "block_size"
    return ContinuousBatchingConfig(
        **{page: 8, "num_blocks": 32, "max_batch_tokens": 64, "use_cuda_graph": False, **over}
    )


def _prompts(lengths=LENGTHS, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 61, (n,), generator=generator).tolist() for n in lengths]


def _served(model, prompts, new=NEW, **over):
    """What `generate_batch` made of each prompt, in order; and the launches, by variant."""
    wanted = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    before = witness.snapshot()
    results = model.generate_batch(
        [list(prompt) for prompt in prompts], generation_config=wanted, progress_bar=False,
        continuous_batching_config=_config(**over),
    )  # fmt: skip
    by_prompt = {tuple(r.prompt_ids): r for r in results.values()}
    made = [by_prompt[tuple(prompt)] for prompt in prompts]
    assert [r.error for r in made] == [None] * len(prompts)
    launches: dict[str, int] = {}
    for launch, count in witness.since(before).items():
        key = f"{launch.backend}/{launch.variant}"
        launches[key] = launches.get(key, 0) + count
    return [list(r.generated_tokens) for r in made], launches


def _alone(pair, prompts, new=NEW):
    """Eager's greedy tokens of each prompt by itself; checked to be no ties."""
    from tests.hf.generation.conftest import assert_separated

    tokens = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = pair.generate(
            pair.eager, {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
            {"max_new_tokens": new, "do_sample": False, "return_dict_in_generate": True,
             "output_logits": True},
        )  # fmt: skip
        assert_separated(out)
        tokens.append(out.sequences[0, len(prompt) :].tolist())
    return tokens


@pytest.fixture
def tables(monkeypatch):
    """Let block tables be handed out on a CPU, too; transformers does so on CUDA only."""
    from transformers.generation.continuous_batching import initialization

    monkeypatch.setattr(
        initialization, "ensure_decode_fast_path_is_available", lambda *_, **__: None
    )
    return {"max_blocks_per_request": 4}


@pytest.mark.parametrize("name", ["triton_fa2", "paged|triton_fa2"])
@pytest.mark.parametrize("family", ["mistral", "mistral_window", "qwen3"])
def test_prompts_of_unequal_lengths(pair, family, name):
    made = pair(family)
    made.tried.set_attn_implementation(name)
    before = made.tried.config._attn_implementation
    prompts = _prompts()
    tokens, launches = _served(made.tried, prompts)
    assert tokens == _alone(made, prompts)
    # the prompts together, then a step for each further token of all
    assert launches == {"triton_fa2/triton": 1, "triton_fa2/decode": NEW - 1}
    assert made.tried.config._attn_implementation == before


def test_sliding_and_full_layers(pair):
    made = pair("gemma3_text")
    prompts = _prompts()
    tokens, launches = _served(made.tried, prompts, new=20)
    assert tokens == _alone(made, prompts, new=20)
    assert launches == {"triton_fa2/triton": 2, "triton_fa2/decode": 2 * 19}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mistral", "mistral_window"])
def test_64_tokens(pair, family):
    made = pair(family)
    prompts = _prompts()
    assert _served(made.tried, prompts, new=64)[0] == _alone(made, prompts, new=64)


def test_prompts_longer_than_a_batch_and_a_prefix_that_is_shared(pair):
    """Prompts go in pieces behind what is cached, and blocks of a common prefix are reused."""
    made = pair("mistral")
    common, rest = _prompts((16, 7))
    prompts = [common + rest, common + rest[::-1], *_prompts((30,), seed=2)]
    tokens, _ = _served(made.tried, prompts, new=6, max_batch_tokens=16)
    assert tokens == _alone(made, prompts, new=6)


def test_steps_over_block_tables(pair, tables):
    """Each sequence's pages are read in place, by the kernel for pages."""
    made = pair("mistral", num_hidden_layers=2)
    prompts = _prompts()
    tokens, launches = _served(made.tried, prompts, **tables)
    assert tokens == _alone(made, prompts)
    assert launches == {"triton_fa2/triton": 2, "triton_fa2/paged": 2 * (NEW - 1)}


@pytest.mark.parametrize("name", ["triton_decode", "auto"])
def test_the_other_names_over_block_tables(pair, tables, name):
    """`auto` leaves the steps to SDPA, which does not read pages: they are read out for it."""
    made = pair("mistral", attn=name)
    prompts = _prompts((5, 3))
    tokens, launches = _served(made.tried, prompts, new=5, **tables)
    assert tokens == _alone(made, prompts, new=5)
    if name == "auto":
        assert launches == {"sdpa/torch": 5}
    else:
        assert launches == {"triton_decode/triton": 1, "triton_decode/paged": 4}


def test_a_flash_package_does_not_take_our_place(pair, monkeypatch):
    """transformers swaps what it does not know for flash attention, where it finds one."""
    from transformers.generation.continuous_batching import continuous_api

    monkeypatch.setattr(continuous_api, "is_flash_attn_3_available", lambda **_: True)
    made = pair("mistral")
    prompts = _prompts((5, 3))
    tokens, launches = _served(made.tried, prompts, new=4)
    assert tokens == _alone(made, prompts, new=4)
    assert launches == {"triton_fa2/triton": 1, "triton_fa2/decode": 3}
    assert decision_of(made.tried).resolved == "triton_fa2"


def test_without_us_transformers_refuses_or_swaps(pair):
    """What the routing is there for; it is gone with `unregister` and back with `register`."""
    from transformers.generation.continuous_batching import cache, continuous_api, initialization

    import hf_attn_backends

    parts = (cache, continuous_api, initialization)
    ours = [part.is_flash_attention_requested for part in parts]
    ask = {"requested_attention_implementation": "triton_fa2"}
    assert all(answer(**ask) for answer in ours)
    assert not any(answer(requested_attention_implementation="sdpa") for answer in ours)
    hf_attn_backends.unregister()
    try:
        from transformers.utils.generic import is_flash_attention_requested

        for part in parts:
            assert part.is_flash_attention_requested is is_flash_attention_requested
        assert not any(answer(**ask) for answer in ours)  # also where somebody kept ours
    finally:
        hf_attn_backends.register()
    assert all(part.is_flash_attention_requested(**ask) for part in parts)


def test_a_context_is_the_callers_thread(pair):
    """Tokens are made in a thread of transformers' own, which a context does not reach."""
    made = pair("mistral")
    with attn_backend("sdpa"):
        _, launches = _served(made.tried, _prompts((5, 3)), new=3)
    assert launches == {"triton_fa2/triton": 1, "triton_fa2/decode": 2}
