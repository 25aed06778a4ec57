"""Whole models on a GPU, in bf16: the yardstick is eager's own error against eager in fp32."""

from __future__ import annotations

import pytest
import torch

from hf_attn_backends import witness

BF16 = torch.bfloat16
SIZE = {
    "hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 2048,
    "initializer_range": 0.08,
}  # fmt: skip

pytestmark = pytest.mark.gpu


@pytest.fixture
def three(kernel_models, gated_128):
    """Builder of (eager in fp32, eager in bf16, the one under test in bf16), same weights."""

    def build(**over):
        config = kernel_models.config(**{**SIZE, **over})
        eager = kernel_models.build(config, "eager", BF16)
        weights = eager.state_dict()
        return (
            kernel_models.build(config, "eager", torch.float32, weights),
            eager,
            kernel_models.build(config, "triton_fa2", BF16, weights),
        )

    return build


@pytest.fixture
def gated_128(tmp_path, monkeypatch):
    from hf_attn_backends import gate

    monkeypatch.setenv("HF_ATTN_HOME", str(tmp_path))
    shapes = [
        {"dtype": dtype, "head_dim": 128, "visibility": kind}
        for dtype in ("bfloat16", "float32")
        for kind in ("full", "causal", "window", "intervals", "dense")
    ]
    for device in ("cpu", "cuda"):
        gate.write_equivalence_gate(tolerances={}, shapes_covered=shapes, device=device)


def _no_worse(got, base, want, floor=2e-2):
    scale = float(want.abs().max())
    error = float((got.float() - want).abs().max()) / scale
    own = float((base.float() - want).abs().max()) / scale
    assert error <= max(2 * own, floor), f"{error:.1e}, eager's own {own:.1e}"


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("case", ["plain", "left", "right", "packed"])
def test_logits_and_gradients(kernel_models, three, window, case):
    exact, eager, tried = three(sliding_window=window)
    n = 300
    ids, kw = kernel_models.ids(2, n), {"use_cache": False}
    real = torch.ones(2, n, dtype=torch.bool, device=kernel_models.device)
    if case in ("left", "right"):
        mask = kernel_models.padded((n, 170), n, case)
        kw |= {"attention_mask": mask, "position_ids": kernel_models.positions(mask)}
        real = mask.bool()
    elif case == "packed":
        kw["position_ids"] = torch.cat([torch.arange(k) for k in (100, 150, 50)])[None].to(
            ids.device
        )
    weigh = torch.randn(2, n, 61, device=kernel_models.device) * real[..., None]
    outs = []
    for model in (exact, eager, tried):
        out = model(input_ids=ids, **kw).logits
        (out.float() * weigh).sum().backward()
        outs.append(out[real])
    _no_worse(outs[2], outs[1], outs[0])
    named = [dict(model.named_parameters()) for model in (tried, eager, exact)]
    for name, parameter in named[2].items():
        if parameter.grad is not None and float(parameter.grad.abs().max()) > 0:
            _no_worse(named[0][name].grad, named[1][name].grad, parameter.grad, floor=5e-2)


def test_generate_with_a_compiled_static_cache(kernel_models, three):
    _, eager, tried = three()
    mask = kernel_models.padded((24, 15), 24, "left")
    ids = torch.where(mask.bool(), kernel_models.ids(2, 24), 0)
    kw = {
        "attention_mask": mask, "max_new_tokens": 8, "do_sample": False,
        "cache_implementation": "static", "return_dict_in_generate": True, "output_logits": True,
    }  # fmt: skip
    got, want = tried.generate(ids, **kw), eager.generate(ids, **kw, disable_compile=True)
    # as far as the greedy choices agree, the logits do
    for step, (a, b) in enumerate(zip(got.logits, want.logits, strict=True)):
        assert float((a - b).float().abs().max() / b.float().abs().max()) < 5e-2
        if not torch.equal(got.sequences[:, 24 + step], want.sequences[:, 24 + step]):
            break


def test_training_compiled_in_one_graph(kernel_models, three):
    exact, eager, tried = three(num_hidden_layers=1)
    ids = kernel_models.ids(2, 128)
    before = witness.snapshot()
    compiled = torch.compile(tried, fullgraph=True)
    losses = []
    for model in (exact, eager, compiled):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        losses.append(loss.detach())
    _no_worse(losses[2], losses[1], losses[0])
    named = [dict(model.named_parameters()) for model in (tried, eager, exact)]
    for name, parameter in named[2].items():
        if parameter.grad is not None:
            _no_worse(named[0][name].grad, named[1][name].grad, parameter.grad, floor=5e-2)
    assert {launch.phase for launch in witness.since(before)} == {"forward", "backward"}


@pytest.mark.multigpu
def test_layers_spread_over_two_devices(kernel_models, three):
    from accelerate import dispatch_model

    exact, eager, tried = three()
    mask = kernel_models.padded((40, 21), 40, "left")
    kw = {"attention_mask": mask, "position_ids": kernel_models.positions(mask)}
    ids = kernel_models.ids(2, 40)
    spread = dispatch_model(
        tried,
        {
            "model.embed_tokens": 0, "model.rotary_emb": 0, "model.layers.0": 0,
            "model.layers.1": 1, "model.norm": 1, "lm_head": 1,
        },
    )  # fmt: skip
    with torch.no_grad():
        got = spread(input_ids=ids, **kw).logits.to("cuda:0")
        base, want = eager(input_ids=ids, **kw).logits, exact(input_ids=ids, **kw).logits
    real = mask.bool()
    _no_worse(got[real], base[real], want[real])
