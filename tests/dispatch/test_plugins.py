"""Third parties: subclass, instance, registration, refusals, counts."""

from __future__ import annotations

import pytest
import torch

from hf_attn_backends import witness
from hf_attn_backends.backends import (
    AttentionBackend,
    AttentionBackendFactory,
    Capability,
    SdpaBackend,
)
from hf_attn_backends.backends.factory import forget_registered
from hf_attn_backends.dispatch import attention, attn_backend, get_backend
from hf_attn_backends.errors import (
    CallError,
    CallRefusedError,
    RegistrationError,
    UnknownBackendError,
)


@pytest.fixture(autouse=True)
def _fresh():
    witness.reset()
    yield
    forget_registered()
    witness.reset()


@pytest.fixture
def qkv():
    return [torch.randn(1, 1, 3, 8) for _ in range(3)]


class Mean(AttentionBackend):
    """Every row is the mean of the values: told from attention at once."""

    name = "mean"

    def refusals(self, call):
        return [] if call.visibility == "full" else ["mean sees every key"]

    def forward(self, query, key, value, call, **kwargs):
        return value.mean(2, keepdim=True).expand(-1, -1, query.shape[2], -1)


def test_a_subclass_by_decorator_serves_and_is_counted(qkv, monkeypatch):
    AttentionBackendFactory.register("mean")(Mean)
    assert "mean" in AttentionBackendFactory.list_registered()
    assert isinstance(AttentionBackendFactory.create("mean"), Mean)
    want = qkv[2].mean(2, keepdim=True).expand(-1, -1, 3, -1)
    assert torch.equal(attention(*qkv, backend="mean"), want)
    with attn_backend("mean"):
        assert torch.equal(attention(*qkv), want)
    monkeypatch.setenv("HF_ATTN_BACKEND", "mean")
    assert torch.equal(attention(*qkv), want)
    counted = {(n.backend, n.variant): c for n, c in witness.snapshot().items()}
    assert counted == {("mean", "plugin"): 3}


def test_its_refusals_are_heard(qkv, monkeypatch):
    AttentionBackendFactory.register("mean", Mean)
    with pytest.raises(CallRefusedError, match="'mean' cannot serve this call: mean sees every"):
        attention(*qkv, backend="mean", is_causal=True)
    monkeypatch.setenv("HF_ATTN_BACKEND", "mean")
    attention(*qkv, is_causal=True)
    assert witness.substitutions() == {("mean", "sdpa", "float32/d8/causal"): 1}


def test_a_bare_instance_needs_no_registration(qkv):
    instance = Mean()
    with attn_backend(instance):
        assert get_backend() is instance
        attention(*qkv)
    attention(*qkv, backend=instance)
    assert sum(witness.snapshot().values()) == 2
    with pytest.raises(UnknownBackendError):
        attention(*qkv, backend="mean")


def test_an_instance_can_be_registered_and_stays_itself(qkv):
    instance = Mean()
    AttentionBackendFactory.register("mean", instance)
    assert AttentionBackendFactory.create("mean") is instance
    with attn_backend("mean"):
        assert get_backend() is instance


def test_its_backward_is_counted(qkv):
    leaves = [t.requires_grad_() for t in qkv]
    attention(*leaves, backend=Mean).sum().backward()
    assert [(n.phase, c) for n, c in witness.snapshot().items()] == [
        ("forward", 1), ("backward", 1),
    ]  # fmt: skip


def test_a_capability_row_and_availability_of_its_own(qkv):
    class Narrow(Mean):
        name = "narrow"
        capability = Capability(dtypes=("float16",))
        refusals = AttentionBackend.refusals

    with pytest.raises(CallRefusedError, match="narrow computes in float16"):
        attention(*qkv, backend=Narrow)

    class Off(Mean):
        name = "off"

        def available(self):
            return False

    with pytest.raises(CallRefusedError, match="off says that it is not available"):
        attention(*qkv, backend=Off())


def test_what_cannot_be_registered_says_why():
    class Nameless(Mean):
        name = ""

    class Half(AttentionBackend):
        name = "half"

    cases = [
        ("sdpa", SdpaBackend, "belongs to the package's own"),
        ("other", Mean, "`name` must be 'other', got 'mean'"),
        ("nameless", Nameless, "must be 'nameless', got ''"),
        ("half", Half, "must implement forward"),
        ("int", int, "must be an AttentionBackend subclass"),
    ]
    for name, source, text in cases:
        with pytest.raises(RegistrationError, match=text):
            AttentionBackendFactory.register(name, source)
    AttentionBackendFactory.register("mean", Mean)
    AttentionBackendFactory.register("mean", Mean)  # again is no conflict
    with pytest.raises(RegistrationError, match="taken by"):
        AttentionBackendFactory.register("mean", type("Mean2", (Mean,), {}))


class Broken(Mean):
    name = "broken"


def raising(*_: object):
    raise OSError("boom")


@pytest.mark.parametrize(
    ("method", "answer", "says"),
    [
        ("available", raising, "whether broken is available raised OSError: boom"),
        ("available", lambda self: "maybe", "broken's available.. must say True or False, "),
        ("refusals", raising, "whether broken can serve this call raised OSError: boom"),
        ("refusals", lambda self, call: None, "broken's refusals.. must give texts, got None"),
        ("refusals", lambda self, call: "no", "broken's refusals.. must give texts, got 'no'"),
    ],
)
def test_nonsense_from_a_plug_in_is_a_reason_against_it(method, answer, says, qkv, monkeypatch):
    monkeypatch.setattr(Broken, method, answer, raising=False)
    with pytest.raises(CallRefusedError, match=says):
        attention(*qkv, backend=Broken())
    AttentionBackendFactory.register("broken", Broken())
    monkeypatch.setenv("HF_ATTN_BACKEND", "broken")
    attention(*qkv)
    assert witness.substitutions() == {("broken", "sdpa", "float32/d8/full"): 1}


@pytest.mark.parametrize(
    ("out", "got"),
    [
        (lambda q: q[:, :, :1], r"shape \(1, 1, 1, 8\)"),
        (lambda q: 3, "int"),
        (lambda q: None, "NoneType"),
    ],
)
def test_a_result_that_is_none_is_an_error_that_names_the_plug_in(out, got, qkv, monkeypatch):
    monkeypatch.setattr(Broken, "forward", lambda self, query, *_, **__: out(query))
    with pytest.raises(CallError, match=f"'broken' must return .* got {got}"):
        attention(*qkv, backend=Broken())
