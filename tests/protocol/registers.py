"""What kernels hold in registers: numbers, and tensors of which only the shape is known."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any


class Number(int):
    """A scalar of the kernel."""

    def to(self, *_args: Any, **_options: Any) -> Number:
        return self


def _number(name: str) -> None:
    plain = getattr(int, name)

    def method(self: Number, *others: int) -> Any:
        result = plain(self, *others)
        return Number(result) if type(result) is int else result

    setattr(Number, name, method)


for _name in ("add", "sub", "mul", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift"):
    _number(f"__{_name}__")
    _number(f"__r{_name}__")
_number("__neg__")


class Value:
    """A tensor in registers, of which only the shape is known."""

    def __init__(self, shape: Sequence[int] | None = None) -> None:
        self.shape = shape
        self.type = SimpleNamespace(layout=None)

    def _same(self, *others: Any, **_options: Any) -> Value:
        return Value(self.shape or next((o.shape for o in others if isinstance(o, Value)), None))

    def reshape(self, shape: Sequence[int]) -> Value:
        return Value(shape)

    def split(self) -> tuple[Value, Value]:
        sides = list(self.shape or [2])
        sides.remove(2)
        return Value(sides), Value(sides)

    def __getitem__(self, _key: Any) -> Value:
        return Value()

    def __bool__(self) -> bool:
        raise TypeError("control flow must not depend on a tensor")

    to = permute = _same


_OPERATORS = ("add", "sub", "mul", "truediv", "and", "or", "lt", "le", "gt", "ge", "eq", "ne")
for _name in (*_OPERATORS, "radd", "rsub", "rmul", "rtruediv"):
    setattr(Value, f"__{_name}__", Value._same)


class Table(list):
    """Numbers in global memory that control flow depends on; `table + place` is a pointer."""

    at = 0

    def __add__(self, place: int) -> Table:
        moved = Table(self)
        moved.at = self.at + place
        return moved
