"""Our kernels through dispatch: served within the gate's coverage, refused outside of it.

The artifact is written by hand for the classes under test: what is tested is that dispatch obeys
it. On a CPU the kernels run in Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch

from hf_attn_backends import gate, select_attn_implementation, witness
from hf_attn_backends.dispatch import attention, attn_backend, run_call
from hf_attn_backends.errors import CallRefusedError
from hf_attn_backends.kernels.visibility import CAUSAL
from hf_attn_backends.reference import attention_reference

COVERED = [f"float32/d16/{kind}" for kind in ("full", "causal", "window", "intervals", "dense")]


@pytest.fixture(autouse=True)
def _fresh():
    witness.reset()
    yield
    witness.reset()


@pytest.fixture
def covered(home, kernel_device):
    """An artifact for fp32, head_dim 16, where the process looks for it."""
    path = gate.write_equivalence_gate(
        tolerances={}, shapes_covered=[], device=kernel_device, coverage=COVERED
    )
    assert str(home) in str(path)
    return kernel_device


def make(device, q_len=5, k_len=7, head_dim=16, grad=False):
    shapes = [(2, 4, q_len, head_dim), (2, 2, k_len, head_dim), (2, 2, k_len, head_dim)]
    return [torch.randn(shape, device=device, requires_grad=grad) for shape in shapes]


OPTIONS = {
    "full": lambda device: {},
    "causal": lambda device: {"is_causal": True},
    "window": lambda device: {"is_causal": True, "window": 3},
    "dense": lambda device: {"attn_mask": torch.rand(2, 1, 5, 7, device=device) > 0.4},
    "intervals": lambda device: {
        "attn_mask": torch.tensor(
            [[[0, 3], [2, 2], [1, 7], [0, 7], [6, 7]]] * 2, device=device
        ).int()
    },
}


@pytest.mark.parametrize("kind", OPTIONS)
def test_it_serves_what_the_gate_covers_and_agrees_with_the_oracle(kind, covered):
    leaves = make(covered, grad=True)
    options = OPTIONS[kind](covered)
    out = attention(*leaves, backend="triton_fa2", **options)
    grads = torch.autograd.grad(out.sum(), leaves)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    want, _ = attention_reference(*exact, **options)
    assert torch.allclose(out.double(), want, atol=1e-5)
    for got, wanted in zip(grads, torch.autograd.grad(want.sum(), exact), strict=True):
        assert torch.allclose(got.double(), wanted, atol=1e-5)
    launches = {(n.backend, n.phase, n.call_class): c for n, c in witness.snapshot().items()}
    name = f"float32/d16/{kind}"
    assert launches == {
        ("triton_fa2", "forward", name): 1, ("triton_fa2", "backward", name): 1,
    }  # fmt: skip


def test_another_class_is_refused_with_the_command(covered):
    with pytest.raises(CallRefusedError, match="does not cover float32/d32/causal") as caught:
        attention(*make(covered, head_dim=32), is_causal=True, backend="triton_fa2")
    assert f"hf-attn gate --device {covered} --head-dim 32 --dtype float32 --visibility causal" in (
        str(caught.value)
    )
    assert witness.snapshot() == {}


def test_what_the_kernel_lacks_is_refused_and_no_gate_is_blamed(covered):
    bias = torch.randn(5, 7, device=covered)
    with pytest.raises(CallRefusedError, match="does not implement an additive mask") as caught:
        attention(*make(covered), attn_mask=bias, backend="triton_fa2")
    assert "hf-attn gate" not in str(caught.value)


def test_a_selection_has_calls_ask_the_gate_anew(covered):
    """A verdict on a call is kept until somebody selects: an artifact may have gone meanwhile."""
    leaves = make(covered)
    attention(*leaves, backend="triton_fa2")
    gate.artifact_path(covered).unlink()
    select_attn_implementation("sdpa", device=covered)
    with pytest.raises(CallRefusedError, match="no equivalence gate was run"):
        attention(*leaves, backend="triton_fa2")


@pytest.mark.parametrize("odd", [{"head_dim": 8}, {"head_dim": 264}, {"dtype": torch.float64}])
def test_no_command_is_given_that_could_not_help(covered, odd):
    """`hf-attn gate --dtype float64` would be an error itself."""
    dtype = odd.pop("dtype", torch.float32)
    leaves = [leaf.to(dtype) for leaf in make(covered, **odd)]
    with pytest.raises(
        CallRefusedError, match=r"triton_fa2 (has kernels for|computes in)"
    ) as caught:
        attention(*leaves, is_causal=True, backend="triton_fa2")
    assert "hf-attn gate" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "features"),
    [
        ({"softcap": 2.0}, "softcap"),
        ({"sinks": torch.zeros(4), "dropout_p": 0.1}, "dropout+sinks"),
    ],
)
def test_a_feature_that_the_gate_has_not_measured_is_refused(covered, options, features):
    options = {k: v.to(covered) if k == "sinks" else v for k, v in options.items()}
    with pytest.raises(CallRefusedError, match="the equivalence gate does not cover") as caught:
        attention(*make(covered), is_causal=True, backend="triton_fa2", **options)
    command = f"--head-dim 16 --dtype float32 --visibility causal --feature {features}"
    assert command in str(caught.value)


def test_a_value_head_dim_of_its_own_is_refused_unless_measured(covered):
    query, key, value = make(covered)
    with pytest.raises(CallRefusedError, match="--visibility full --feature value_dim"):
        attention(query, key, torch.cat([value, value], -1), backend="triton_fa2")


def test_features_that_were_measured_agree_with_the_oracle(home, kernel_device):
    gate.write_equivalence_gate(
        tolerances={}, shapes_covered=[], device=kernel_device,
        coverage=["float32/d16/causal+sinks+softcap+value_dim"],
    )  # fmt: skip
    query, key, value = make(kernel_device, grad=True)
    value = torch.randn(2, 2, 7, 24, device=kernel_device, requires_grad=True)
    sinks = torch.randn(4, device=kernel_device, requires_grad=True)
    leaves = (query, key, value, sinks)
    options = {"is_causal": True, "softcap": 1.5, "sinks": sinks}
    out = attention(query, key, value, backend="triton_fa2", **options)
    want, _ = attention_reference(query, key, value, **options)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
    weight = torch.randn_like(out)
    grads = torch.autograd.grad(out, leaves, weight)
    exact = torch.autograd.grad(want, leaves, weight.double())
    for one, two in zip(grads, exact, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
    assert {n.call_class for n in witness.snapshot()} == {
        "float32/d16/causal+sinks+softcap+value_dim"
    }
    assert {n.phase for n in witness.snapshot()} == {"forward", "backward"}


def test_a_gate_that_is_written_counts_from_the_next_call_on(home, kernel_device):
    call = make(kernel_device)
    with pytest.raises(CallRefusedError, match="equivalence gate"):
        attention(*call, backend="triton_fa2")
    gate.write_equivalence_gate(
        tolerances={}, shapes_covered=[], device=kernel_device, coverage=["float32/d16/full"]
    )
    attention(*call, backend="triton_fa2")
    with pytest.raises(CallRefusedError, match="does not cover float32/d16/causal"):
        attention(*call, is_causal=True, backend="triton_fa2")


def test_a_preference_for_it_falls_back_where_the_gate_says_no(covered, monkeypatch):
    monkeypatch.setenv("HF_ATTN_BACKEND", "triton_fa2")
    attention(*make(covered), is_causal=True)
    attention(*make(covered, head_dim=8), is_causal=True)
    assert {n.backend for n in witness.snapshot()} == {"triton_fa2", "sdpa"}
    assert witness.substitutions() == {("triton_fa2", "sdpa", "float32/d8/causal"): 1}


def test_decode_serves_cached_calls_without_gradients_under_its_own_name(covered):
    query, key, value = make(covered, q_len=1)
    out = attention(query, key, value, is_causal=True, kv_cache=object(), backend="triton_decode")
    want, _ = attention_reference(query, key, value, is_causal=True)
    assert torch.allclose(out.double(), want, atol=1e-5)
    assert {n.backend for n in witness.snapshot()} == {"triton_decode"}


def test_a_context_moves_a_model_off_it_and_back(covered):
    call = make(covered)
    run_call("triton_fa2", *call, CAUSAL, scale=None)
    with attn_backend("sdpa"):
        run_call("triton_fa2", *call, CAUSAL, scale=None)
    run_call("triton_fa2", *call, CAUSAL, scale=None)
    assert {n.backend: c for n, c in witness.snapshot().items()} == {"triton_fa2": 2, "sdpa": 1}


def test_it_compiles_without_a_graph_break(covered):
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v: attention(q, k, v, is_causal=True, backend="triton_fa2"),
        backend="aot_eager", fullgraph=True,
    )  # fmt: skip
    leaves = make(covered, grad=True)
    out = compiled(*leaves)
    want, _ = attention_reference(*leaves, is_causal=True)
    assert torch.allclose(out.double(), want, atol=1e-5)
    out.sum().backward()
    phases = {n.phase: c for n, c in witness.snapshot().items()}
    assert phases == {"forward": 1, "backward": 1}
    torch._dynamo.reset()
