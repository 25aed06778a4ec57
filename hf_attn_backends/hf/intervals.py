"""Arithmetic on visibility intervals, without reading a value back to the host.

Shapes: `B` batch, `M` query length, `N` key length. Rows and keys are counted by position in the
sequence (`q_offset`, `kv_offset` onwards) or by index; every function says which. All results are
int32 on the inputs' device, `[B, M]` or `[1, M]`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Offset = int | Tensor


def query_positions(q_length: int, q_offset: Offset, device: torch.device | str) -> Tensor:
    """Positions of the query rows, `[1, M]`; `q_offset` may be a tensor (static caches)."""
    return (torch.arange(q_length, device=device, dtype=torch.int32) + q_offset)[None].to(
        torch.int32
    )


def causal_rows(positions: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
    """First and one-past-last position that causal rows see, window included."""
    end = positions + 1
    start = torch.zeros_like(end) if window is None else end - window
    return start, end


def symmetric_rows(positions: Tensor, window: int | None, kv_end: int) -> tuple[Tensor, Tensor]:
    """Likewise for rows that see both ways, as far as `abs(i - j) <= window`."""
    if window is None:
        return torch.zeros_like(positions), torch.full_like(positions, kv_end)
    return positions - window, positions + window + 1


def run_starts(follows: Tensor) -> Tensor:
    """Where the run that each element belongs to begins.

    Args:
        follows: `[B, N]` bool, whether an element belongs to the run of the one before it.

    Returns:
        `[B, N]` int32 indices; the first element always begins a run.
    """
    index = torch.arange(follows.shape[-1], device=follows.device, dtype=torch.int32)
    begins = torch.where(follows, 0, index)
    return begins.cummax(-1).values.to(torch.int32)


def mask_runs(
    mask_function: Callable, batch: int, kv_length: int, kv_offset: int, device: torch.device | str
) -> Tensor:
    """Runs of keys that see the key before them: packed samples, or chunks.

    A mask function of transformers is asked along the diagonal below the main one, O(N) and not
    O(N^2). That is the whole truth of a mask which is causal within contiguous groups.

    Returns:
        `[B, N]` int32, index of the first key of each key's run.
    """
    rows = torch.arange(batch, device=device)[:, None]
    later = torch.arange(1, kv_length, device=device)[None, :] + kv_offset
    zero = torch.zeros((), device=device, dtype=torch.long)
    follows = mask_function(rows, zero, later, later - 1).expand(batch, kv_length - 1)
    return run_starts(torch.nn.functional.pad(follows, (1, 0), value=False))


def key_bounds(keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """First and one-past-last key of a padding mask, and how many there are.

    Args:
        keys: `[B, N]` bool, False at padding.

    Returns:
        `[B, 1]` int32 each; `first == end == 0` where all is padding. The mask has no hole where
        `end - first` equals the count.
    """
    index = torch.arange(keys.shape[-1], device=keys.device, dtype=torch.int32)
    end = torch.where(keys, index + 1, 0).amax(-1, keepdim=True)
    first = torch.where(keys, index, keys.shape[-1]).amin(-1, keepdim=True)
    count = keys.sum(-1, keepdim=True, dtype=torch.int32)
    return torch.where(count == 0, 0, first).to(torch.int32), end.to(torch.int32), count


def segment_rows(
    bounds_q: Tensor, bounds_k: Tensor, batch: int, q_length: int, k_length: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of samples laid end to end over the flattened batch, as `cu_seq_lens` tell them.

    Args:
        bounds_q, bounds_k: `[samples + 1]`, cumulative lengths from 0 on; what lies behind the
            last one is a sample of its own.

    Returns:
        start, end: Keys of each row's sample, `[B, M]`, by index within its batch row.
        last: The key at each row's own place, `[B, M]`: queries are the last ones of their sample.
    """
    flat = torch.arange(batch * q_length, device=bounds_q.device, dtype=bounds_q.dtype)
    tail_q = torch.full_like(bounds_q[:1], batch * q_length)
    tail_k = torch.full_like(bounds_k[:1], batch * k_length)
    inner = bounds_q[1:].contiguous()
    sample = torch.bucketize(flat, inner, right=True)
    starts_k, ends_k = bounds_k, torch.cat([bounds_k[1:], tail_k])
    ends_q = torch.cat([bounds_q[1:], tail_q])
    base = torch.arange(batch, device=flat.device, dtype=flat.dtype)[:, None] * k_length

    def rows(values: Tensor) -> Tensor:
        return values.view(batch, q_length) - base

    start, end = rows(starts_k[sample]), rows(ends_k[sample])
    last = rows(ends_k[sample] - 1 - (ends_q[sample] - 1 - flat))
    bounded = [edge.clamp(0, k_length).to(torch.int32) for edge in (start, end)]
    return bounded[0], bounded[1], last.to(torch.int32)


def segment_intervals(
    bounds_q: Tensor,
    bounds_k: Tensor,
    batch: int,
    q_length: int,
    k_length: int,
    causal: bool,
    window: int | None,
) -> Tensor:
    """`[B, M, 2]` int32 of the rows of samples laid end to end; see `segment_rows`.

    Args:
        bounds_q, bounds_k, batch, q_length, k_length: As in `segment_rows`.
        causal: Whether rows see no later key of their sample.
        window: With `causal`: keys a row sees, its own included.
    """
    start, end, last = segment_rows(bounds_q, bounds_k, batch, q_length, k_length)
    if causal:
        end = torch.minimum(end, last + 1)
        if window is not None:
            start = torch.maximum(start, last + 1 - window)
    return stack_rows(start, end, batch, k_length)


def lengths_of(bounds: Tensor, count: int) -> Tensor:
    """`[count]` int32 lengths of the first samples that cumulative lengths tell apart."""
    return (bounds[1 : count + 1] - bounds[:count]).to(torch.int32)


def stack_rows(start: Tensor, end: Tensor, batch: int, k_length: int) -> Tensor:
    """`[B, M, 2]` int32, contiguous and clamped to the keys, of two `[1 or B, M]` edges."""
    edges = torch.stack(torch.broadcast_tensors(start, end), dim=-1).clamp(0, k_length)
    return edges.to(torch.int32).expand(batch, -1, -1).contiguous()
