"""Float64 where a model's own code says float32, so that eager attention can be the truth.

Norms, rotary embeddings and the softmax cast to float32 by name: a model in float64 is otherwise
no better than one in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CASTS = {torch.Tensor.float: torch.Tensor.double}


class Float64(TorchFunctionMode):
    """While entered, every operation that is told to use float32 uses float64."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace the dtype among the arguments."""
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        kwargs = {
            name: torch.float64 if arg is torch.float32 else arg
            for name, arg in (kwargs or {}).items()
        }
        return _CASTS.get(func, func)(*args, **kwargs)
