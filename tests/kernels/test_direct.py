"""Eager calls that pass the dispatcher by: when they do, and that nothing is lost on the way."""

import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_attn_backends import witness
from hf_attn_backends.kernels import counted, direct
from hf_attn_backends.kernels.ops import triton_attention, triton_attention_with_lse
from hf_attn_backends.kernels.visibility import CAUSAL, FULL, Visibility

FORWARD, BACKWARD = "hf_attn_backends.attention_forward", "hf_attn_backends.attention_backward"


@pytest.fixture
def leaves(kernel_device):
    torch.manual_seed(1)
    return [
        torch.randn(1, heads, 9, 16, device=kernel_device, requires_grad=True)
        for heads in (4, 2, 2)
    ]  # fmt: skip


class Seen(TorchDispatchMode):
    """The names of the operators that were called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function).removesuffix(".default"))
        return function(*args, **(kwargs or {}))


def grads(leaves, **options):
    return torch.autograd.grad(triton_attention(*leaves, CAUSAL, **options).square().sum(), leaves)


def test_the_direct_way_and_the_operator_give_the_same(leaves):
    assert direct.possible(*leaves)
    want = grads(leaves)
    with Seen() as seen:
        got = grads(leaves)
    assert FORWARD in seen.names
    assert BACKWARD in seen.names
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)


def test_a_backward_pass_alone_is_seen_by_a_mode(leaves):
    out = triton_attention(*leaves, CAUSAL)  # directly
    with Seen() as seen:
        torch.autograd.grad(out.sum(), leaves)
    assert BACKWARD in seen.names


def test_a_profiler_sees_the_operators_by_name(leaves):
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as found:
        grads(leaves)
    names = {event.key for event in found.key_averages()}
    assert {FORWARD.replace(".", "::"), BACKWARD.replace(".", "::")} <= names


class Wrapped(torch.Tensor):
    """A subclass without a meaning of its own."""


def test_what_is_no_plain_tensor_goes_through_the_dispatcher(leaves):
    query, key, value = (leaf.detach() for leaf in leaves)
    assert direct.possible(query, key, value)
    assert not direct.possible(query.as_subclass(Wrapped), key, value)
    assert not direct.possible(query, key, value.as_subclass(Wrapped))
    negative = torch.view_as_complex(torch.randn(1, 4, 9, 16, 2)).conj().imag
    assert negative.is_neg()
    assert not direct.possible(negative, key, value)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert direct.possible(query, key, value)  # a context, and no mode
    with torch.device("cpu"):  # a mode over functions
        assert not direct.possible(query, key, value)
    inside = []
    torch.vmap(lambda x: inside.append(direct.possible(x, key, value)) or x)(query[None])
    assert inside == [False]


def test_negated_values_are_read_negated(leaves):
    query, key, value = (leaf.detach() for leaf in leaves)
    lazy = torch.view_as_complex(torch.randn(1, 4, 9, 16, 2)).conj().imag.to(query.device)
    want = triton_attention(lazy.resolve_neg().contiguous(), key, value, CAUSAL)
    assert torch.equal(triton_attention(lazy, key, value, CAUSAL), want)


def test_a_second_derivative_is_refused(leaves):
    out = triton_attention(*leaves, CAUSAL)
    first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
    for one, want in zip(first, grads(leaves), strict=True):
        assert torch.equal(one.detach(), want)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        first[0].sum().backward()


def test_batched_gradients(leaves):
    out = triton_attention(*leaves, CAUSAL)
    weights = torch.randn(3, *out.shape, device=out.device)
    got = torch.autograd.grad(out, leaves, weights, is_grads_batched=True, retain_graph=True)
    want = [torch.autograd.grad(out, leaves, weight, retain_graph=True) for weight in weights]
    for one, others in zip(got, zip(*want, strict=True), strict=True):
        assert torch.equal(one, torch.stack(others))


def test_compiled_autograd(leaves):
    want = grads(leaves)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        triton_attention(*leaves, CAUSAL).square().sum().backward()
    for leaf, other in zip(leaves, want, strict=True):
        assert torch.equal(leaf.grad, other)
    torch._dynamo.reset()


def test_a_mask_that_is_written_to_before_the_backward_pass_is_noticed(leaves):
    rows = torch.tensor([[[0, n + 1] for n in range(9)]], dtype=torch.int32).to(leaves[0].device)
    want = grads_of(leaves, Visibility(intervals=rows))
    out = triton_attention(*leaves, Visibility(intervals=rows))
    rows[..., 1] = 9
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out.sum(), leaves)
    assert not torch.equal(grads_of(leaves, Visibility(intervals=rows))[0], want[0])


def grads_of(leaves, visibility):
    return torch.autograd.grad(triton_attention(*leaves, visibility).square().sum(), leaves)


def test_hooks_on_saved_tensors_get_every_tensor(leaves):
    dense = torch.rand(1, 1, 9, 9, device=leaves[0].device) > 0.4
    want, packed = grads_of(leaves, Visibility(dense=dense)), []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: packed.append(t.dtype) or t.clone(), lambda t: t
    ):
        out = triton_attention(*leaves, Visibility(dense=dense))
        loss = out.square().sum()
    got = torch.autograd.grad(loss, leaves)
    assert torch.bool in packed
    assert packed.count(torch.float32) >= 5  # query, key, value, out, lse
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)


def test_the_log_sum_exp_comes_directly_too(leaves):
    query, key, value = (leaf.detach() for leaf in leaves)
    out, lse = triton_attention_with_lse(query, key, value, CAUSAL)
    with Seen() as seen:
        want = triton_attention_with_lse(query, key, value, CAUSAL)
    assert seen.names.count(FORWARD) == 1
    assert torch.equal(out, want[0])
    assert torch.equal(lse, want[1])


class Bound:
    """Stands in for a variant that binds its launches, and counts what it was asked for."""

    def __init__(self):
        self.launched, self.bound = 0, 0

    def launch(self, query, key, value, visibility, scale, **features):
        self.launched += 1
        return query * scale, query[..., 0]

    def bind(self, query, key, value, visibility, scale):
        def lane(query, key, value, visibility):
            self.bound += 1
            return query * scale, query[..., 0]

        return lane


@pytest.fixture
def bound(monkeypatch):
    from hf_attn_backends.kernels import variants

    found = Bound()
    variant = variants.Variant("triton", found.launch, found.bind)
    monkeypatch.setattr(variants, "_portable", lambda phase: variant)
    monkeypatch.setattr(variants, "_resolved", {})
    monkeypatch.setattr(counted, "_lanes", {})
    return found


def test_a_layout_that_was_seen_is_launched_by_its_lane(bound, kernel_device):
    query, key = torch.randn(2, 4, 40, 16), torch.randn(2, 2, 40, 16)
    query, key = query.to(kernel_device), key.to(kernel_device)
    options = {"variant": "triton", "backend": "lanes"}
    before = witness.snapshot()
    for _ in range(4):
        out = triton_attention(query, key, key, CAUSAL, scale=0.5, **options)
    assert torch.equal(out, query * 0.5)
    assert (bound.launched, bound.bound) == (2, 2)  # bound when it came again
    assert [n for k, n in witness.since(before).items() if k.backend == "lanes"] == [4]
    others = [
        (query, key, CAUSAL, 0.25), (query, key, FULL, 0.5), (query[:1], key[:1], CAUSAL, 0.5),
        (query.transpose(1, 2).contiguous().transpose(1, 2), key, CAUSAL, 0.5),
        (query.bfloat16(), key.bfloat16(), CAUSAL, 0.5),
        (query, key, Visibility(causal=True, window=3), 0.5),
    ]  # fmt: skip
    for n, (q, k, visibility, scale) in enumerate(others):
        out = triton_attention(q, k, k, visibility, scale=scale, **options)
        assert torch.equal(out, q * scale)
        assert (bound.launched, bound.bound) == (3 + n, 2)
    memory = torch.randn(query.numel() + 1, device=kernel_device)
    odd = memory[1:].view(query.shape)
    for _ in range(2):  # another alignment may be another variant's
        triton_attention(odd, key, key, CAUSAL, scale=0.5, **options)
    assert (bound.launched, bound.bound) == (10, 2)


def test_the_layers_of_a_step_of_decoding_share_a_lane(bound, kernel_device):
    query = torch.randn(1, 4, 1, 16, device=kernel_device)
    for length in (40, 41, 41, 41, 41):
        key = torch.randn(1, 2, length, 16, device=kernel_device)
        triton_attention(query, key, key, FULL, variant="triton")
    assert (bound.launched, bound.bound) == (3, 2)


def test_the_layout_of_a_mask_is_part_of_a_lane(bound, kernel_device):
    query = torch.randn(2, 4, 8, 16, device=kernel_device)
    rows = torch.zeros(2, 8, 2, dtype=torch.int32, device=kernel_device)
    seen = torch.ones(2, 1, 8, 8, dtype=torch.bool, device=kernel_device)
    masks = [{"intervals": rows}, {"intervals": rows[:1]}, {"dense": seen}, {"dense": seen.mT}]
    for n, mask in enumerate(masks):
        for _ in range(3):
            triton_attention(query, query, query, Visibility(**mask), variant="triton")
        assert (bound.launched, bound.bound) == (2 * n + 2, n + 1)


def test_lanes_are_bounded(bound, monkeypatch, kernel_device):
    monkeypatch.setattr(counted, "_LANES_KEPT", 3)
    query = torch.randn(1, 2, 8, 16, device=kernel_device)
    for length in range(8, 20):
        triton_attention(query, *[query.new_ones(1, 2, length, 16)] * 2, FULL, variant="triton")
        assert len(counted._lanes) <= 3


def test_a_variant_that_cannot_bind_keeps_its_choice(bound, monkeypatch, kernel_device):
    monkeypatch.setattr(bound, "bind", lambda *call: None)
    from hf_attn_backends.kernels import variants

    variant = variants.Variant("triton", bound.launch, bound.bind)
    monkeypatch.setattr(variants, "_portable", lambda phase: variant)
    query = torch.randn(1, 2, 8, 16, device=kernel_device)
    for _ in range(4):
        out = triton_attention(query, query, query, FULL, scale=0.5, variant="triton")
        assert torch.equal(out, query * 0.5)
    assert (bound.launched, bound.bound) == (4, 0)
    assert len(counted._lanes) == 1


def test_every_thread_counts(bound, leaves):
    before = witness.snapshot()
    tensors = [leaf.detach() for leaf in leaves]

    def work():
        for _ in range(50):
            triton_attention(*tensors, FULL, backend="threads", variant="triton")

    threads = [threading.Thread(target=work) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert sum(n for k, n in witness.since(before).items() if k.backend == "threads") == 200
