"""Which keys a query row sees.

Shapes: `B` batch, `H` query heads, `M` query length, `N` key length.

Every mask that transformers builds for a decoder lets a row see one contiguous interval of keys,
so visibility has three forms: scalars (full; causal, aligned to the LAST key; causal with a
window), intervals (`[B, M, 2]` int32: first and one-past-last visible key of each row), and a
dense boolean mask for rows with holes. A row that sees nothing yields zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_attn_backends.errors import InvalidCallError

KINDS = ("full", "causal", "window", "intervals", "dense")


@dataclass(frozen=True, slots=True)
class Visibility:
    """Which keys each query row sees; exactly one of the three forms.

    Attributes:
        causal: Row `i` sees key `j` iff `j <= i + N - M`.
        window: With `causal`: row `i` sees the last `window` of those keys, its own included
            (transformers' `sliding_window`). None: all of them.
        intervals: `[B, M, 2]` int32 on the query's device; row `i` sees `start <= j < end`.
            `end <= start` is a row that sees nothing. Replaces `causal` and `window`.
        dense: `[1 or B, 1 or H, M, N]` bool, True where the key is seen; any strides, zero ones
            included. Replaces `causal` and `window`.
    """

    causal: bool = False
    window: int | None = None
    intervals: Tensor | None = None
    dense: Tensor | None = None

    def __post_init__(self) -> None:
        if self.window is not None:
            if not self.causal:
                raise InvalidCallError("window must come with causal visibility, got causal=False")
            if self.window <= 0:
                raise InvalidCallError(f"window must be at least 1 key, got {self.window}")
        given = (self.causal, self.intervals is not None, self.dense is not None)
        if sum(given) > 1:
            raise InvalidCallError(
                "visibility must be one of causal, intervals and dense, got "
                f"causal={self.causal}, intervals={given[1]}, dense={given[2]}"
            )

    @property
    def kind(self) -> str:
        """One of `KINDS`; part of the call class."""
        if self.dense is not None:
            return "dense"
        if self.intervals is not None:
            return "intervals"
        if self.causal:
            return "causal" if self.window is None else "window"
        return "full"


FULL = Visibility()
CAUSAL = Visibility(causal=True)


def intervals_of(visibility: Visibility, q_len: int, k_len: int, device: torch.device) -> Tensor:
    """Write scalar visibility as intervals `[1, M, 2]` int32.

    Raises:
        InvalidCallError: The visibility is dense.
    """
    if visibility.intervals is not None:
        return visibility.intervals
    if visibility.dense is not None:
        raise InvalidCallError("intervals_of must get scalars or intervals, got a dense mask")
    end = torch.full((q_len,), k_len, dtype=torch.int32, device=device)
    start = torch.zeros_like(end)
    if visibility.causal:
        last = torch.arange(q_len, dtype=torch.int32, device=device) + (k_len - q_len)
        end = (last + 1).clamp(0, k_len)
        if visibility.window is not None:
            start = (last + 1 - visibility.window).clamp(0, k_len)
    return torch.stack([start, end], dim=-1)[None]


def intervals_from_dense(mask: Tensor) -> Tensor | None:
    """Read a boolean mask `[B, 1, M, N]` as intervals `[B, M, 2]`, or None where a row has holes.

    Reads the values (one host synchronisation on a GPU), so it belongs where masks are built,
    once for a model, never in a layer.
    """
    if mask.shape[1] != 1 or mask.shape[-1] == 0:
        return None
    rows = mask[:, 0]
    seen = rows.sum(-1, dtype=torch.int32)
    first = rows.to(torch.uint8).argmax(-1).to(torch.int32)
    last = rows.shape[-1] - 1 - rows.flip(-1).to(torch.uint8).argmax(-1).to(torch.int32)
    empty = seen == 0
    whole = torch.where(empty, 0, last - first + 1) == seen
    if not bool(whole.all()):
        return None
    return torch.stack([torch.where(empty, 0, first), torch.where(empty, 0, last + 1)], dim=-1)
