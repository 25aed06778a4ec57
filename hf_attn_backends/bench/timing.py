"""Medians of interleaved calls.

On a GPU the calls under comparison take turns, round by round, in one process: clocks move with
temperature and power, and turns spread that over all of them alike. Three ways of calling:

* `graph`: replays of a captured CUDA graph. The host's cost is gone; kernels are compared.
* `graph_warm`: the same replays, each directly behind two that are not timed.
* `eager`: the Python call as a model makes it, from an idle GPU, the host's cost included.

Before every timed call of `graph` and `eager` 512 MiB are written, so that no call finds its inputs
in the L2 cache (60 MB on an H200): cold. A call of `graph_warm` finds there what the replay before
it left: warm. A replay is enqueued behind that write or those replays, which hides its launch; an
eager call waits for the write, which does not. On a CPU, `wall`: `time.perf_counter` around the
call, caches as the call before it left them.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from hf_attn_backends.errors import BenchmarkError

Call = Callable[[], object]
Context = Callable[[], contextlib.AbstractContextManager[object]]
REPLAYS = ("graph", "graph_warm")
MODES_GPU = (*REPLAYS, "eager")
MODES_CPU = ("wall",)
L2 = {"graph": "cold", "graph_warm": "warm", "eager": "cold", "wall": "unknown: a CPU"}
_WARMING = 2
_FLUSH_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class Turn:
    """One call that takes turns with others.

    Attributes:
        call: What is timed.
        context: Entered around the call, outside of what is timed.
    """

    call: Call
    context: Context = contextlib.nullcontext


@dataclass(frozen=True, slots=True)
class Timing:
    """The median of one arm, or NaN and the reason.

    Attributes:
        ms: Median in milliseconds; NaN where nothing could be timed.
        low_ms, high_ms: The quantiles 0.1 and 0.9.
        samples: How many calls were timed.
        reason: How it was timed, or why it could not be.
    """

    ms: float
    low_ms: float
    high_ms: float
    samples: int
    reason: str


def untimed(reason: str) -> Timing:
    """NaN with its reason; the reason is never empty."""
    return Timing(math.nan, math.nan, math.nan, 0, reason or "unknown: no reason was given")


def capture(call: Call) -> Call:
    """Capture `call` in a CUDA graph, on the current stream; returns the replay.

    The current stream must not be the default one. The caller has warmed `call` up.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        call()

    def replay() -> object:
        return graph.replay()

    # The graph holds addresses, not tensors: what a backward pass saved lives as long as `call`,
    # and the next capture empties the allocator's cache.
    replay.captured = call  # pyright: ignore[reportFunctionMemberAccess]
    return replay


def interleaved(
    turns: Mapping[str, Turn], device: str, mode: str, *, budget_s: float = 0.6, least: int = 3
) -> dict[str, Timing]:
    """Time every call in turns until the budget is spent.

    Args:
        turns: Warmed-up calls by name, all on the current stream of `device`.
        device: `cpu` or a CUDA device.
        mode: `graph`, `graph_warm`, `eager` or `wall`.
        budget_s: Seconds of timed work for all calls together.
        least: Rounds that are made however long they take.
    """
    if not turns:
        return {}
    once = _round_on_gpu if device.startswith("cuda") else _round_on_cpu
    if mode not in (MODES_GPU if device.startswith("cuda") else MODES_CPU):
        raise BenchmarkError(f"{device} has no timing mode {mode!r}")
    times: dict[str, list[float]] = {name: [] for name in turns}
    probe = once(turns, device, mode)
    rounds = max(least, min(200, int(budget_s * 1000 / max(sum(probe.values()), 1e-3))))
    for _ in range(rounds):
        for name, ms in once(turns, device, mode).items():
            times[name].append(ms)
    return {name: _summary(samples, mode) for name, samples in times.items()}


def _summary(samples: list[float], mode: str) -> Timing:
    ordered = sorted(samples)
    low, high = (ordered[round(q * (len(ordered) - 1))] for q in (0.1, 0.9))
    clock = {
        "graph": "CUDA-graph replays between CUDA events",
        "graph_warm": "CUDA-graph replays with a warm L2 between CUDA events",
        "eager": "eager calls between CUDA events",
        "wall": "calls between time.perf_counter",
    }[mode]
    reason = f"median of {len(ordered)} {clock}"
    return Timing(statistics.median(ordered), low, high, len(ordered), reason)


def _round_on_gpu(turns: Mapping[str, Turn], device: str, mode: str) -> dict[str, float]:
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=device)
    times = {}
    for name, turn in turns.items():
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if mode != "graph_warm":
            flush.zero_()
        if mode == "eager":
            torch.cuda.synchronize(device)
        with turn.context():
            for _ in range(_WARMING if mode == "graph_warm" else 0):
                turn.call()
            begin.record()
            turn.call()
            end.record()
        end.synchronize()
        times[name] = begin.elapsed_time(end)
    return times


def _round_on_cpu(turns: Mapping[str, Turn], device: str, mode: str) -> dict[str, float]:
    times = {}
    for name, turn in turns.items():
        with turn.context():
            begin = time.perf_counter()
            turn.call()
            times[name] = (time.perf_counter() - begin) * 1000
    return times
