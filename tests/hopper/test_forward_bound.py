"""The parameter block that a plan writes, against the layout that the PTX declares."""

from __future__ import annotations

import ctypes
import struct
from types import SimpleNamespace

import pytest

from hf_attn_backends.kernels import bound

PTX = """
.visible .entry attend(
	.param .align 64 .b8 attend_param_0[128],
	.param .u32 attend_param_1,
	.param .u32 attend_param_2,
	.param .u64 attend_param_3,
	.param .u64 attend_param_4,
	.param .u64 .ptr .global .align 1 attend_param_5,
	.param .f32 attend_param_6,
	.param .u32 attend_param_7,
	.param .u64 .ptr .global .align 1 attend_param_8,
	.param .u64 .ptr .global .align 1 attend_param_9
)
.reqntid 384
{
	ret;
}
"""
DESCRIPTOR = {"swizzle": 3, "elem_size": 2, "block_size": [64, 64]}


def compiled(**changes):
    facts = {"shared": 1000, "num_warps": 12, "tensordesc_meta": [DESCRIPTOR], **changes}
    return SimpleNamespace(function=7, metadata=SimpleNamespace(**facts), asm={"ptx": PTX})


class Driver:
    """Stands in for libcuda: keeps what a launch was given."""

    def __init__(self):
        self.encoded, self.launches, self.status = [], [], 0

    def cuTensorMapEncodeTiled(self, place, kind, rank, address, shape, strides, box, steps, *_):
        self.encoded.append(
            (kind, rank, address, list(shape), list(strides)[: rank - 1], list(box))
        )
        ctypes.memset(place, address & 0xFF, 128)
        return 0

    def cuLaunchKernelEx(self, config_at, function, pointers, extra):
        config = bound.LaunchConfig.from_address(config_at.value)
        sizes = [128, 4, 4, 8, 8, 8, 4, 4, 8, 8]
        block = [ctypes.string_at(p, n) for p, n in zip(pointers, sizes, strict=True)]
        head = (function, *config.grid, *config.block, config.shared, config.stream)
        assert (config.attributes, config.count) == (None, 0)
        self.launches.append((head, block))
        assert pointers[0] % 64 == 0
        return self.status


@pytest.fixture
def driver(monkeypatch):
    fake = Driver()
    monkeypatch.setattr(bound, "driver", lambda: fake)
    return fake


def a_plan():
    kernel = bound.BoundKernel.of(compiled(), scalars=3)
    entry = bound.Map(9, 3, (10, 128), (136, 1), (64, 64), 2)
    return bound.Plan(kernel, [entry], (None, 0.5, -3), 132)


def test_parameter_sizes_reads_every_parameter():
    assert bound.parameter_sizes(PTX) == [
        (128, 64), (4, 4), (4, 4), (8, 8), (8, 8), (8, 8), (4, 4), (4, 4), (8, 8), (8, 8),
    ]  # fmt: skip


def test_a_launch_writes_maps_shapes_strides_scalars_and_addresses(driver):
    a_plan().launch(99, (0x1110,), (0x2220,))
    head, block = driver.launches[0]
    assert head == (7, 132, 1, 1, 384, 1, 1, 1000, 99)
    assert block[0] == bytes([0x10]) * 128
    assert [struct.unpack("i", b)[0] for b in block[1:3]] == [10, 128]
    assert [struct.unpack("q", b)[0] for b in block[3:6]] == [136, 1, 0x2220]
    assert struct.unpack("f", block[6])[0] == 0.5
    assert struct.unpack("i", block[7])[0] == -3
    assert block[8] == block[9] == bytes(8)


def test_the_launch_configuration_has_the_drivers_layout():
    assert bound.LaunchConfig.stream.offset == 32
    assert ctypes.sizeof(bound.LaunchConfig) == 56


def test_addresses_are_written_anew_only_where_they_change(driver):
    plan = a_plan()
    for mapped, other in ((0x10, 1), (0x10, 2), (0x20, 2), (0x10, 1)):
        plan.launch(0, (mapped,), (other,))
    seen = [(block[0][0], struct.unpack("q", block[5])[0]) for _, block in driver.launches]
    assert seen == [(0x10, 1), (0x10, 2), (0x20, 2), (0x10, 1)]


def test_a_map_is_encoded_innermost_first_and_once_for_each_address(driver):
    plan = a_plan()
    for address in (0x10, 0x20, 0x10):
        plan.launch(0, (address,), (0,))
    assert driver.encoded[0] == (9, 2, 0x10, [128, 10], [272], [64, 64])
    assert [e[2] for e in driver.encoded] == [0x10, 0x20]
    assert driver.launches[2][1][0] == bytes([0x10]) * 128


def test_a_refused_launch_raises(driver):
    driver.status = 700
    with pytest.raises(bound.DriverError, match="700"):
        a_plan().launch(0, (0x10,), (0,))


@pytest.mark.parametrize(
    "changes", [{"global_scratch_size": 128}, {"launch_pdl": True}, {"num_ctas": 2}]
)
def test_an_unknown_calling_convention_is_not_bound(changes):
    assert bound.BoundKernel.of(compiled(**changes), scalars=3) is None


def test_a_different_number_of_arguments_is_not_bound():
    assert bound.BoundKernel.of(compiled(), scalars=4) is None
    assert bound.BoundKernel.of(compiled(tensordesc_meta=[]), scalars=3) is None
