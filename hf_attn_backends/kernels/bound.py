"""Launching a compiled kernel with the least host work.

Triton's own launch costs 11 us and more: it specialises every argument again and encodes every
tensor map again. A `Plan` does that once for one set of shapes and strides: it holds the kernel's
whole parameter block, and a launch writes into it only what can differ between two calls (the
addresses), then calls the driver. Tensor maps are kept by address. (`block` is for kernels whose
numbers change from call to call.)

The parameter block is laid out from the compiled PTX, so a change of Triton's calling convention
is noticed (`BoundKernel.of` answers None) instead of launching garbage.
"""

from __future__ import annotations

import ctypes
import re
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hf_attn_backends.errors import AttentionBackendError

_ENTRY = re.compile(r"\.visible \.entry \w+\((.*?)\)", re.DOTALL)
_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr\s+.*?)?\w+(?:\[(\d+)\])?\s*(?:,|$)"
)
_SIZES = {"u64": 8, "s64": 8, "b64": 8, "u32": 4, "s32": 4, "b32": 4, "f32": 4}
_INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_MAP_BYTES = 128  # sizeof(CUtensorMap)
_MAPS_KEPT = 256
_ELEMENT_TYPES = {"torch.bfloat16": 9, "torch.float16": 6, "torch.float32": 7}  # CUtensorMap*
_L2_PROMOTION = 2  # 128 bytes, as Triton does


class DriverError(AttentionBackendError, RuntimeError):
    """The CUDA driver refused a tensor map or a launch."""


class LaunchConfig(ctypes.Structure):
    """`CUlaunchConfig`."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    )


@lru_cache(maxsize=1)
def driver() -> ctypes.CDLL:
    """The CUDA driver, with the functions that launches need."""
    library = ctypes.CDLL("libcuda.so.1")
    u32, pointer = ctypes.c_uint32, ctypes.c_void_p
    library.cuDevicePrimaryCtxRetain.argtypes = [pointer, ctypes.c_int]
    library.cuDevicePrimaryCtxRelease_v2.argtypes = [ctypes.c_int]
    library.cuCtxSetCurrent.argtypes = [pointer]
    library.cuLaunchKernelEx.argtypes = [pointer] * 4
    library.cuTensorMapEncodeTiled.argtypes = [
        pointer, u32, u32, pointer, pointer, pointer, pointer, pointer, u32, u32, u32, u32,
    ]  # fmt: skip
    return library


def launch(config_at: object, function: int, pointers: object) -> None:
    """Launch on the current device.

    PyTorch makes a device's context current in a thread when it first calls the runtime there. A
    thread (autograd's, a server's) whose memory came out of the caching allocator has not done so.

    Raises:
        DriverError: The driver refused.
    """
    status = driver().cuLaunchKernelEx(config_at, function, pointers, None)
    if status == _INVALID_CONTEXT:
        _enter_context(torch.cuda.current_device())
        status = driver().cuLaunchKernelEx(config_at, function, pointers, None)
    if status:
        raise DriverError(f"cuLaunchKernelEx failed with CUDA error {status}")


def _enter_context(device: int) -> None:
    """Make a device's primary context, which PyTorch holds, current in this thread."""
    context = ctypes.c_void_p()
    status = driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    if not status:
        status = driver().cuCtxSetCurrent(context)
        driver().cuDevicePrimaryCtxRelease_v2(device)
    if status:
        raise DriverError(f"entering the context of cuda:{device} failed with CUDA error {status}")


def parameters(ptx: str) -> list[tuple[str, str, str]]:
    """Alignment, type and number of elements (or "") of every parameter of a PTX kernel."""
    entry = _ENTRY.search(ptx)
    return _PARAMETER.findall(entry[1] if entry else "")


def parameter_sizes(ptx: str) -> list[tuple[int, int]]:
    """Size and alignment in bytes of every parameter of a PTX kernel."""
    found = []
    for align, kind, count in parameters(ptx):
        size = int(count) if count else _SIZES[kind]
        found.append((size, int(align) if align else size))
    return found


@dataclass(frozen=True, slots=True)
class Map:
    """How one tensor map is encoded, everything but the address.

    Attributes:
        element_type: `CUtensorMapDataType`.
        swizzle: `CUtensorMapSwizzle`.
        shape, strides, box: Outermost dimension first; strides in elements.
        element_size: In bytes.
    """

    element_type: int
    swizzle: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_size: int

    @classmethod
    def of(cls, tensor: Tensor, strides: Sequence[int], metadata: dict) -> Map:
        """The map of `tensor` for a descriptor argument with Triton's `metadata`."""
        return cls(
            element_type=_ELEMENT_TYPES[str(tensor.dtype)],
            swizzle=metadata["swizzle"],
            shape=tuple(tensor.shape),
            strides=tuple(strides),
            box=tuple(metadata["block_size"]),
            element_size=metadata["elem_size"],
        )

    def encode(self, address: int) -> bytes:
        """The 128 bytes that the copy engine reads."""
        rank = len(self.shape)
        room = ctypes.create_string_buffer(_MAP_BYTES + 64)
        place = (ctypes.addressof(room) + 63) & ~63
        code = driver().cuTensorMapEncodeTiled(
            place,
            self.element_type,
            rank,
            address,
            (ctypes.c_uint64 * rank)(*reversed(self.shape)),
            (ctypes.c_uint64 * rank)(
                *(stride * self.element_size for stride in reversed(self.strides[:-1]))
            ),
            (ctypes.c_uint32 * rank)(*reversed(self.box)),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            0,
            self.swizzle,
            _L2_PROMOTION,
            0,
        )
        if code:
            raise DriverError(f"cuTensorMapEncodeTiled failed with CUDA error {code} for {self}")
        return ctypes.string_at(place, _MAP_BYTES)


class BoundKernel:
    """A loaded kernel and the layout of its parameters.

    Attributes:
        compiled: Triton's object, kept because it owns the loaded module.
        function: `CUfunction`.
        shared: Dynamic shared memory in bytes.
        threads: Threads of a program.
        maps: Triton's metadata of each descriptor argument.
        sizes: Size and alignment of each parameter.
    """

    __slots__ = ("compiled", "function", "maps", "shared", "sizes", "threads")

    def __init__(self, compiled: object, function: int, metadata: Any, ptx: str) -> None:
        self.compiled = compiled
        self.function = function
        self.shared: int = metadata.shared
        self.threads: int = 32 * metadata.num_warps
        self.maps: list[dict] = list(metadata.tensordesc_meta or ())
        self.sizes = parameter_sizes(ptx)

    @classmethod
    def of(cls, kernel: Any, scalars: int) -> BoundKernel | None:
        """Bind a loaded `CompiledKernel`, or None where its calling convention is not known.

        Args:
            kernel: What a launch through Triton returned.
            scalars: Number of arguments behind the descriptors, pointers included. Descriptors
                come first, each as its map, its shape and its strides; two scratch pointers last.
        """
        metadata = kernel.metadata
        plain = plain_launch(metadata) and not getattr(metadata, "launch_pdl", False)
        bound = cls(kernel, kernel.function, metadata, kernel.asm["ptx"])
        shape = [
            size
            for entry in bound.maps
            for size in (
                _MAP_BYTES,
                *[4] * len(entry["block_size"]),
                *[8] * len(entry["block_size"]),
            )
        ]
        sizes = [size for size, _ in bound.sizes]
        known = sizes[: len(shape)] == shape and sizes[-2:] == [8, 8]
        if not plain or not known or len(sizes) != len(shape) + scalars + 2:
            return None
        return bound


def plain_launch(metadata: object) -> bool:
    """Whether a launch needs nothing but parameters, a grid and shared memory."""
    return (
        getattr(metadata, "global_scratch_size", 0) == 0
        and getattr(metadata, "profile_scratch_size", 0) == 0
        and not getattr(metadata, "launch_cooperative_grid", False)
        and getattr(metadata, "num_ctas", 1) == 1
    )


class Plan:
    """The parameter block of one kernel for one set of shapes and strides.

    Thread-safe: a lock is held from the first write to the driver's return.
    """

    __slots__ = (
        "_block",
        "_config",
        "_config_at",
        "_held",
        "_lock",
        "_maps",
        "_pointers",
        "_slots",
        "_view",
        "kernel",
    )

    def __init__(
        self,
        kernel: BoundKernel,
        maps: Sequence[Map],
        scalars: Sequence[int | float | None],
        programs: int,
    ) -> None:
        """Lay the block out.

        Args:
            kernel: The kernel.
            maps: Of each descriptor argument.
            scalars: The other arguments in order; None for an address, given at each launch.
            programs: Grid size.
        """
        self.kernel = kernel
        self._config = LaunchConfig(
            (programs, 1, 1), (kernel.threads, 1, 1), kernel.shared, None, None, 0
        )
        self._config_at = ctypes.c_void_p(ctypes.addressof(self._config))
        values: list[int | float | None] = []
        for entry in maps:
            values += [None, *entry.shape, *entry.strides]
        values += [*scalars, 0, 0]
        offsets, end = [], 0
        for size, align in kernel.sizes:
            end = (end + align - 1) // align * align
            offsets.append(end)
            end += size
        self._block = ctypes.create_string_buffer(end + 64)
        pad = -ctypes.addressof(self._block) % 64
        base = ctypes.addressof(self._block) + pad
        self._view = memoryview(self._block).cast("B")
        self._pointers = (ctypes.c_void_p * len(offsets))(*(base + o for o in offsets))
        slots: list[int] = []
        self._maps: list[tuple[int, Map, dict[int, bytes]]] = []
        fresh = iter(maps)
        for value, (size, _), offset in zip(values, kernel.sizes, offsets, strict=True):
            place = pad + offset
            if value is None and size == _MAP_BYTES:
                self._maps.append((place, next(fresh), {}))
            elif value is None:
                slots.append(place)
            else:
                code = "f" if isinstance(value, float) else "q" if size == 8 else "i"
                struct.pack_into(code, self._block, place, value)
        self._slots = tuple(slots)
        self._held: list[tuple[int, ...]] = [(0,) * len(self._maps), ()]
        self._lock = threading.Lock()

    def launch(self, stream: int, mapped: tuple[int, ...], addresses: tuple[int, ...]) -> None:
        """Launch on `stream` with the addresses of the mapped tensors and of the others.

        Raises:
            DriverError: The driver refused.
        """
        with self._lock:
            if mapped != self._held[0]:
                self._point(mapped)
            if addresses != self._held[1]:
                for place, address in zip(self._slots, addresses, strict=True):
                    struct.pack_into("Q", self._block, place, address)
                self._held[1] = addresses
            self._config.stream = stream
            launch(self._config_at, self.kernel.function, self._pointers)

    def _point(self, mapped: tuple[int, ...]) -> None:
        """Write the tensor maps whose addresses are not the last launch's."""
        view, held = self._view, self._held[0]
        for n, (place, entry, kept) in enumerate(self._maps):
            address = mapped[n]
            if address == held[n]:
                continue
            code = kept.get(address)
            if code is None:
                if len(kept) >= _MAPS_KEPT:
                    kept.clear()
                code = kept[address] = entry.encode(address)
            view[place : place + _MAP_BYTES] = code
        self._held[0] = mapped
