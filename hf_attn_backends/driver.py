"""What the NVIDIA driver says about its devices, without a CUDA context.

Read from the driver's own libraries (`cuDeviceGet*` and NVML need no context), so that asking a
question in the launcher of a distributed run takes no memory on GPU 0 in every rank. What cannot
be found out is the string `unknown: <why>`.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import NamedTuple


class Gpu(NamedTuple):
    """One visible GPU: its name and its compute capability."""

    name: str
    capability: tuple[int, int]


@lru_cache(maxsize=1)
def gpus() -> tuple[Gpu, ...] | str:
    """The visible GPUs in torch's order, or why they cannot be listed."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "unknown: no CUDA driver"
    count = ctypes.c_int(0)
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return "unknown: no CUDA device"
    found = []
    for index in range(count.value):
        handle, major, minor = ctypes.c_int(0), ctypes.c_int(0), ctypes.c_int(0)
        name = ctypes.create_string_buffer(256)
        cuda.cuDeviceGet(ctypes.byref(handle), index)
        cuda.cuDeviceGetName(name, 256, handle)
        cuda.cuDeviceGetAttribute(ctypes.byref(major), 75, handle)  # COMPUTE_CAPABILITY_MAJOR
        cuda.cuDeviceGetAttribute(ctypes.byref(minor), 76, handle)  # COMPUTE_CAPABILITY_MINOR
        found.append(Gpu(name.value.decode(), (major.value, minor.value)))
    return tuple(found) or "unknown: no CUDA device"


@lru_cache(maxsize=1)
def version() -> str:
    """The NVIDIA driver's version, from its management library."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return "unknown: no NVIDIA driver"
    text = ctypes.create_string_buffer(96)
    if nvml.nvmlInit_v2() != 0:
        return "unknown: the NVIDIA management library does not start"
    failed = nvml.nvmlSystemGetDriverVersion(text, 96) != 0
    nvml.nvmlShutdown()
    return "unknown: the NVIDIA management library does not say" if failed else text.value.decode()
