"""What was found out about a tensor, kept as long as the tensor lives and is not written to.

Every layer of a model gets the same mask and the same position ids, and finding out what they
mean costs a synchronisation with the device: once per tensor is enough, once per layer is not.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any

from torch import Tensor
from torch.cuda import is_current_stream_capturing


class TensorMemo:
    """Results by tensor (by identity and version) and by a further key.

    Nothing is kept of an inference tensor: it counts no versions, so that a write to it, as into
    the buffers of a serving loop, would go unseen. And nothing is handed out while a CUDA graph is
    captured: the graph has to hold the kernels that read the tensor, for it will be written to.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref, int, dict[Hashable, Any]]] = {}

    def of(self, tensor: Tensor) -> dict[Hashable, Any]:
        """The results kept for a tensor; empty when it is new or was written to since."""
        if tensor.is_inference() or (tensor.is_cuda and is_current_stream_capturing()):
            return {}
        key = id(tensor)
        entry = self._entries.get(key)
        version = tensor._version
        if entry is not None and entry[0]() is tensor and entry[1] == version:
            return entry[2]

        def forget(dead: weakref.ref) -> None:
            found = self._entries.get(key)
            if found is not None and found[0] is dead:
                del self._entries[key]

        kept: dict[Hashable, Any] = {}
        self._entries[key] = (weakref.ref(tensor, forget), version, kept)
        return kept

    def __len__(self) -> int:
        return len(self._entries)


class TensorSet:
    """Tensors by identity, whatever is written to them; none is kept alive."""

    def __init__(self) -> None:
        self._members: dict[int, weakref.ref] = {}

    def add(self, tensor: Tensor) -> None:
        """Add a tensor until it is gone."""
        key = id(tensor)

        def forget(dead: weakref.ref) -> None:
            if self._members.get(key) is dead:
                del self._members[key]

        self._members[key] = weakref.ref(tensor, forget)

    def __contains__(self, tensor: Tensor) -> bool:
        member = self._members.get(id(tensor))
        return member is not None and member() is tensor

    def __len__(self) -> int:
        return len(self._members)


MASKS = TensorMemo()
POSITIONS = TensorMemo()
DENSE = TensorSet()
"""Boolean masks that need not be read for intervals: they have holes, or may not be intervals.
Dense is right for any mask, so that it does not matter what is written to one later."""


def version_of(tensor: Tensor) -> int | None:
    """The count of writes to a tensor; None where none is kept."""
    return None if tensor.is_inference() else tensor._version
