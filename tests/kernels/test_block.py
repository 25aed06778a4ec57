"""The block that a launch writes, against the parameters that the compiled kernels take."""

from __future__ import annotations

import ctypes
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hf_attn_backends.kernels import bound
from hf_attn_backends.kernels.block import Block, parameter_codes

PTX = """
.visible .entry attend(
	.param .u64 .ptr .global .align 16 attend_param_0,
	.param .u32 attend_param_1,
	.param .u64 .ptr .global .align 1 attend_param_2,
	.param .u32 attend_param_3,
	.param .f32 attend_param_4,
	.param .u64 .ptr .global .align 1 attend_param_5,
	.param .u64 .ptr .global .align 1 attend_param_6
)
{
	ret;
}
"""
CODES = "qiqif"


def compiled(ptx=PTX, **changes):
    facts = {"shared": 4096, "num_warps": 4, "launch_pdl": False, **changes}
    return SimpleNamespace(function=7, metadata=SimpleNamespace(**facts), asm={"ptx": ptx})


class Driver:
    """Stands in for libcuda: keeps what a launch was given."""

    def __init__(self):
        self.launches, self.answers, self.entered = [], [], []

    def cuLaunchKernelEx(self, config_at, function, pointers, extra):
        config = bound.LaunchConfig.from_address(config_at.value)
        sizes = (8, 4, 8, 4, 4, 8, 8)
        block = [ctypes.string_at(p, n) for p, n in zip(pointers, sizes, strict=True)]
        values = [struct.unpack(c, b)[0] for c, b in zip(CODES + "qq", block, strict=True)]
        attributes = []
        if config.count:
            attributes = list((ctypes.c_int * 3).from_address(config.attributes))
        self.launches.append(
            SimpleNamespace(
                function=function, grid=list(config.grid), block=list(config.block),
                shared=config.shared, stream=config.stream, values=values, attributes=attributes,
            )
        )  # fmt: skip
        return self.answers.pop(0) if self.answers else 0

    def cuDevicePrimaryCtxRetain(self, context, device):
        self.entered.append(("retain", device))
        return 0

    def cuCtxSetCurrent(self, context):
        self.entered.append("current")
        return 0

    def cuDevicePrimaryCtxRelease_v2(self, device):
        self.entered.append(("release", device))
        return 0


@pytest.fixture
def driver(monkeypatch):
    fake = Driver()
    monkeypatch.setattr(bound, "driver", lambda: fake)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    return fake


def test_every_value_lies_where_its_parameter_is(driver):
    block = Block.of(compiled(), CODES)
    block.launch(11, 5, 2, (1 << 40, -3, 1 << 41, 7, 0.25))
    block.launch(12, 6, 1, (16, 4, 32, 8, -1.0))
    first, second = driver.launches
    assert (first.grid, first.block, first.shared, first.stream) == (
        [5, 2, 1],
        [128, 1, 1],
        4096,
        11,
    )
    assert first.values == [1 << 40, -3, 1 << 41, 7, 0.25, 0, 0]
    assert (second.grid, second.stream) == ([6, 1, 1], 12)
    assert second.values == [16, 4, 32, 8, -1.0, 0, 0]
    assert first.function == 7
    assert first.attributes == []


def test_a_dependent_launch_says_so(driver):
    Block.of(compiled(launch_pdl=True), CODES).launch(1, 1, 1, (0, 0, 0, 0, 0.0))
    assert driver.launches[0].attributes == [6, 0, 1]  # the attribute, padding, its value


@pytest.mark.parametrize(
    ("codes", "changes"),
    [
        ("qiqii", {}), ("qiqi", {}), ("qiqiff", {}), (CODES, {"num_ctas": 2}),
        (CODES, {"global_scratch_size": 64}), (CODES, {"launch_cooperative_grid": True}),
    ],
)  # fmt: skip
def test_an_unknown_calling_convention_is_not_bound(codes, changes):
    assert Block.of(compiled(**changes), codes) is None


def test_a_descriptor_is_no_number():
    ptx = PTX.replace(".param .u32 attend_param_1", ".param .align 64 .b8 attend_param_1[128]")
    assert parameter_codes(ptx) == "q?qifqq"
    assert Block.of(compiled(ptx), CODES) is None


def test_a_thread_without_a_context_enters_that_of_the_current_device(driver):
    driver.answers = [201, 0]
    Block.of(compiled(), CODES).launch(1, 1, 1, (0, 0, 0, 0, 0.0))
    assert len(driver.launches) == 2
    assert driver.entered == [("retain", 3), "current", ("release", 3)]


def test_what_the_driver_refuses_is_raised_with_its_number(driver):
    driver.answers = [719]
    with pytest.raises(bound.DriverError, match="CUDA error 719"):
        Block.of(compiled(), CODES).launch(1, 1, 1, (0, 0, 0, 0, 0.0))
    assert driver.entered == []


def test_the_compiled_kernels_take_what_their_launches_write(tmp_path):
    """Compiled for sm_90, in a process without the interpreter."""
    from hf_attn_backends.kernels.triton import decode_work, forward

    script = Path(__file__).with_name("parameters_aot_compile.py")
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    scratch = "qq"
    assert found["forward"] == forward.CODES + scratch
    # The stride between a mask's keys is 1: a constant, and no parameter.
    assert found["forward, dense"] == forward.CODES[:9] + forward.CODES[10:] + scratch
    assert found["delta"] == "q" * 3 + "i" * 8 + scratch
    assert found["dkdv"] == "q" * 11 + "i" * 31 + "fff" + scratch
    assert found["dq"] == "q" * 10 + "i" * 28 + "fff" + scratch
    assert found["decode"] == decode_work.CODES + scratch
    assert found["combine"] == decode_work.COMBINE_CODES + scratch


@pytest.fixture
def launching(monkeypatch):
    """`launch_kernel` on CPU tensors: what went through Triton, and what a block was given."""
    from hf_attn_backends.kernels.triton import launch

    seen = SimpleNamespace(triton=[], blocks=[])

    class Kernel:
        def __getitem__(self, grid):
            def run(*arguments, **constants):
                seen.triton.append((grid, arguments, constants))
                return "compiled"

            return run

    class Kept:
        def launch(self, stream, programs, splits, values):
            seen.blocks.append((programs, values))

    def keep(which, compiled, codes):
        seen.codes = codes
        launch._BLOCKS[which] = Kept()

    monkeypatch.setattr(launch, "_BLOCKS", {})
    monkeypatch.setattr(launch, "keep_block", keep)
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(launch, "stream_of", lambda tensor: 5)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    seen.run = lambda tensors, strides, numbers, at=-1: launch.launch_kernel(
        Kernel(), ("name",), 9, launch.Arguments(tensors, strides, numbers, at), lambda: {"BM": 64}
    )
    return seen


def test_the_first_launch_is_tritons_and_the_next_a_blocks(launching):
    one, two = torch.zeros(64), torch.zeros(64)
    launching.run((one,), (64, 0), (3, 0.5))
    assert launching.triton == [((9,), (one, 64, 0, 3, 0.5), {"BM": 64})]
    assert launching.codes == "qiiif"
    launching.run((two,), (128, 16), (4, 1.5))
    assert len(launching.triton) == 1
    assert launching.blocks == [(9, (two.data_ptr(), 128, 16, 4, 1.5))]


def test_what_triton_would_compile_anew_goes_to_triton(launching):
    tensor = torch.zeros(64)
    launching.run((tensor,), (64, 0), (3, 0.5))
    for pointer, strides in ((tensor[1:], (64, 0)), (tensor, (64, 8)), (tensor, (1, 16)),
                             (tensor, (2**31, 16))):  # fmt: skip
        launching.run((pointer,), strides, (3, 0.5))
    assert len(launching.triton) == 5
    assert launching.blocks == []


def test_a_mask_whose_keys_lie_side_by_side_is_another_kernel(launching):
    tensor = torch.zeros(64)
    for between in (0, 1, 0, 1, 2, 2):
        launching.run((tensor,), (64,), (7, between, 3), 1)
    assert [arguments[2:] for _, arguments, _ in launching.triton] == [
        (7, 0, 3), (7, 1, 3), (7, 2, 3), (7, 2, 3),
    ]  # fmt: skip
    assert [values[1:] for _, values in launching.blocks] == [(64, 7, 0, 3), (64, 7, 3)]
    launching.run((tensor,), (64,), (2**31, 0, 3), 1)
    assert len(launching.triton) == 5
