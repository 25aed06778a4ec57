"""Tiny models, a gate for them, and a pure-torch stand-in for the kernel.

The semantics of masks and arguments are tested with the fp64 oracle in the kernel's place
(`by_reference`), so that many scenarios are cheap; test_kernel.py runs chosen ones for real.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path

import pytest
import torch

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import hf_attn_backends  # noqa: F401  (registers)

KINDS = ("full", "causal", "window", "intervals", "dense")
HEAD_DIMS = (16, 32)

TINY = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "attention_dropout": 0.0,
    "initializer_range": 0.25,  # scores of a standard deviation above 1
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "sliding_window": None,
}


@pytest.fixture(scope="session", autouse=True)
def _one_source_for_the_session():
    """The gate's digest of the kernel sources, as of now: they may be edited while tests run."""
    from hf_attn_backends import gate

    digest = gate.kernel_source_hash()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gate, "kernel_source_hash", lambda: digest)
        yield


@pytest.fixture(scope="session")
def gate_home(tmp_path_factory) -> Path:
    """A home whose artifacts cover what the tests of this folder call, on every device here."""
    from hf_attn_backends import gate

    home = tmp_path_factory.mktemp("home")
    before = os.environ.get("HF_ATTN_HOME")
    os.environ["HF_ATTN_HOME"] = str(home)
    try:
        shapes = [
            {"dtype": dtype, "head_dim": dim, "visibility": kind}
            for dtype in ("float32", "bfloat16", "float16")
            for dim in HEAD_DIMS
            for kind in KINDS
        ]
        shapes += [
            {"dtype": "float32", "head_dim": dim, "visibility": KINDS, "features": feature}
            for dim in HEAD_DIMS
            for feature in ("softcap", "sinks", "dropout", "value_dim")
        ]
        for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            gate.write_equivalence_gate(
                tolerances={"out": "test"}, shapes_covered=shapes, device=device
            )
    finally:
        if before is None:
            del os.environ["HF_ATTN_HOME"]
        else:
            os.environ["HF_ATTN_HOME"] = before
    return home


@pytest.fixture
def gated(gate_home, monkeypatch) -> Path:
    """The environment in which `triton_fa2` is vouched for."""
    monkeypatch.setenv("HF_ATTN_HOME", str(gate_home))
    return gate_home


@pytest.fixture
def calls(gated, monkeypatch) -> list[dict]:
    """The fp64 oracle in place of the kernel; what it was called with."""
    from hf_attn_backends.hf import adapter
    from hf_attn_backends.reference import attention_reference

    made: list[dict] = []

    def run_call(backend, query, key, value, visibility, **options):
        made.append({"backend": backend, "visibility": visibility, **options})
        made[-1]["shape"] = tuple(query.shape)
        made[-1]["dtypes"] = (query.dtype, key.dtype, value.dtype)
        out, _ = attention_reference(
            query, key, value, visibility=visibility, scale=options["scale"]
        )
        return out.to(query.dtype)

    monkeypatch.setattr(adapter, "run_call", run_call)
    return made


class Models:
    """Builders of tiny Mistral models that share weights, on `device`."""

    device = "cpu"

    @staticmethod
    def config(**over):
        from transformers import MistralConfig

        return MistralConfig(**{**TINY, **over})

    @staticmethod
    def build(config, attn, dtype=torch.float32, weights=None, auto="AutoModelForCausalLM"):
        import transformers

        torch.manual_seed(0)
        model = getattr(transformers, auto).from_config(
            copy.deepcopy(config), dtype=dtype, attn_implementation=attn
        )
        assert model.config._attn_implementation == attn
        if weights is not None:
            model.load_state_dict(weights)
        return model.to(Models.device).eval()

    @classmethod
    def pair(cls, dtype=torch.float32, attn="triton_fa2", auto="AutoModelForCausalLM", **over):
        """(eager, the one under test), with the same weights."""
        config = cls.config(**over)
        eager = cls.build(config, "eager", dtype, auto=auto)
        return eager, cls.build(config, attn, dtype, eager.state_dict(), auto=auto)

    @staticmethod
    def ids(*shape, seed=1):
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(3, 61, shape, generator=generator).to(Models.device)

    @staticmethod
    def padded(lengths, total, side):
        mask = torch.zeros(len(lengths), total, dtype=torch.long, device=Models.device)
        for row, n in enumerate(lengths):
            if n:
                mask[row, slice(-n, None) if side == "left" else slice(0, n)] = 1
        return mask

    @staticmethod
    def positions(mask):
        return (mask.long().cumsum(-1) - 1).clamp(min=0)

    @staticmethod
    def causal(n, batch=1, window=None, keep=None):
        """Bool `[batch, n, n]`: causal, within the window, only the keys in `keep`."""
        i = torch.arange(n, device=Models.device)
        seen = i[None, :] <= i[:, None]
        if window is not None:
            seen = seen & (i[:, None] - i[None, :] < window)
        seen = seen[None].expand(batch, n, n)
        return seen if keep is None else seen & keep.bool()[:, None, :]

    @staticmethod
    def additive(seen, dtype=torch.float32):
        """Additive `[B, 1, M, N]` of a bool `[B, M, N]`; finite, as eager wants it."""
        zero = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
        return zero.masked_fill(~seen, torch.finfo(dtype).min)[:, None]

    @staticmethod
    def cache_kw(model, cache):
        import inspect

        names = inspect.signature(type(model).forward).parameters
        return {"cache" if "cache" in names else "past_key_values": cache}

    @staticmethod
    def near(got, want, limit=2e-5):
        assert got.shape == want.shape
        assert torch.isfinite(got).all()
        scale = max(float(want.detach().abs().max()), 1e-6)
        error = float((got.detach().double() - want.detach().double()).abs().max()) / scale
        assert error <= limit, f"relative error {error:.1e}"

    @classmethod
    def near_grads(cls, got, want, limit=2e-4):
        names = {n for n, p in want.named_parameters() if p.grad is not None}
        assert names == {n for n, p in got.named_parameters() if p.grad is not None}
        assert names
        have = dict(got.named_parameters())
        for name, parameter in want.named_parameters():
            if parameter.grad is not None:
                cls.near(have[name].grad, parameter.grad, limit)


@pytest.fixture(scope="session")
def models() -> type[Models]:
    return Models


@pytest.fixture
def kernel_models(kernel_device, monkeypatch) -> type[Models]:
    """The same builders, where the Triton kernels run in this process."""
    monkeypatch.setattr(Models, "device", kernel_device)
    return Models
