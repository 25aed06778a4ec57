"""Counts what really executed, in the place where it is launched.

The key of a count is (backend, variant, phase, call class). The operator's own implementation
counts its launches, so gradient checkpointing (whose recomputation launches the forward pass
again), torch.compile (whose graph calls the operator at run time) and autograd's backward threads
are all counted as they happen. What is not seen: replays of a captured CUDA graph, which run no
Python; a record says so where it matters.
"""

from __future__ import annotations

import threading
from typing import NamedTuple


class Launch(NamedTuple):
    """What one count is about.

    Attributes:
        backend: The backend's public name, such as `triton_fa2`.
        variant: Which of its kernels ran: `triton`, `hopper`, or `torch` for PyTorch's own.
        phase: `forward` or `backward`.
        call_class: `str(CallClass)`, such as `bfloat16/d128/causal`.
    """

    backend: str
    variant: str
    phase: str
    call_class: str


_lock = threading.Lock()
_counts: dict[tuple[str, str, str, str], int] = {}  # by plain tuples: cheaper to make
_substitutions: dict[tuple[str, str, str], int] = {}


def count(backend: str, variant: str, phase: str, call_class: str) -> None:
    """Add one launch. Thread-safe; costs well under a microsecond."""
    key = (backend, variant, phase, call_class)
    with _lock:
        _counts[key] = _counts.get(key, 0) + 1


def count_substitution(requested: str, served: str, call_class: str) -> None:
    """Add one call that a preference (environment or default) could not serve as asked."""
    key = (requested, served, call_class)
    with _lock:
        _substitutions[key] = _substitutions.get(key, 0) + 1


def snapshot() -> dict[Launch, int]:
    """Return a copy of every count of this process."""
    with _lock:
        return {Launch._make(key): n for key, n in _counts.items()}


def substitutions() -> dict[tuple[str, str, str], int]:
    """Return a copy of the substituted calls: (requested, served, call class) -> calls."""
    with _lock:
        return dict(_substitutions)


def since(before: dict[Launch, int]) -> dict[Launch, int]:
    """Return what was counted after `before = snapshot()`; keys without a new launch are absent."""
    now = snapshot()
    return {key: n - before.get(key, 0) for key, n in now.items() if n > before.get(key, 0)}


def reset() -> None:
    """Forget every count; for tests."""
    with _lock:
        _counts.clear()
        _substitutions.clear()
