"""Packed samples, where transformers' masks lose them.

transformers tells packed samples apart by `position_ids` that restart, but only with no mask and
no cache; a cache object beside them (what `use_cache` left at its default makes) or a mask of ones
loses them, and eager attention and SDPA then let the samples read each other. `cu_seq_lens_q/k`
alone are read by flash attention only. Both reach the attention function, which honours them here.

Shapes: `B` batch, `M` query length, `N` key length.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.utils.import_utils import is_tracing

from hf_attn_backends.errors import CallRefusedError, compose
from hf_attn_backends.hf.intervals import run_starts, segment_intervals, stack_rows
from hf_attn_backends.hf.memo import POSITIONS, version_of
from hf_attn_backends.kernels.visibility import Visibility

_LINE = "packed"


def rows_of_positions(
    position_ids: Tensor, batch: int, q_length: int, k_length: int, window: int | None
) -> Tensor | None:
    """Intervals `[B, M, 2]` of a causal call without a mask, or None where nothing is packed.

    Args:
        position_ids: `[1 or B, M]`; a sample ends where the next id is not the successor.
        batch, q_length, k_length: `B`, `M`, `N`.
        window: Keys a row sees, its own included; None without a window.

    Raises:
        CallRefusedError: Positions restart in a chunk behind a cache: which of the cached keys
            belong to which sample is then written nowhere.
    """
    key = (_LINE, batch, q_length, k_length, window)
    kept: dict | None = None
    tracing = is_tracing(position_ids)
    if not tracing:
        kept = POSITIONS.of(position_ids)
        if key in kept:
            return kept[key]
    if tracing and q_length != k_length:
        return None  # no value can be read, and a plain chunk must stay what it is
    follows = torch.nn.functional.pad(position_ids.diff(dim=-1) == 1, (1, 0), value=True)
    rows = None
    if tracing or not bool(follows.all()):  # one synchronisation for a forward pass
        if q_length != k_length:
            raise _refused(
                f"position_ids restart within a chunk of {q_length} tokens behind a cache of "
                f"{k_length - q_length}, and no mask says which cached keys each sample may see"
            )
        index = torch.arange(q_length, device=position_ids.device, dtype=torch.int32)[None]
        start = run_starts(follows)
        if window is not None:
            start = torch.maximum(start, index + 1 - window)
        rows = stack_rows(start, index + 1, batch, k_length)
    if kept is not None:
        kept[key] = rows
    return rows


def rows_of_lengths(
    bounds_q: Tensor,
    bounds_k: Tensor | None,
    batch: int,
    q_length: int,
    k_length: int,
    causal: bool,
    window: int | None,
) -> Tensor:
    """Intervals `[B, M, 2]` of a call whose samples `cu_seq_lens` tell apart.

    Args:
        bounds_q, bounds_k: `[samples + 1]` cumulative lengths over the flattened batch; keys as
            queries where `bounds_k` is None.
        batch, q_length, k_length: `B`, `M`, `N`.
        causal: Whether rows see no later key of their sample.
        window: With `causal`: keys a row sees, its own included.

    Raises:
        CallRefusedError: The two do not tell as many samples, or are no vectors of lengths.
    """
    bounds_k = bounds_q if bounds_k is None else bounds_k
    if bounds_q.dim() != 1 or bounds_q.shape != bounds_k.shape:
        raise _refused(
            "cu_seq_lens_q and cu_seq_lens_k must be vectors of one length, got shapes "
            f"{tuple(bounds_q.shape)} and {tuple(bounds_k.shape)}"
        )
    kept, key = None, None
    if not is_tracing(bounds_q) and (version := version_of(bounds_k)) is not None:
        kept = POSITIONS.of(bounds_q)
        key = (id(bounds_k), version, batch, q_length, k_length, causal, window)
        if key in kept:
            return kept[key][0]
    rows = segment_intervals(bounds_q, bounds_k, batch, q_length, k_length, causal, window)
    if kept is not None:
        kept[key] = (rows, bounds_k)  # held, so that its id stays its own
    return rows


def intersect(visibility: Visibility, rows: Tensor) -> Visibility:
    """A mask's visibility (intervals or dense) cut down to intervals `[B, M, 2]`."""
    if visibility.intervals is not None:
        start, end = visibility.intervals.unbind(-1)
        start, end = torch.maximum(start, rows[..., 0]), torch.minimum(end, rows[..., 1])
        return Visibility(intervals=torch.stack([start, end], dim=-1))
    mask = visibility.dense
    if mask is None:
        return Visibility(intervals=rows)
    keys = torch.arange(mask.shape[-1], device=mask.device, dtype=torch.int32)
    inside = (keys >= rows[:, None, :, :1]) & (keys < rows[:, None, :, 1:])
    return Visibility(dense=mask & inside)


def _refused(reason: str) -> CallRefusedError:
    works = "a boolean attention_mask [batch, 1, queries, keys] that says what each token sees"
    return CallRefusedError(compose("this call cannot be served", [reason], works=works), [reason])
