"""Launching a compiled kernel whose numbers change from call to call, with little host work.

A kernel without tensor maps takes nothing but addresses and numbers: a launch writes them all, by
one `struct` call, into one block that is laid out once, and calls the driver. Triton's own launch
specialises and boxes every argument again.

As in `bound`, the layout is checked against the compiled PTX.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from typing import Any

from hf_attn_backends.kernels import bound
from hf_attn_backends.kernels.bound import LaunchConfig, parameters, plain_launch

_CODES = {"u64": "q", "s64": "q", "b64": "q", "u32": "i", "s32": "i", "b32": "i", "f32": "f"}
_DEPENDENT_LAUNCH = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class _Attribute(ctypes.Structure):
    """`CUlaunchAttribute`."""

    _fields_ = (("id", ctypes.c_uint64), ("value", ctypes.c_int * 16))


def parameter_codes(ptx: str) -> str:
    """One letter of `struct` for every parameter of a PTX kernel; `?` where it is no number."""
    return "".join("?" if count else _CODES.get(kind, "?") for _, kind, count in parameters(ptx))


class Block:
    """The parameter block of a kernel without descriptors; each launch writes all of it.

    Valid for the calls that Triton would give the same compiled kernel: the caller sees to it that
    every specialised argument is of the class (1, a multiple of 16, another) that it was at first.

    Thread-safe: a lock is held from the first write to the driver's return.
    """

    __slots__ = (
        "_attribute", "_block", "_config", "_config_at", "_function", "_grid", "_lock", "_pack",
        "_pad", "_pointers", "_stream", "compiled",
    )  # fmt: skip

    def __init__(self, compiled: Any, codes: str) -> None:
        self.compiled = compiled  # it owns the loaded module
        metadata = compiled.metadata
        self._function: int = compiled.function
        layout = struct.Struct("@" + codes)
        self._pack = layout.pack_into
        self._block = ctypes.create_string_buffer(layout.size + 64)
        self._pad = -ctypes.addressof(self._block) % 64
        base = ctypes.addressof(self._block) + self._pad
        ends = [struct.calcsize("@" + codes[: n + 1]) for n in range(len(codes))]
        places = [base + end - struct.calcsize(code) for end, code in zip(ends, codes, strict=True)]
        self._pointers = (ctypes.c_void_p * len(places))(*places)
        self._config = LaunchConfig((1, 1, 1), (32 * metadata.num_warps, 1, 1), metadata.shared)
        self._attribute = _Attribute(_DEPENDENT_LAUNCH, (1,))
        if getattr(metadata, "launch_pdl", False):
            self._config.attributes = ctypes.addressof(self._attribute)
            self._config.count = 1
        self._config_at = ctypes.c_void_p(ctypes.addressof(self._config))
        self._grid = self._config.grid
        self._stream: int | None = None
        self._lock = threading.Lock()

    @classmethod
    def of(cls, compiled: Any, codes: str) -> Block | None:
        """Bind a loaded `CompiledKernel`, or None where its calling convention is not known.

        Args:
            compiled: What a launch through Triton returned.
            codes: Letters of `struct` of its run-time arguments: `q` addresses, `i` 32-bit
                integers, `f` floats. Two scratch addresses come behind them.
        """
        whole = codes + "qq"
        if not plain_launch(compiled.metadata) or parameter_codes(compiled.asm["ptx"]) != whole:
            return None
        return cls(compiled, whole)

    def launch(self, stream: int, programs: int, splits: int, values: tuple) -> None:
        """Launch a grid of `programs` by `splits` on `stream`.

        Raises:
            bound.DriverError: The driver refused.
        """
        with self._lock:
            self._pack(self._block, self._pad, *values, 0, 0)
            self._grid[0], self._grid[1] = programs, splits
            if stream != self._stream:
                self._config.stream = self._stream = stream
            bound.launch(self._config_at, self._function, self._pointers)
