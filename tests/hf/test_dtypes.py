"""Mixed dtypes: autocast, LoRA over bf16 weights, norms kept in fp32."""

from __future__ import annotations

import pytest
import torch

from hf_attn_backends.hf.adapter import attention_function

BF16, F32 = torch.bfloat16, torch.float32


def test_autocast_over_fp32_weights(models, calls):
    eager, tried = models.pair()
    exact = models.build(models.config(), "eager", torch.float64, eager.state_dict())
    ids = models.ids(2, 11)
    with torch.autocast("cpu", BF16):
        got = tried(input_ids=ids, use_cache=False).logits
        base = eager(input_ids=ids, use_cache=False).logits
    want = exact(input_ids=ids).logits
    yardstick = float((base.double() - want).abs().max() / want.abs().max())
    models.near(got, want, limit=2 * yardstick + 1e-3)
    assert {call["dtypes"] for call in calls} == {(BF16,) * 3}  # query and key came in fp32
    got.float().pow(2).mean().backward()
    assert all(p.grad.dtype == F32 for p in tried.parameters() if p.grad is not None)


def _lora(models, attn, weights, dtype):
    from peft import LoraConfig, get_peft_model

    model = models.build(models.config(), attn, BF16, weights)
    if dtype == torch.float64:
        model = model.to(dtype)
    else:  # as peft prepares a model for k-bit training
        for name, parameter in model.named_parameters():
            if "_proj" not in name:
                parameter.data = parameter.data.float()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    torch.manual_seed(1)
    config = LoraConfig(
        r=2, lora_alpha=4, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False
    )
    model = get_peft_model(model, config)
    return model.to(dtype) if dtype == torch.float64 else model


def test_lora_over_bf16_weights_under_autocast(models, calls):
    weights = models.build(models.config(), "eager", BF16).state_dict()
    exact = _lora(models, "eager", weights, torch.float64)
    eager, tried = (_lora(models, attn, weights, BF16) for attn in ("eager", "triton_fa2"))
    exact.load_state_dict(eager.state_dict())
    tried.load_state_dict(eager.state_dict())
    ids = models.ids(2, 11)
    for model in (exact, eager, tried):
        with torch.autocast("cpu", BF16, enabled=model is not exact):
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    for name, parameter in exact.named_parameters():
        if parameter.grad is None:
            continue
        got, base = (dict(m.named_parameters())[name].grad for m in (tried, eager))
        assert got.dtype == F32
        yardstick = (base.double() - parameter.grad).abs().max() / parameter.grad.abs().max()
        models.near(got, parameter.grad, limit=max(5e-2, 2 * float(yardstick)))


class _Attention(torch.nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.o_proj = torch.nn.Linear(4, 4, dtype=dtype)


@pytest.mark.parametrize(
    ("dtypes", "weights", "target"),
    [
        ((F32, F32, BF16), BF16, BF16),  # a query norm kept in fp32
        ((F32, BF16, BF16), BF16, BF16),
        ((F32, F32, BF16), F32, F32),
        ((BF16, F32, F32), F32, BF16),
        ((F32, F32, F32), BF16, F32),  # nothing is mixed: as it comes
        ((torch.float64,) * 3, F32, torch.float64),
    ],
)
def test_one_dtype_without_autocast(calls, dtypes, weights, target):
    q, k, v = (torch.randn(1, 1, 3, 16, dtype=dtype) for dtype in dtypes)
    out, _ = attention_function("triton_fa2")(_Attention(weights), q, k, v, None)
    assert out.dtype == target
    assert calls[0]["dtypes"] == (target,) * 3


def test_a_quantized_model_says_its_dtype_itself(calls):
    module = _Attention(torch.float16)
    module.config = type("Config", (), {"_is_quantized": True, "dtype": BF16})()
    q, v = torch.randn(1, 1, 3, 16), torch.randn(1, 1, 3, 16, dtype=torch.float16)
    assert attention_function("triton_fa2")(module, q, q, v, None)[0].dtype == BF16


def test_autocast_leaves_fp64_and_takes_its_own_dtype_elsewhere(calls):
    module = _Attention(F32)
    double, single = torch.randn(1, 1, 3, 16).double(), torch.randn(1, 1, 3, 16)
    attend = attention_function("triton_fa2")
    with torch.autocast("cpu", BF16):
        assert attend(module, double, double, double, None)[0].dtype == torch.float64
        assert attend(module, single, single, single, None)[0].dtype == BF16
    with torch.autocast("cpu", BF16, enabled=False):
        assert attend(module, single, single, single, None)[0].dtype == F32
