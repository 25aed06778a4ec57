"""The host side of the backward with its kernels and the driver replaced: what is passed where."""

from __future__ import annotations

import contextlib
import inspect

import pytest
import torch

from hf_attn_backends.kernels.hopper import (
    backward,
    backward_first,
    backward_kernels,
    backward_passes,
    backward_plans,
    limits,
)
from hf_attn_backends.kernels.visibility import CAUSAL, FULL, Visibility

KERNELS = {
    "prepare": (backward_passes, "backward_prepare"),
    "hull": (backward_passes, "backward_hull"),
    "main": (backward_kernels, "attention_backward"),
    "finish": (backward_passes, "backward_finish"),
}


class Recorder:
    """Stands in for a kernel: notes grid and arguments by name."""

    def __init__(self, kernel, calls, name):
        signature = inspect.signature(kernel.fn)
        self.names, self.calls, self.name = list(signature.parameters), calls, name

    def __getitem__(self, grid):
        def launch(*arguments, **named):
            named = {k: v for k, v in named.items() if k not in backward_first.OPTIONS}
            assert len(arguments) + len(named) == len(self.names)
            self.calls.append(
                (self.name, grid[0], dict(zip(self.names, arguments, strict=False)) | named)
            )

        return launch


class FakePlan:
    """Stands in for a launch plan: notes programs and addresses."""

    def __init__(self, pointers, programs, calls):
        self.pointers, self.programs, self.calls = pointers, programs, calls

    def launch(self, stream, mapped, addresses):
        assert all(type(address) is int for address in (*mapped, *addresses))
        assert len(addresses) == self.pointers
        self.calls.append(("plan", self.programs, (*mapped, *addresses)))


@pytest.fixture
def calls(monkeypatch):
    """The launches of a test, with everything that needs a GPU replaced."""
    calls = []
    monkeypatch.setattr(limits, "environment_refusals", lambda device: [])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda i: 0, raising=False)
    monkeypatch.setattr(backward, "_PLANS", {})
    monkeypatch.setattr(backward_first, "_BOUND", {})
    monkeypatch.setattr(backward_first, "_descriptors", lambda tensors: list(tensors))
    for name, (module, attribute) in KERNELS.items():
        monkeypatch.setattr(module, attribute, Recorder(getattr(module, attribute), calls, name))

    bound = type("Bound", (), {"of": staticmethod(lambda kernel, scalars: None)})
    monkeypatch.setattr(backward_first, "BoundKernel", bound)
    monkeypatch.setattr(
        backward_first,
        "_plan",
        lambda bound, call: FakePlan(len(call.pointers), call.programs, calls),
    )
    return calls


def problem(m=100, n=300, d=128, heads=6, kv_heads=2):
    q, k, v, grad = (
        torch.randn(2, s, h, d).bfloat16().transpose(1, 2)
        for s, h in ((m, heads), (n, kv_heads), (n, kv_heads), (m, heads))
    )
    return grad, q, k, v, torch.zeros_like(q), torch.zeros(2, heads, m)


@pytest.mark.parametrize(("d", "rows"), [(64, 128), (128, 64)])
def test_arguments_of_the_first_launch(calls, d, rows):
    grad, q, k, v, out, lse = problem(d=d)
    grads = backward.launch_backward(grad, q, k, v, out, lse, CAUSAL, 0.5)
    assert [name for name, *_ in calls] == ["prepare", "main", "finish"]
    assert [tuple(g.shape) for g in grads] == [(2, 6, 100, d), (2, 2, 300, d), (2, 2, 300, d)]
    assert all(g.transpose(1, 2).is_contiguous() for g in grads)
    tiles = -(-100 // rows)
    prepare, main, finish = (arguments for _, _, arguments in calls)
    assert calls[0][1] == calls[2][1] == 2 * 6 * tiles
    assert calls[1][1] == 3 * 2 * 2
    assert prepare["out_ptr"] is out
    assert prepare["grad_ptr"] is grad
    assert [prepare[f"out_{x}"] * 8 for x in "bhm"] == list(out.stride()[:3])
    assert [prepare[f"grad_{x}"] * 8 for x in "bhm"] == list(grad.stride()[:3])
    assert [prepare[f"lse_{x}"] for x in "bhm"] == list(lse.stride())
    assert (prepare["heads"], prepare["m_len"], prepare["n_len"]) == (6, 100, 300)
    assert (prepare["BM"], prepare["D"], prepare["INTERVALS"]) == (rows, d, False)
    assert [main[x] for x in ("q_desc", "do_desc", "k_desc", "v_desc")] == [q, grad, k, v]
    assert main["dk_desc"] is grads[1]
    assert main["dv_desc"] is grads[2]
    assert main["stats_desc"].shape == (2 * 6 * tiles * 2, rows)
    assert main["dq_desc"].shape == (2 * 6 * tiles * 256, 32)
    assert main["scale"] == 0.5
    assert main["scale_log2"] == pytest.approx(0.5 * 1.4426950408889634)
    names = ("batch_kv", "kv_heads", "group", "m_len", "n_len", "m_tiles", "n_tiles", "window")
    assert [main[name] for name in names] == [4, 2, 3, 100, 300, tiles, 3, 0]
    assert finish["acc_ptr"].data_ptr() == prepare["acc_ptr"].data_ptr()
    assert finish["dq_ptr"] is grads[0]
    assert finish["scale"] == 0.5


@pytest.mark.parametrize("shared", [True, False])
def test_intervals_are_summarised_for_each_batch_entry(calls, shared):
    grad, q, k, v, out, lse = problem()
    bounds = torch.zeros(1 if shared else 2, 100, 2, dtype=torch.int32)
    backward.launch_backward(grad, q, k, v, out, lse, Visibility(intervals=bounds), 0.5)
    assert [name for name, *_ in calls] == ["prepare", "hull", "main", "finish"]
    hull = calls[1][2]
    assert hull["intervals_b"] == calls[0][2]["intervals_b"] == (0 if shared else 200)
    assert hull["hull_ptr"].shape == (2 * 2 * 3,)
    assert hull["tiles_ptr"].shape == (2 * 2 * 2,)
    assert calls[2][2]["stats_desc"].shape == (2 * 6 * 2 * 4, 64)


@pytest.mark.parametrize("kind", ["causal", "intervals"])
def test_later_launches_use_the_plan_and_pass_the_same_memory(calls, kind):
    grad, q, k, v, out, lse = problem()
    bounds = torch.zeros(1, 100, 2, dtype=torch.int32)
    visibility = CAUSAL if kind == "causal" else Visibility(intervals=bounds)
    call = (grad, q, k, v, out, lse, visibility, 0.5)
    backward.launch_backward(*call)
    calls.clear()
    dq, dk, dv = backward.launch_backward(*call)
    assert {name for name, *_ in calls} == {"plan"}
    prepare, *hull, main, finish = (addresses for _, _, addresses in calls)
    at = [t.data_ptr() for t in (q, grad, k, v)]
    stats, acc = prepare[4:]
    assert list(prepare[:3]) == [out.data_ptr(), grad.data_ptr(), lse.data_ptr()]
    assert list(main[:8]) == [*at, stats, acc, dk.data_ptr(), dv.data_ptr()]
    assert finish == (acc, dq.data_ptr())
    assert stats == acc + 4 * 2 * 6 * 2 * 8192
    if kind == "intervals":
        assert hull[0] == (bounds.data_ptr(), *main[8:])
        assert prepare[3] == bounds.data_ptr()


def test_another_stride_scale_or_window_is_another_plan(calls):
    grad, q, k, v, out, lse = problem()
    windowed = Visibility(causal=True, window=7)
    rows_last = [t.contiguous() for t in (grad, q, k, v, out)]
    variants = [
        (grad, q, k, v, out, lse, CAUSAL, 0.5),
        (grad, q, k, v, out, lse, CAUSAL, 0.25),
        (grad, q, k, v, out, lse, FULL, 0.5),
        (grad, q, k, v, out, lse, windowed, 0.5),
        (*rows_last, lse, CAUSAL, 0.5),
    ]
    for call in variants:
        backward.launch_backward(*call)
    assert len(backward._PLANS) == len(variants)


def test_an_expanded_gradient_is_copied_and_finds_its_plan_again(calls):
    grad, q, k, v, out, lse = problem()
    expanded = torch.ones(()).bfloat16().expand_as(grad)
    backward.launch_backward(expanded, q, k, v, out, lse, CAUSAL, 0.5)
    assert calls[1][2]["do_desc"].stride() == out.stride()
    calls.clear()
    backward.launch_backward(expanded, q, k, v, out, lse, CAUSAL, 0.5)
    assert {name for name, *_ in calls} == {"plan"}


def test_no_keys_is_zeros_without_a_launch(calls):
    grad, q, k, v, out, lse = problem()
    call = (grad, q, k[:, :, :0], v[:, :, :0], out, lse, FULL, 0.5)
    dq, dk, dv = backward.launch_backward(*call)
    assert not calls
    assert (dq == 0).all()
    assert dk.shape == dv.shape == (2, 2, 0, 128)


def test_unwanted_gradients_come_back_empty(calls):
    call = (*problem(), CAUSAL, 0.5)
    sizes = [t.numel() for t in backward.launch_backward(*call, need_dq=False)]
    assert sizes[0] == 0
    assert min(sizes[1:]) > 0
    sizes = [t.numel() for t in backward.launch_backward(*call, need_dkdv=False)]
    assert sizes[0] > 0
    assert sizes[1:] == [0, 0]


def test_room_for_the_sum_of_dq_is_what_flash_takes():
    _, q, k, *_ = problem(m=4096, n=4096, d=128)
    room = backward_plans.Room.of(q, k, "causal")
    assert room.acc == 2 * 6 * 4096 * 128
    assert sum(room) <= 1.02 * room.acc
