"""An implementation that can be timed, or the reason why it cannot."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Unavailable(Exception):
    """An arm cannot run this workload here; the text is the reason."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One implementation, ready to be called.

    Attributes:
        name: As asked for.
        attend: `(query, key, value) -> out`, all `[B, heads, S, D]`.
        backward: Whether it has a backward pass.
        source: What is called and which version of it.
        context: Makes the context under which `attend` has to be called; entered outside of what
            is timed, since pinning one of SDPA's kernels costs several microseconds.
    """

    name: str
    attend: Attend
    backward: bool = True
    source: str = ""
    context: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Call `attend` under its context."""
        with self.context():
            return self.attend(query, key, value)
