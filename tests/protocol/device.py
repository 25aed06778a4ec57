"""Stand-ins for what kernel sources import, and a loader that runs those sources on them.

Only control flow, shared memory and barriers are real: tensors in registers are opaque
(`Value`), numbers are numbers. Sources are the files of the package, with their imports resolved
here; `edits` change their text, which is how the tests seed faults.
"""

from __future__ import annotations

import ast
import importlib
import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import memory
from engine import Box, Mbarrier, Simulation
from registers import Number, Table, Value

PACKAGE = "hf_attn_backends.kernels.hopper"


class Shared:
    """A view of shared memory: a box of an allocation, and which of its sides are left."""

    dtype = None

    def __init__(self, device: Device, name: str, box: Box, sides: list[int]) -> None:
        self.device, self.name, self.box, self.sides = device, name, box, sides

    @property
    def shape(self) -> list[int]:
        return [self.box[side][1] - self.box[side][0] for side in self.sides]

    @property
    def key(self) -> tuple[str, Box]:
        return self.name, self.box

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        side = self.sides[dim]
        low = self.box[side][0] + start
        box = (*self.box[:side], (low, low + length), *self.box[side + 1 :])
        return Shared(self.device, self.name, box, self.sides)

    def index(self, place: int) -> Shared:
        cut = self.slice(place, 1, 0)
        return Shared(self.device, self.name, cut.box, self.sides[1:])

    def reshape(self, _shape: Sequence[int]) -> Shared:
        return self

    def permute(self, _order: Sequence[int]) -> Shared:
        return self

    def load(self, *_layout: Any) -> Any:
        sim = self.device.sim
        sim.step()
        memory.access(sim, self.name, self.box, "load", writes=False)
        return self.device.contents.get(self.key, Value(self.shape))

    def store(self, value: Any) -> None:
        sim = self.device.sim
        sim.step()
        memory.access(sim, self.name, self.box, "store", writes=True)
        self.device.contents[self.key] = value


class Descriptor:
    """A TMA descriptor."""

    def __init__(self, block: Sequence[int], itemsize: int = 2) -> None:
        size = itemsize
        for side in block:
            size *= side
        self.block_type = SimpleNamespace(nbytes=size, shape=list(block))
        self.layout, self.dtype = None, None


class _Opaque:
    """Gluon names that neither move data nor decide anything."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **_: Value(next((a.shape for a in args if isinstance(a, Value)), None))


class Device:
    """One block on a machine: the names that kernel sources see."""

    def __init__(self, seed: int, program: int = 0, programs: int = 1) -> None:
        self.sim = sim = Simulation(seed)
        self.contents: dict[tuple[str, Box], Any] = {}
        self._names = itertools.count()
        self.overrides: dict[str, Any] = {}
        self.edits: dict[str, str] = {}
        self.edited: set[str] = set()
        gl = _Opaque()
        gl.__dict__.update(
            constexpr=lambda value: value, static_range=range, num_warps=lambda: 4,
            program_id=lambda axis: Number(program), num_programs=lambda axis: Number(programs),
            cdiv=lambda a, b: Number(-(-a // b)), minimum=self._least(min),
            maximum=self._least(max), load=self._load, store=lambda *a, **o: None,
            zeros=lambda shape, *a: Value(shape), full=lambda shape, *a: Value(shape),
            arange=lambda low, high, *a: Value([high - low]), where=self._where,
            broadcast=lambda a, b: (a, b), allocate_shared_memory=self._allocate,
            warp_specialize=self._specialize,
        )  # fmt: skip
        self.names: dict[str, Any] = {
            "gl": gl,
            "gluon": SimpleNamespace(jit=lambda fn=None, **o: fn if fn else (lambda f: f)),
            "mbarrier": SimpleNamespace(
                MBarrierLayout=lambda: None,
                init=lambda bar, count: sim.mbarriers.update({bar.key: Mbarrier(count)}),
                expect=lambda bar, size: memory.mbarrier_arrive(sim, bar.key, 1, size),
                arrive=lambda bar, count=1: memory.mbarrier_arrive(sim, bar.key, count),
                wait=self._wait,
            ),
            "bar_sync": lambda number, n: memory.barrier_sync(sim, int(number), int(n)),
            "bar_arrive": lambda number, n: memory.barrier_arrive(sim, int(number), int(n)),
            "thread_barrier": lambda: None,
            "fence_async_shared": lambda: memory.proxy_fence(sim),
            "tma_load": lambda desc, at, bar, to: memory.copy_in(
                sim, *to.key, bar.key, desc.block_type.nbytes
            ),
            "tma_store": lambda desc, at, source: memory.copy_out(sim, *source.key),
            "tma_reduce_add": lambda desc, at, source: memory.copy_out(sim, *source.key),
            "tma_store_wait": lambda pending: memory.stores_wait(sim, pending),
            "warpgroup_mma": self._product,
            "warpgroup_mma_wait": self._products_wait,
        }

    def load(self, module: str) -> dict[str, Any]:
        """Run a module of the sm_90 kernels on this device; returns its names.

        `edits`: patterns and what to put in their place, in whichever module they occur;
        `edited` collects those that did. `overrides`: names to put in the place of its own.
        """
        path = Path(str(importlib.import_module(f"{PACKAGE}.{module}").__file__))
        text = path.read_text()
        for old, new in self.edits.items():
            text, times = re.subn(old, new, text)
            self.edited |= {old} if times else set()
        tree, namespace = ast.parse(text), dict(self.names)
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
                origin = str(node.module).rpartition(".")[2]
                if origin != "gluon_compat":
                    namespace.update(self.load(origin))
        tree.body = [n for n in tree.body if not isinstance(n, (ast.Import, ast.ImportFrom))]
        exec(compile(tree, str(path), "exec"), namespace)
        namespace.update({k: v for k, v in self.overrides.items() if k in namespace})
        return namespace

    def _allocate(self, _dtype: Any, shape: Sequence[int], _layout: Any) -> Shared:
        box = tuple((0, side) for side in shape)
        return Shared(self, f"s{next(self._names)}{list(shape)}", box, list(range(len(shape))))

    def _specialize(self, partitions: list[tuple], warps: list[int], _registers: Any) -> None:
        self.sim.run(
            [
                (f"{fn.__name__}{place}", 32 * count, lambda fn=fn, args=args: fn(*args))
                for place, ((fn, args), count) in enumerate(
                    zip(partitions, [4, *warps], strict=True)
                )
            ]
        )

    def _wait(self, bar: Shared, parity: int, pred: bool = True, deps: Any = ()) -> None:
        if pred:
            memory.mbarrier_wait(self.sim, bar.key, parity)

    def _product(
        self, a: Any, b: Any, acc: Any, use_acc: bool = True, is_async: bool = False
    ) -> Any:
        operands = [operand.key for operand in (a, b) if isinstance(operand, Shared)]
        memory.product(self.sim, operands)
        return acc if is_async else self._products_wait(0, [acc])

    def _products_wait(self, pending: int, deps: Sequence[Any] = ()) -> Any:
        memory.products_wait(self.sim, pending)
        return deps[0] if len(deps) == 1 else tuple(deps)

    @staticmethod
    def _least(choose: Callable[..., int]) -> Callable[..., Any]:
        def call(a: Any, b: Any) -> Any:
            return Number(choose(a, b)) if isinstance(a, int) and isinstance(b, int) else Value()

        return call

    @staticmethod
    def _where(condition: Any, a: Any, b: Any) -> Any:
        if isinstance(condition, int):  # scalars, on which control flow may depend
            return a if condition else b
        return Value(next((v.shape for v in (a, b, condition) if isinstance(v, Value)), None))

    @staticmethod
    def _load(pointer: Any, **_options: Any) -> Any:
        return Number(pointer[pointer.at]) if isinstance(pointer, Table) else Value()
