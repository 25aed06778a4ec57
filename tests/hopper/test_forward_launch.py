"""What a call of the sm_90 forward hands to the driver, with a stand-in for the driver."""

from __future__ import annotations

import contextlib
import ctypes
import struct
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_attn_backends.kernels import bound
from hf_attn_backends.kernels.hopper import forward, limits
from hf_attn_backends.kernels.visibility import CAUSAL, Visibility

ROWS = (64, 128, 128, 64)
DESCRIPTOR = [".align 64 .b8 {}[128]", *[".u32 {}"] * 4, *[".u64 {}"] * 4]
PARAMETERS = [
    *DESCRIPTOR * 4,
    ".u64 {}",
    ".u64 {}",
    ".f32 {}",
    *[".u32 {}"] * 10,
    *[".u64 {}"] * 5,
    ".u64 {}",
    ".u64 {}",
]
PTX = ".visible .entry attention_forward(\n{}\n)\n".format(
    ",\n".join("\t.param " + line.format(f"p_{n}") for n, line in enumerate(PARAMETERS))
)


@pytest.fixture
def launches(monkeypatch):
    """The arguments behind the descriptors, of every launch; CPU tensors pass for Hopper's."""
    seen = []

    def encode(place, *_):
        ctypes.memset(place, 1, 128)
        return 0

    def launch(config, function, pointers, extra):
        sizes = bound.parameter_sizes(PTX)
        block = [ctypes.string_at(p, n) for p, (n, _) in zip(pointers, sizes, strict=True)]
        tail = block[len(DESCRIPTOR) * 4 :]
        numbers = [struct.unpack("i", b)[0] for b in tail[3:13]]
        dividers = [struct.unpack("q", b)[0] for b in tail[13:18]]
        addresses = [struct.unpack("q", b)[0] for b in tail[:2]]
        shapes = [
            [struct.unpack("i", b)[0] for b in block[9 * n + 1 : 9 * n + 5]] for n in range(4)
        ]
        strides = [
            [struct.unpack("q", b)[0] for b in block[9 * n + 5 : 9 * n + 9]] for n in range(4)
        ]
        grid = bound.LaunchConfig.from_address(config.value).grid[0]
        seen.append(
            SimpleNamespace(
                addresses=addresses,
                scale=struct.unpack("f", tail[2])[0],
                numbers=numbers,
                dividers=dividers,
                shapes=shapes,
                strides=strides,
                grid=grid,
            )
        )
        return 0

    driver = SimpleNamespace(cuTensorMapEncodeTiled=encode, cuLaunchKernelEx=launch)
    monkeypatch.setattr(bound, "driver", lambda: driver)
    monkeypatch.setattr(limits, "environment_refusals", lambda device: [])
    monkeypatch.setattr(forward, "device_facts", lambda index: ((9, 0), 132))
    monkeypatch.setattr(forward, "_PLANS", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 5, raising=False)
    meta = SimpleNamespace(
        shared=1,
        num_warps=12,
        tensordesc_meta=[
            {"swizzle": 3, "elem_size": 2, "block_size": [1, 1, rows, 64]} for rows in ROWS
        ],
    )
    kernel = bound.BoundKernel.of(
        SimpleNamespace(function=1, metadata=meta, asm={"ptx": PTX}), scalars=18
    )
    kernels = {
        (torch.bfloat16, 128, kind, None, True, True): kernel
        for kind in ("causal", "window", "intervals")
    }
    monkeypatch.setattr(forward, "_KERNELS", kernels)
    return seen


def qkv(batch=2, heads=8, kv_heads=2, m=300, n=500):
    q = torch.zeros(batch, m, heads, 128, dtype=torch.bfloat16).transpose(1, 2)
    k = torch.zeros(batch, n, kv_heads, 128, dtype=torch.bfloat16).transpose(1, 2)
    return q, k, k.clone()


def test_every_number_reaches_its_parameter(launches):
    q, k, v = qkv()
    out, lse = forward.launch_forward(q, k, v, Visibility(causal=True, window=77), 0.5)
    (call,) = launches
    # B*H, H, M, N, window, tiles a head, heads a section, sections, batch stride, tiles for all
    assert call.numbers == [16, 8, 300, 500, 77, 3, 4, 4, 0, 1]
    # tiles a section, heads a section, heads of the last one, H, H/G
    assert call.dividers == [forward.inverse(number) for number in (12, 4, 4, 8, 4)]
    assert call.scale == pytest.approx(0.5 * 1.4426950408889634)
    assert call.grid == 48
    assert call.addresses == [lse.data_ptr(), lse.data_ptr()]
    assert call.shapes == [list(t.shape) for t in (q, k, v, out)]
    assert call.strides == [list(t.stride()) for t in (q, k, v, out)]
    assert out.transpose(1, 2).is_contiguous()
    assert lse.shape == (2, 8, 300)


def test_intervals_come_with_their_batch_stride(launches):
    q, k, v = qkv()
    for batch, stride in ((2, 600), (1, 0)):
        intervals = torch.zeros(batch, 300, 2, dtype=torch.int32)
        forward.launch_forward(q, k, v, Visibility(intervals=intervals), 0.5)
        assert launches[-1].addresses[1] == intervals.data_ptr()
        assert launches[-1].numbers[8] == stride


def test_a_call_seen_before_makes_no_plan(launches):
    q, k, v = qkv()
    for _ in range(3):
        forward.launch_forward(q, k, v, CAUSAL, 0.5)
    assert len(launches) == 3
    assert len(forward._PLANS) == 1
    forward.launch_forward(*qkv(m=301), CAUSAL, 0.5)
    assert len(forward._PLANS) == 2
    assert len(forward._KERNELS) == 3  # and nothing was compiled


def test_a_misaligned_tensor_is_refused_though_its_plan_is_known(launches):
    q, k, v = qkv()
    forward.launch_forward(q, k, v, CAUSAL, 0.5)
    memory = torch.zeros(q.numel() + 1, dtype=torch.bfloat16)[1:]
    odd = memory.view(2, 300, 8, 128).transpose(1, 2)
    with pytest.raises(forward.CallRefusedError, match="16 bytes"):
        forward.launch_forward(odd, k, v, CAUSAL, 0.5)


def test_no_keys_and_no_rows_launch_nothing(launches):
    q, k, v = qkv()
    out, lse = forward.launch_forward(q, k[:, :, :0], v[:, :, :0], CAUSAL, 0.5)
    assert (out == 0).all()
    assert (lse == float("-inf")).all()
    assert forward.launch_forward(q[:, :, :0], k, v, CAUSAL, 0.5)[0].shape == (2, 8, 0, 128)
    assert launches == []


class Allocations(TorchDispatchMode):
    """Bytes of the tensors that have memory, made while it is on."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.device.type != "meta":
            self.bytes += made.numel() * made.element_size()
        return made


def test_binding_takes_no_memory_and_a_bound_launch_only_its_results(launches):
    q, k, v = qkv()
    out, lse = forward.launch_forward(q, k, v, CAUSAL, 0.5)
    with Allocations() as binding:
        launch = forward.bind(q, k, v, CAUSAL, 0.5)
    with Allocations() as running:
        again, sums = launch(q, k, v, CAUSAL)
    assert binding.bytes == 0
    assert running.bytes == out.numel() * 2 + lse.numel() * 4
    assert (again.shape, again.stride(), sums.shape) == (out.shape, out.stride(), lse.shape)
