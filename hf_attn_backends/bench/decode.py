"""Decode steps timed side by side: one query row a sequence, keys and values out of memory.

Shapes: `B` batch, `H` query heads, `G` key/value heads, `N` keys, `D` head dim.

Times are of CUDA-graph replays: a graph holds many calls in a row, each over keys and values of its
own, which together are larger than the L2 cache. So every call reads them from memory, and the
launch of one call hides behind the one before it, as in a model whose step is one graph. The arms'
graphs take turns. What an arm computes is compared with the fp64 oracle before it is timed.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from hf_attn_backends import environment
from hf_attn_backends.bench import results
from hf_attn_backends.bench.arm import Attend, Unavailable
from hf_attn_backends.bench.decode_arms import (
    ARMS,
    attend_of,
    budget_of,
    check_name,
    error_of,
    oracle,
)
from hf_attn_backends.bench.timing import Call, capture
from hf_attn_backends.errors import AttentionBackendError, BenchmarkError

SCHEMA_VERSION = 1
SHAPES = ((1, 4096), (1, 32768), (1, 131072), (8, 4096), (8, 32768), (32, 4096), (64, 8192))
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
ROUNDS = 9
_COLD_BYTES, _MOST_CALLS = 400e6, 32


@dataclass(frozen=True, slots=True)
class Row:
    """One arm at one shape.

    Attributes:
        batch, keys: `B`, `N`.
        arm: Its name.
        us: Median microseconds of a call; None where it could not be timed.
        low_us, high_us: The fastest and the slowest round.
        tb_per_s: Bytes of keys and values over that time.
        error: Largest error against the oracle.
        reason: How it was timed, or why not.
    """

    batch: int
    keys: int
    arm: str
    us: float | None
    low_us: float | None
    high_us: float | None
    tb_per_s: float | None
    error: float | None
    reason: str


def kv_bytes(batch: int, keys: int) -> int:
    """Bytes of keys and values in bfloat16."""
    return 2 * 2 * batch * keys * KV_HEADS * HEAD_DIM


def buffers_and_calls(batch: int, keys: int) -> tuple[int, int]:
    """How many pairs of keys and values make the L2 cache useless, and calls of a graph."""
    size = kv_bytes(batch, keys)
    buffers = max(2, min(16, int(_COLD_BYTES / size) + 1))
    calls = max(buffers, min(_MOST_CALLS, int(10 * _COLD_BYTES / size)))
    return buffers, calls - calls % buffers


def measure_shape(batch: int, keys: int, names: Sequence[str], device: str) -> list[Row]:
    """Verify and time every arm at one shape."""
    buffers, calls = buffers_and_calls(batch, keys)
    draw = functools.partial(torch.randn, device=device, dtype=torch.bfloat16)
    query = draw(batch, HEADS, 1, HEAD_DIM)
    kept = [
        (draw(batch, KV_HEADS, keys, HEAD_DIM), draw(batch, KV_HEADS, keys, HEAD_DIM))
        for _ in range(buffers)
    ]
    exact, size = oracle(query, *kept[0])
    budget = budget_of(query, *kept[0], exact, size)
    replays: dict[str, Call] = {}
    errors: dict[str, float] = {}
    reasons: dict[str, str] = {}
    for name in names:
        try:
            attend = attend_of(name)
            errors[name] = error_of(attend(query, *kept[0]), exact)
            if not errors[name] <= budget:
                reasons[name] = f"wrong: error {errors[name]:.3g}, budget {budget:.3g}"
                continue
            replays[name] = _captured(attend, query, kept, calls)
        except (Unavailable, AttentionBackendError, RuntimeError) as error:
            reasons[name] = f"{type(error).__name__}: {str(error)[:200]}"
    times = in_turns(replays, calls)
    return [_row(batch, keys, name, times, errors, reasons) for name in names]


def _captured(
    attend: Attend, query: Tensor, kept: Sequence[tuple[Tensor, Tensor]], calls: int
) -> Call:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            attend(query, *kept[0])
        torch.cuda.synchronize()

        def all_calls() -> object:
            return [attend(query, *kept[n % len(kept)]) for n in range(calls)]

        replay = capture(all_calls)
    torch.cuda.current_stream().wait_stream(stream)
    return replay


def in_turns(replays: dict[str, Call], calls: int, rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Microseconds of a call in every round; each timed replay follows one that is not timed."""
    times: dict[str, list[float]] = {name: [] for name in replays}
    for _ in range(rounds):
        for name, replay in replays.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            replay()
            begin.record()
            replay()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) * 1e3 / calls)
    return times


def _row(
    batch: int, keys: int, name: str, times: dict[str, list[float]], errors: dict[str, float],
    reasons: dict[str, str],
) -> Row:  # fmt: skip
    taken = times.get(name)
    if not taken:
        reason = reasons.get(name, "unknown: no reason was given")
        return Row(batch, keys, name, None, None, None, None, _finite(errors.get(name)), reason)
    us = statistics.median(taken)
    speed = kv_bytes(batch, keys) / us / 1e6
    reason = f"median of {len(taken)} rounds of CUDA-graph replays, cold"
    return Row(batch, keys, name, us, min(taken), max(taken), speed, errors[name], reason)


def _finite(error: float | None) -> float | None:
    return error if error is not None and math.isfinite(error) else None


def measure(
    shapes: Sequence[tuple[int, int]] = SHAPES,
    names: Sequence[str] = ARMS,
    device: str = "cuda",
    progress: Callable[[Row], object] | None = None,
) -> dict[str, object]:
    """Measure every shape; the content of a result file.

    Raises:
        BenchmarkError: A name is no arm's, or there is no CUDA device: graphs are what is timed.
    """
    if not torch.cuda.is_available():
        raise BenchmarkError("decode is timed by CUDA graphs, and torch sees no CUDA device")
    for name in names:
        check_name(name)
    clocks, rows = [results.clocks(device, "start")], []
    with torch.no_grad():
        for batch, keys in shapes:
            for row in measure_shape(batch, keys, names, device):
                rows.append(row)
                if progress is not None:
                    progress(row)
            torch.cuda.empty_cache()
            clocks.append(results.clocks(device, f"after {batch}x{keys}"))
    return {
        "schema_version": SCHEMA_VERSION,
        "command": results.command_line(),
        "date": results.now(),
        "device": environment.device_facts(device),
        "versions": environment.versions(),
        "code": environment.code_state(),
        "heads": [HEADS, KV_HEADS, HEAD_DIM],
        "dtype": "bfloat16",
        "clocks": clocks,
        "rows": [asdict(row) for row in rows],
    }
