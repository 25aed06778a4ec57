"""The capability table: refusals are derived from it, in both directions."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from hf_attn_backends.backends import CAPABILITIES, ModelDims, backend_of
from hf_attn_backends.backends.capabilities import Capability
from hf_attn_backends.backends.table_refusals import call_refusals, structural_refusals
from hf_attn_backends.call import AttentionCall
from hf_attn_backends.doctor import support_matrix

PLAIN = AttentionCall(
    batch=1, heads=4, kv_heads=2, q_len=8, k_len=8, head_dim=64, value_head_dim=64,
    dtype=torch.bfloat16, device=torch.device("cuda"), visibility="causal", has_cache=True,
)  # fmt: skip

# What each feature makes of the plain call, and the word that its refusal has to carry.
CHANGES = {
    "device": ({"device": torch.device("cpu")}, "cpu"),
    "float32": ({"dtype": torch.float32}, "float32"),
    "float64": ({"dtype": torch.float64}, "float64"),
    "wide head": ({"head_dim": 264, "value_head_dim": 264}, "head_dim 264"),
    "odd head": ({"head_dim": 20, "value_head_dim": 20}, "head_dim 20"),
    "tiny head": ({"head_dim": 4, "value_head_dim": 4}, "head_dim 4"),
    "value": ({"value_head_dim": 32}, "32 and 64"),
    "tiny value": ({"value_head_dim": 8}, "8"),
    "intervals": ({"visibility": "intervals"}, "intervals"),
    "dense": ({"visibility": "dense"}, "dense"),
    "softcap": ({"softcap": 2.0}, "softcap"),
    "sinks": ({"sinks": True}, "sinks"),
    "bias": ({"visibility": "dense", "bias": True}, "additive"),
    "dropout": ({"dropout_p": 0.1}, "dropout"),
    "both": ({"dropout_p": 0.1, "softcap": 2.0}, ""),
    "grad": ({"needs_grad": True}, "gradients"),
    "no cache": ({"has_cache": False}, "KV cache"),
    "decode": ({"q_len": 1}, ""),
}
SERVES = {
    "eager": set(CHANGES),
    "sdpa": set(CHANGES) - {"softcap", "sinks", "both"},
    "flash_attention_2": {"softcap", "dropout", "grad", "no cache", "decode"},
    "flash_attention_3": {"softcap", "grad", "no cache", "decode"},
    "flex_attention": set(CHANGES) - {"bias", "dropout", "both"},
    "triton_fa2": set(CHANGES) - {"float64", "wide head", "tiny head", "tiny value", "bias"},
    "triton_decode": {"device", "float32", "odd head", "value", "intervals", "dense", "softcap",
                      "sinks", "decode"},
}  # fmt: skip


@pytest.mark.parametrize("name", SERVES)
@pytest.mark.parametrize("change", CHANGES)
def test_each_feature_is_served_or_refused_by_name(name, change):
    assert call_refusals(name, CAPABILITIES[name], PLAIN) == []
    fields, word = CHANGES[change]
    reasons = call_refusals(name, CAPABILITIES[name], dataclasses.replace(PLAIN, **fields))
    if change in SERVES[name]:
        assert reasons == []
    else:
        assert reasons
        assert word in " ".join(reasons)
        assert all(reason.startswith(name) and len(reason) >= 40 for reason in reasons)


def test_all_reasons_are_collected():
    call = dataclasses.replace(
        PLAIN, device=torch.device("cpu"), dtype=torch.float32, softcap=1.0, dropout_p=0.5,
        visibility="dense", sinks=True, head_dim=512, value_head_dim=512,
    )  # fmt: skip
    reasons = call_refusals("flash_attention_2", CAPABILITIES["flash_attention_2"], call)
    for word in ("on cpu", "float32", "head_dim 512", "dense", "sinks", "softcap together"):
        assert any(word in reason for reason in reasons), word


def test_a_backend_without_unequal_lengths_refuses_them():
    square = Capability(unequal_lengths=False)
    call = dataclasses.replace(PLAIN, q_len=3)
    assert "3 and 8" in call_refusals("square", square, call)[0]
    assert call_refusals("square", square, PLAIN) == []


def test_structure_is_refused_from_the_dimensions():
    table = CAPABILITIES["triton_fa2"]
    fits = ModelDims(head_dim=128, v_head_dim=128)
    assert structural_refusals("triton_fa2", table, fits) == []
    wide = ModelDims(head_dim=288, v_head_dim=288, softcap=50.0)
    assert "head_dim 288" in structural_refusals("triton_fa2", table, wide)[0]
    latent = ModelDims(head_dim=192, v_head_dim=128, softcap=50.0)
    assert structural_refusals("triton_fa2", table, latent) == []
    assert "softcap" in structural_refusals("sdpa", CAPABILITIES["sdpa"], latent)[0]
    reasons = structural_refusals("flash_attention_2", CAPABILITIES["flash_attention_2"], latent)
    assert "128 and 192" in reasons[0]


def test_a_subclass_is_judged_by_its_row():
    fp64 = dataclasses.replace(PLAIN, dtype=torch.float64, device=torch.device("cpu"))
    assert backend_of("eager").supports_call(fp64)
    assert not backend_of("flash_attention_2").supports_call(fp64)


def test_the_matrix_has_a_row_for_each_backend_and_follows_the_table():
    lines = support_matrix().splitlines()
    assert [line.split("`")[1] for line in lines[2:]] == list(CAPABILITIES)
    cells = len(lines[0].split("|"))
    assert all(len(line.split("|")) == cells for line in lines)
    row = next(line for line in lines if "`flash_attention_3`" in line)
    assert "cuda 9.0" in row
    assert "bf16, fp16" in row
    changed = support_matrix({"x": Capability(softcap=True, dtypes=("float32",))})
    assert "| fp32 | any | all | yes | refused |" in changed


def test_readmes_matrix_is_this_table():
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    block = readme.split("<!-- table: matrix -->")[1].split("<!-- end: matrix -->")[0]
    assert block.strip() == support_matrix(), "run: hf-attn doctor --matrix"
