"""Which keys the rows of many sequences see that lie end to end: found once for a forward pass.

Shapes: `B` sequences, `M` new tokens of all sequences, `N` their keys.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from hf_attn_backends.hf.intervals import segment_intervals


class PassRows(threading.local):
    """The intervals of the running forward pass, found once for all layers of a kind.

    Within one pass layers come in ascending order. A call that does not is the next pass, and
    finds them anew: the lengths lie in buffers that are written to in place, and the pass that a
    CUDA graph captures must hold the kernels that read them.
    """

    def __init__(self) -> None:
        self.layer = -1
        self.found: list[tuple[tuple[Tensor, Tensor], tuple[Any, ...], Tensor]] = []

    def of(
        self, layer: int, lengths_q: Tensor, lengths_k: Tensor, q_len: int, k_len: int,
        window: int | None,
    ) -> Tensor:  # fmt: skip
        """Intervals `[1, M, 2]` of causal rows within each sequence."""
        if torch.compiler.is_compiling():
            return segment_intervals(lengths_q, lengths_k, 1, q_len, k_len, True, window)
        if layer <= self.layer:
            self.found.clear()
        self.layer = layer
        shape = (q_len, k_len, window)
        for lengths, other, rows in self.found:
            if lengths[0] is lengths_q and lengths[1] is lengths_k and other == shape:
                return rows
        rows = segment_intervals(lengths_q, lengths_k, 1, q_len, k_len, True, window)
        self.found.append(((lengths_q, lengths_k), shape, rows))
        return rows


ROWS = PassRows()
