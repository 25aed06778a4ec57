"""FlashMLA: refused by structure, before availability, in any spelling, and accurately."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from hf_attn_backends.errors import BackendRefusedError
from hf_attn_backends.selection import decide, probe_backends, select_attn_implementation

MISTRAL = {
    "model_type": "mistral", "head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip
SPELLINGS = [
    "flashmla", "FlashMLA", "flash_mla", "flash-mla", "paged|flashmla",
    "kernels-community/flash-mla",
    "kernels-community/flash-mla@main:flash_mla_with_kvcache", "paged|deepseek-ai/FlashMLA",
]  # fmt: skip


@pytest.fixture
def perfect_machine(monkeypatch):
    """An SM90 GPU with flash_mla installed, as far as any probe can see."""
    monkeypatch.setitem(sys.modules, "flash_mla", types.ModuleType("flash_mla"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("config", [MISTRAL, None])
def test_every_spelling_is_refused_by_structure(spelling, config, gate_dir):
    with pytest.raises(BackendRefusedError) as caught:
        select_attn_implementation(spelling, device="cpu", gate_dir=gate_dir, model_config=config)
    text = str(caught.value)
    assert "head_dim" in text.splitlines()[1]
    for question in ("installed", "CUDA device", "cpu", "package"):
        assert question not in text


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_machine_changes_it(device, perfect_machine, gate_dir, monkeypatch):
    monkeypatch.setattr("hf_attn_backends.environment.fingerprint", lambda device: {"torch": "x"})
    report = probe_backends(device, gate_dir)["flashmla"]
    assert not report.available
    assert report.fix is None
    with pytest.raises(BackendRefusedError) as caught:
        decide("flashmla", device=device, gate_dir=gate_dir, model_config=MISTRAL)
    assert caught.value.reasons == (
        "flashmla's decode kernel needs value head_dim 512 and query head_dim 576 over one latent "
        "key/value head, which is not mistral: head_dim 128, 32 query heads over 8 key/value heads",
        "flashmla's prefill kernel (SM100, key head_dim 192 or 128, value head_dim 128) has no "
        "backward pass for GQA, so it cannot train this model",
    )


def test_multi_head_models_get_the_reason_that_is_theirs(gate_dir):
    config = {**MISTRAL, "num_key_value_heads": 32}
    with pytest.raises(BackendRefusedError, match="not integrated here") as caught:
        decide("flashmla", device="cpu", gate_dir=gate_dir, model_config=config)
    assert "GQA" not in str(caught.value)


def test_a_latent_model_gets_its_own_answer(gate_dir):
    config = {
        "model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "num_attention_heads": 128,
        "num_key_value_heads": 128,
    }  # fmt: skip
    with pytest.raises(BackendRefusedError, match="needs an MLA integration") as caught:
        decide("flashmla", device="cpu", gate_dir=gate_dir, model_config=config)
    assert "head_dim 192, value head_dim 128" in str(caught.value)
