"""What was found out about a tensor, kept as long as the tensor lives and is not written to.

Every layer of a model gets the same mask and the same position ids, and finding out what they
mean costs a synchronisation with the device: once per tensor is enough, once per layer is not.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any

from torch import Tensor


class TensorMemo:
    """Results by tensor (by identity and version) and by a further key."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref, int, dict[Hashable, Any]]] = {}

    def of(self, tensor: Tensor) -> dict[Hashable, Any]:
        """The results kept for a tensor; empty when it is new or was written to since."""
        entry = self._entries.get(id(tensor))
        version = 0 if tensor.is_inference() else tensor._version
        if entry is not None and entry[0]() is tensor and entry[1] == version:
            return entry[2]
        key = id(tensor)

        def forget(dead: weakref.ref) -> None:
            found = self._entries.get(key)
            if found is not None and found[0] is dead:
                del self._entries[key]

        kept: dict[Hashable, Any] = {}
        self._entries[key] = (weakref.ref(tensor, forget), version, kept)
        return kept

    def __len__(self) -> int:
        return len(self._entries)


MASKS = TensorMemo()
POSITIONS = TensorMemo()

HOLES = "holes"


def known_dense(mask: Tensor) -> None:
    """Note that a boolean mask need not be read for intervals: it has holes, or may not be."""
    MASKS.of(mask)[HOLES] = True
