"""What importing the package costs and does."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import hf_attn_backends


def _python(code: str, **environment: str) -> dict:
    import os

    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


COST = """
import json, sys, time
import transformers
before = set(sys.modules)
start = time.perf_counter()
import hf_attn_backends
seconds = time.perf_counter() - start
print(json.dumps({"seconds": seconds, "new": sorted(set(sys.modules) - before)}))
"""


def test_at_most_50_ms_on_top_of_transformers_without_torch_or_triton():
    # the fastest of a few: a loaded machine makes any of them slower
    runs = []
    for _ in range(4):
        runs.append(_python(COST))
        if runs[-1]["seconds"] <= 0.05:
            break
    print(f"import hf_attn_backends: {min(r['seconds'] for r in runs) * 1e3:.1f} ms")
    assert min(run["seconds"] for run in runs) <= 0.05
    roots = {name.split(".")[0] for run in runs for name in run["new"]}
    assert not roots & {"torch", "triton", "numpy"}
    assert not any(name.startswith("transformers.mod") for run in runs for name in run["new"])


AFTERWARDS = """
import json, sys
import hf_attn_backends
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
early = "triton_fa2" in ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.mistral.modeling_mistral import MistralPreTrainedModel
import torch
from hf_attn_backends.hf import hooks
print(json.dumps({
    "early": early,
    "attention": [n in ALL_ATTENTION_FUNCTIONS for n in ("triton_fa2", "triton_decode", "auto")],
    "masks": [n in ALL_MASK_ATTENTION_FUNCTIONS for n in ("triton_fa2", "triton_decode", "auto")],
    "mistral": hooks.installed(MistralPreTrainedModel),
    "cuda": torch.cuda.is_initialized(),
    "kernels": sorted(m for m in sys.modules if m.startswith("hf_attn_backends.kernels.triton")),
}))
"""


@pytest.mark.parametrize(
    "first",
    [
        "",
        "import transformers.models.mistral.modeling_mistral\n",
        "import hf_attn_backends.hf.masks, hf_attn_backends.hf.support\n",
    ],
)
def test_registers_whichever_is_imported_first(first):
    got = _python(first + AFTERWARDS)
    assert got == {
        "early": True, "attention": [True] * 3, "masks": [True] * 3, "mistral": True, "cuda": False,
        "kernels": [],
    }  # fmt: skip


def test_public_names_are_sorted_complete_and_there():
    names = hf_attn_backends.__all__
    assert names == sorted(names)
    issue = {
        "ALL_BACKENDS", "TRITON_FA2_GATE_MODULE", "BackendReport", "probe_backends",
        "select_attn_implementation", "banner_value", "benchmark_backends",
        "benchmark_backends_with_reasons", "load_sdpa_baseline", "attention", "attn_backend",
        "get_backend", "ATTN_BACKEND", "AttentionBackend", "AttentionBackendFactory",
        "AttentionCall", "AttentionBackendCallback", "register", "unregister",
    }  # fmt: skip
    assert issue <= set(names)
    for name in names:
        assert getattr(hf_attn_backends, name) is not None, name
    assert set(names) <= set(dir(hf_attn_backends))


def test_every_error_of_the_tree_is_public():
    from hf_attn_backends import errors

    tree = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.AttentionBackendError)
    }
    assert tree <= set(hf_attn_backends.__all__)


def test_submodules_and_unknown_names():
    assert hf_attn_backends.gate.kernel_source_hash
    assert hf_attn_backends.registry.MANDATORY_BANNER_KEYS
    with pytest.raises(AttributeError, match="no attribute 'triton_fa3'"):
        _ = hf_attn_backends.triton_fa3
