"""Every backend that says it can serve a call agrees with the fp64 oracle, out and gradients."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_attn_backends.backends import ALL_BACKENDS, backend_of
from hf_attn_backends.backends.planning import reasons_against
from hf_attn_backends.call import AttentionCall
from hf_attn_backends.dispatch import attention
from hf_attn_backends.reference import attention_reference

# Errors of eager itself in that dtype, measured on these shapes (weights rounded before the second
# product), with room for a factor of two; relative to the largest value.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}
TORCH_BACKENDS = ("eager", "sdpa", "flex_attention")


@st.composite
def calls(draw):
    """One generated call: (query, key, value, attention()'s keyword arguments)."""
    batch = draw(st.integers(1, 2))
    groups, ratio = draw(st.sampled_from([(1, 1), (1, 3), (2, 2), (2, 4)]))
    q_len, k_len = draw(st.integers(1, 13)), draw(st.integers(1, 13))
    head_dim = draw(st.sampled_from([8, 16, 20]))
    value_dim = draw(st.sampled_from([head_dim, head_dim, 12]))
    dtype = draw(st.sampled_from(list(TOLERANCES)))
    seed = draw(st.integers(0, 2**16))
    g = torch.Generator().manual_seed(seed)
    heads = groups * ratio

    def make(rows, length, width):
        flat = torch.randn(batch, length, rows, width, generator=g, dtype=torch.float64)
        return flat.to(dtype).transpose(1, 2)  # the strides that transformers hands over

    kind = draw(st.sampled_from(["full", "causal", "window", "intervals", "dense", "bias"]))
    options = {}
    if kind in ("causal", "window"):
        options["is_causal"] = True
    if kind == "window":
        options["window"] = draw(st.integers(1, 15))
    if kind == "intervals":
        first = torch.randint(0, k_len, (batch, q_len), generator=g)
        width = torch.randint(0, k_len + 1, (batch, q_len), generator=g)  # 0: sees nothing
        end = torch.minimum(first + width, torch.tensor(k_len))
        options["attn_mask"] = torch.stack([first, end], -1).int()
    if kind == "dense":
        shape = draw(st.sampled_from([(q_len, k_len), (batch, 1, 1, k_len),
                                      (batch, heads, q_len, k_len)]))  # fmt: skip
        options["attn_mask"] = torch.rand(shape, generator=g) > 0.4
    if kind == "bias":
        bias = torch.randn(1, heads, q_len, k_len, generator=g).to(dtype)
        hidden = torch.rand(batch, 1, q_len, k_len, generator=g) > 0.6
        lowest = draw(st.sampled_from([-torch.inf, torch.finfo(dtype).min]))
        options["attn_mask"] = bias.masked_fill(hidden, lowest)
    if draw(st.booleans()):
        options["scale"] = 0.3
    if draw(st.integers(0, 3)) == 0:
        options["softcap"] = 1.5
    if draw(st.integers(0, 3)) == 0:
        options["sinks"] = torch.randn(heads, generator=g).to(dtype)
    query = make(heads, q_len, head_dim)
    return query, make(groups, k_len, head_dim), make(groups, k_len, value_dim), options


def oracle(query, key, value, options):
    mask, more = options.get("attn_mask"), dict(options)
    if mask is not None:
        more["attn_mask"] = mask
    return attention_reference(query, key, value, **more)[0]


def assert_near(got, want, dtype, what):
    assert torch.isfinite(got).all(), f"{what} is not finite"
    error = (got.double() - want).abs().max() / want.abs().max().clamp(min=1.0)
    assert error <= TOLERANCES[dtype], f"{what}: error {error:.2e} over {TOLERANCES[dtype]:.0e}"


@pytest.mark.parametrize("name", TORCH_BACKENDS)
@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(call=calls(), grad=st.booleans())
def test_agrees_with_the_oracle(name, call, grad):
    query, key, value, options = call
    leaves = [t.detach().clone().requires_grad_(grad) for t in (query, key, value)]
    described = AttentionCall.of(
        *leaves, **{k: v for k, v in options.items() if k not in ("scale",)}
    )
    backend = backend_of(name)
    if reasons_against(backend, described):
        with pytest.raises(RuntimeError, match=f"Explicitly-set backend '{name}' cannot serve"):
            attention(*leaves, backend=name, **options)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # flex says that it is not compiled
        out = attention(*leaves, backend=name, **options)
    assert out.dtype == query.dtype
    assert out.shape == (*query.shape[:3], value.shape[3])
    exact = [t.detach().double().requires_grad_(grad) for t in (query, key, value)]
    want = oracle(*exact, options)
    assert_near(out.detach(), want.detach(), query.dtype, f"{name} out")
    if grad:
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        got = torch.autograd.grad((out * weights.to(out.dtype)).sum(), leaves)
        wanted = torch.autograd.grad((want * weights.to(out.dtype).double()).sum(), exact)
        for label, mine, theirs in zip(("dq", "dk", "dv"), got, wanted, strict=True):
            assert_near(mine, theirs, query.dtype, f"{name} {label}")


@pytest.mark.parametrize("name", ["eager", "sdpa"])
@pytest.mark.parametrize("visibility", ["intervals", "dense", "bias", "causal"])
def test_rows_that_see_nothing_are_zero_and_have_zero_gradients(name, visibility):
    q_len, k_len = 5, 3
    leaves = [torch.randn(1, 2, n, 16, requires_grad=True) for n in (q_len, k_len, k_len)]
    seen = torch.ones(q_len, k_len, dtype=torch.bool)
    seen[:2] = False
    options = {
        "intervals": {"attn_mask": torch.tensor([[[1, 1], [3, 2], [0, 3], [0, 3], [1, 3]]]).int()},
        "dense": {"attn_mask": seen},
        "bias": {"attn_mask": torch.zeros(q_len, k_len).masked_fill(~seen, -torch.inf)},
        "causal": {"is_causal": True},  # aligned to the last key: the first two rows see none
    }[visibility]
    out = attention(*leaves, backend=name, **options)
    assert (out[:, :, :2] == 0).all()
    assert (out[:, :, 2:].abs().sum(-1) > 0).all()
    out.sum().backward()
    assert all(torch.isfinite(leaf.grad).all() for leaf in leaves)
    assert (leaves[0].grad[:, :, :2] == 0).all()
    assert leaves[1].grad.abs().sum() > 0
    assert leaves[2].grad.abs().sum() > 0


@pytest.mark.parametrize("name", TORCH_BACKENDS)
def test_causal_is_aligned_to_the_last_key(name):
    query, key = torch.randn(1, 1, 2, 16), torch.randn(1, 1, 5, 16)
    value = torch.eye(5, 16)[None, None]  # the output is the row of weights
    with torch.no_grad():
        weights = attention(query, key, value, is_causal=True, backend=name)[0, 0, :, :5]
    assert (weights[0] > 0).tolist() == [True, True, True, True, False]
    assert (weights[1] > 0).all()


@pytest.mark.parametrize("name", TORCH_BACKENDS)
def test_a_window_counts_the_row_itself(name):
    value = torch.eye(5, 16)[None, None]
    query, key = torch.randn(1, 1, 5, 16), torch.randn(1, 1, 5, 16)
    with torch.no_grad():
        weights = attention(query, key, value, is_causal=True, window=2, backend=name)[0, 0, :, :5]
    assert (weights > 0).int().tolist() == [
        [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1],
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_no_keys_and_no_batch(name):
    query = torch.randn(1, 2, 3, 16, requires_grad=True)
    none = torch.randn(1, 2, 0, 16)
    out = attention(query, none, none, backend=name)
    assert out.shape == (1, 2, 3, 16)
    assert (out == 0).all()
    out.sum().backward()
    assert (query.grad == 0).all()
    empty = torch.randn(0, 2, 3, 16)
    assert attention(empty, empty, empty, backend=name).shape == (0, 2, 3, 16)


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_dropout_drops_and_keeps_the_mean(name):
    query = torch.zeros(1, 1, 4, 16)
    key, value = torch.zeros(1, 1, 2000, 16), torch.ones(1, 1, 2000, 16)
    out = attention(query, key, value, dropout_p=0.5, backend=name)
    assert out.std() > 0  # weights were dropped
    assert abs(out.mean() - 1.0) < 0.1  # and the kept ones scaled


def test_every_backend_is_named_in_the_capability_table():
    for name in ALL_BACKENDS:
        assert backend_of(name).name == name
        assert backend_of(name).table() is not None
