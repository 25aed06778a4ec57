"""`generate` with a static cache whose steps are compiled, as transformers does on a GPU."""

from __future__ import annotations

import pytest
import torch

STEPS = 64


@pytest.fixture
def compile_here():
    """A configuration that compiles the steps on a CPU, too."""
    from transformers import CompileConfig

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    def make(backend):
        config = CompileConfig(backend=backend, fullgraph=True, mode=None)
        config._compile_all_devices = True
        return config

    yield make
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("family", "lengths"),
    [
        ("mistral", (9,)),
        pytest.param("mistral_window", (9, 4), marks=pytest.mark.slow),
        pytest.param("mistral", (9, 4), marks=pytest.mark.slow),
        pytest.param("gemma3_text", (9, 4), marks=pytest.mark.slow),
    ],
)
def test_static_cache(pair, compile_here, family, lengths):
    """One graph for all steps; its operator counts each launch when it runs."""
    made = pair(family)
    made.run(
        made.prompt(*lengths), compiled=True, cache_implementation="static",
        compile_config=compile_here("aot_eager"),
    )  # fmt: skip
    # masks are made ahead of the model, as intervals, and come to the graph as they are
    assert made.variants()["decode"] >= (STEPS - 1) * made.layers
    assert not any("dense" in launch.call_class for launch in made.launches)
    # a sliding buffer that fills, is full, and rolls makes transformers' code three graphs
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.slow
def test_static_cache_by_inductor(pair, compile_here):
    made = pair("mistral")
    made.run(
        made.prompt(9, 4), compiled=True, cache_implementation="static",
        compile_config=compile_here("inductor"),
    )  # fmt: skip
    assert sum(made.variants().values()) == STEPS
