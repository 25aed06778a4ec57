"""Generation on a GPU: compiled kernels, CUDA graphs, offloading, continuous batching.

In fp32 the tokens are eager's. In bf16 two right implementations part at the first near tie: there
every token must be the best one of the fp32 model on what came before it, up to the error that
eager itself has in bf16.
"""

from __future__ import annotations

import importlib.util
import inspect

import pytest
import torch

from hf_attn_backends import witness
from tests.hf.generation.conftest import Pair, build

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
STEPS = 64
SIZE = {
    "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128,
    "max_position_embeddings": 2048, "initializer_range": 0.08,
}  # fmt: skip
DTYPES = [torch.float32, BF16]


@pytest.fixture
def gpu_pair(tmp_path, monkeypatch):
    """Builder of pairs of head dim 128, where the gate vouches for the kernel."""
    from hf_attn_backends import gate

    monkeypatch.setenv("HF_ATTN_HOME", str(tmp_path))
    shapes = [
        {"dtype": dtype, "head_dim": 128, "visibility": kind}
        for dtype in ("bfloat16", "float32")
        for kind in ("full", "causal", "window", "intervals", "dense")
    ]
    gate.write_equivalence_gate(tolerances={}, shapes_covered=shapes, device="cuda")

    def make(family, dtype, **over):
        over = {**SIZE, **({"sliding_window": 48} if "window" in family else {}), **over}
        if family == "gemma3_text":
            over |= {"sliding_window": 48, "query_pre_attn_scalar": 128}
        return Pair(family, device="cuda", dtype=dtype, **over)

    return make


def _run(made, dtype, prompt, steps=STEPS, **options):
    """Generate; the tokens are eager's, or as good as them. Gives the launches by variant."""
    if dtype == torch.float32:
        made.run(prompt, steps=steps, **options)
        return made.variants()
    common = {"max_new_tokens": steps, "do_sample": False, "num_beams": 1}
    options.setdefault("compiled", False)
    options["disable_compile"] = not options.pop("compiled")
    before = witness.snapshot()
    tokens = made.generate(made.tried, prompt, {**common, **options})
    made.launches = type(made.launches)(witness.since(before))
    _assert_greedy(made, tokens, prompt["attention_mask"])
    return made.variants()


def _assert_greedy(made, tokens, mask):
    """Every new token is the fp32 model's best, up to twice eager's own error in bf16."""
    exact = build(made.eager.config, "eager", made.eager.state_dict(), device="cuda")
    new = tokens.shape[1] - mask.shape[1]
    seen = torch.cat([mask, mask.new_ones(mask.shape[0], new)], dim=1)
    kw = {
        "input_ids": tokens, "attention_mask": seen,
        "position_ids": (seen.cumsum(-1) - 1).clamp(min=0),
    }  # fmt: skip
    with torch.no_grad():
        want, own = exact(**kw).logits.float(), made.eager(**kw).logits.float()
    want, own = (x[:, -new - 1 : -1] for x in (want, own))
    chosen = want.gather(-1, tokens[:, -new:, None])[..., 0]
    assert bool((want.amax(-1) - chosen <= 2 * (own - want).abs().amax()).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["mistral", "mistral_window", "gemma3_text"])
def test_dynamic(gpu_pair, family, dtype):
    made = gpu_pair(family, dtype)
    variants = _run(made, dtype, made.prompt(61, 40))
    assert variants.pop("decode") == (STEPS - 1) * 2
    assert sum(variants.values()) == 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["mistral", "mistral_window"])
def test_static(gpu_pair, family, dtype):
    made = gpu_pair(family, dtype)
    variants = _run(made, dtype, made.prompt(61, 40), cache_implementation="static")
    assert sum(variants.values()) == STEPS * 2
    assert variants["decode"] >= (STEPS - 1) * 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_static_compiled_into_cuda_graphs(gpu_pair, dtype):
    """What `generate` does by itself on a GPU; replays of a captured graph run no Python."""
    from transformers import CompileConfig

    torch._dynamo.reset()
    made = gpu_pair("mistral", dtype)
    config = CompileConfig(mode="reduce-overhead", fullgraph=True)
    for lengths in ((61, 40), (30, 61)):  # the second prompt meets graphs that were captured
        variants = _run(
            made, dtype, made.prompt(*lengths), compiled=True, cache_implementation="static",
            compile_config=config,
        )  # fmt: skip
    assert set(variants) <= {"decode", "hopper", "triton"}
    assert sum(variants.values()) < STEPS * 2


@pytest.fixture
def orderly_prefetch(monkeypatch):
    """transformers 5.17 fetches a layer back before it has waited for it to be moved away, and then
    eager attention, too, reads what is not there yet; 5.24 waits."""
    from transformers import Cache

    prefetch = Cache.prefetch

    def waiting(self, *args, **kwargs):
        self.prefetch_stream.wait_stream(torch.cuda.default_stream())
        return prefetch(self, *args, **kwargs)

    monkeypatch.setattr(Cache, "prefetch", waiting)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("mistral", "offloaded"),
        ("mistral", "offloaded_static"),
        ("mistral_window", "offloaded"),  # test_moved_caches.py says why not offloaded_static
    ],
)
def test_offloaded(gpu_pair, orderly_prefetch, family, kind):
    """Against eager with all keys in one place."""
    made = gpu_pair(family, torch.float32, num_hidden_layers=4)
    variants = _run(made, torch.float32, made.prompt(61, 40), cache_implementation=kind, against={})
    assert sum(variants.values()) == STEPS * 4


@pytest.mark.parametrize("backend", ["fp8", "quanto"])
def test_quantised(gpu_pair, backend):
    """One layer: its keys are bit for bit eager's, so that they are rounded alike."""
    if backend == "quanto" and importlib.util.find_spec("optimum") is None:
        pytest.skip("optimum-quanto is not installed")
    made = gpu_pair("mistral", torch.float32, num_hidden_layers=1)
    options = {"cache_implementation": "quantized", "cache_config": {"backend": backend}}
    try:
        made.generate(made.eager, made.prompt(64), {"max_new_tokens": 2, **options})
    except (ImportError, ValueError) as said:
        pytest.skip(f"transformers: {said}")
    assert _run(made, torch.float32, made.prompt(64), **options)["decode"] == STEPS - 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_beams_and_chunks(gpu_pair, dtype):
    made = gpu_pair("mistral_window", dtype)
    if dtype == torch.float32:
        made.run(made.prompt(40, 21), num_beams=3, output_logits=False)
    _run(made, dtype, made.prompt(61), steps=16, prefill_chunk_size=16)


def _batched(made, prompts, new, **over):
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    known = inspect.signature(ContinuousBatchingConfig).parameters
    config = {
        "num_blocks": 64, "max_batch_tokens": 256, "max_requests_per_batch": 8,
        "page_size" if "page_size" in known else "block_size": 64, **over,
    }  # fmt: skip
    before = witness.snapshot()
    results = made.tried.generate_batch(
        [list(p) for p in prompts], progress_bar=False,
        generation_config=GenerationConfig(
            max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(**config),
    )  # fmt: skip
    made.launches = type(made.launches)(witness.since(before))
    tokens = {tuple(r.prompt_ids): r for r in results.values()}
    assert [r.error for r in results.values()] == [None] * len(prompts)
    return [list(tokens[tuple(p)].generated_tokens) for p in prompts]


BATCHING = {
    "indices": {"use_cuda_graph": False, "max_blocks_per_request": 0},
    "indices in CUDA graphs": {"use_cuda_graph": True, "max_blocks_per_request": 0},
    "block tables": {"use_cuda_graph": False, "max_blocks_per_request": 8},
    "block tables in CUDA graphs": {"use_cuda_graph": True, "max_blocks_per_request": 8},
    "as transformers chooses": {},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", list(BATCHING))
def test_continuous_batching(gpu_pair, how, dtype):
    _serves(gpu_pair("mistral", dtype), dtype, BATCHING[how])


def test_continuous_batching_of_windows(gpu_pair):
    _serves(gpu_pair("mistral_window", torch.float32), torch.float32, {"use_cuda_graph": False})


def test_block_tables_are_read_by_the_kernel_for_pages(gpu_pair):
    made = gpu_pair("mistral", torch.float32)
    _batched(made, _prompts(), 8, **BATCHING["block tables"])
    assert made.variants()["paged"] >= 2 * 6
    _batched(made, _prompts(), 8, **BATCHING["indices"])
    assert "paged" not in made.variants()


def _prompts():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 61, (n,), generator=generator).tolist() for n in (70, 5, 130, 33)]


def _serves(made, dtype, how, new=STEPS):
    for prompt, tokens in zip(_prompts(), _batched(made, _prompts(), new, **how), strict=True):
        ids = torch.tensor([prompt], device="cuda")
        mask = torch.ones_like(ids)
        if dtype == torch.float32:
            want = made.generate(
                made.eager, {"input_ids": ids, "attention_mask": mask},
                {"max_new_tokens": new, "do_sample": False},
            )  # fmt: skip
            assert tokens == want[0, len(prompt) :].tolist()
        else:
            both = torch.tensor([prompt + tokens], device="cuda")
            _assert_greedy(made, both, mask)
