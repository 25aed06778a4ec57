"""Recorded runs on a GPU: which of SDPA's kernels ran, ours in bf16, compiled and replayed."""

from __future__ import annotations

import pytest
import torch

from hf_attn_backends.errors import ExecutionMismatchError
from hf_attn_backends.hf.callback import AttentionBackendCallback

pytestmark = pytest.mark.gpu

GPU = {"use_cpu": False, "bf16": True}
LAYERS = 2


@pytest.fixture
def gate(write_gate):
    return write_gate("cuda", "bfloat16", "float32")


def rows_of(callback: AttentionBackendCallback) -> list[dict]:
    return callback.record.attention_executed["by_rank"][0]


@pytest.mark.parametrize("kernel", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH"])
def test_the_kernel_of_sdpa_that_ran_is_named(make_model, make_trainer, kernel: str) -> None:
    callback = AttentionBackendCallback()
    # SDPA's EFFICIENT kernel takes no grouped heads.
    model = make_model("sdpa", num_key_value_heads=4)
    trainer = make_trainer(model, [callback], length=64, **GPU)
    with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, kernel)):
        trainer.train()
    assert callback.record.attention_verdict == "matched"
    forward = [row for row in rows_of(callback) if row["phase"] == "forward"]
    assert [(row["variant"], row["launches"]) for row in forward] == [(kernel, LAYERS)]
    if kernel != "MATH":
        # The backward pass runs on autograd's own thread for the device, and is seen there too.
        backward = [row for row in rows_of(callback) if row["phase"] == "backward"]
        assert [(row["variant"], row["launches"]) for row in backward] == [(kernel, LAYERS)]
        assert forward[0]["call_class"].startswith("bfloat16/d16/")


def test_ours_in_bf16_is_counted(make_model, make_trainer, gate) -> None:
    callback = AttentionBackendCallback()
    make_trainer(make_model("triton_fa2"), [callback], length=64, **GPU).train()
    record = callback.record
    assert record.attention_verdict == "matched"
    assert record.device["type"] == "cuda"
    for phase in ("forward", "backward"):
        assert sum(r["launches"] for r in rows_of(callback) if r["phase"] == phase) == 2 * LAYERS
    assert {row["call_class"] for row in rows_of(callback)} == {"bfloat16/d16/causal"}


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_runs_are_counted_and_replays_are_said(
    make_model, make_trainer, gate, mode: str
) -> None:
    callback = AttentionBackendCallback()
    steps = 6
    trainer = make_trainer(
        make_model("triton_fa2"), [callback], length=64, max_steps=steps, torch_compile=True,
        torch_compile_mode=mode, **GPU,
    )  # fmt: skip
    trainer.train()
    record = callback.record
    forward = sum(row["launches"] for row in rows_of(callback) if row["phase"] == "forward")
    assert record.attention_verdict == "matched"
    assert record.flags["compile"] == mode
    if mode == "default":
        assert forward == steps * LAYERS
    else:
        assert LAYERS <= forward <= steps * LAYERS
        assert "lower bound" in record.attention_executed["reading"]


def test_a_model_switched_on_the_gpu_is_stopped(make_model, make_trainer, gate) -> None:
    model = make_model("triton_fa2")
    model.config._attn_implementation_internal = "sdpa"
    with pytest.raises(ExecutionMismatchError, match="2 of 2 attention modules run 'sdpa'"):
        make_trainer(model, [AttentionBackendCallback()], **GPU).train()
