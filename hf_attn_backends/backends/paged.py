"""Who serves a call over a paged cache: the same plan, refusals and counts as any other call.

Shapes: `B` sequences, `H` query heads, `G` key/value heads, `D` head dim.
"""

from __future__ import annotations

import importlib

from torch import Tensor

from hf_attn_backends.backends import proof
from hf_attn_backends.backends.base import AttentionBackend
from hf_attn_backends.backends.factory import backend_of
from hf_attn_backends.backends.names import AUTO, OUR_KERNELS
from hf_attn_backends.backends.planning import explicit_plan
from hf_attn_backends.backends.scope import in_context
from hf_attn_backends.call import AttentionCall

_MAX_SERVED = 4096
_served: dict[tuple[object, ...], AttentionBackend] = {}
"""What was planned, by the signature of a call; holding the backend keeps its id from reuse."""


def page_reader(default_backend: str) -> AttentionBackend | None:
    """The backend in force for a model, if it reads pages itself; else None.

    Args:
        default_backend: What the model was loaded under; a context overrides it.
    """
    stack = in_context()
    if stack:
        chosen = stack[-1]
    else:
        chosen = None if default_backend == AUTO else backend_of(default_backend, "config")
    return chosen if chosen is not None and chosen.name in OUR_KERNELS else None


def run_paged(
    backend: AttentionBackend,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    *,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """One decode step of a batch of sequences over their pages.

    Args:
        backend: One of the project's own kernels.
        query: `[B, H, 1, D]`.
        key_cache: `[pages, page_size, G, D]`.
        value_cache: Likewise.
        block_table: `[B, pages of a sequence]` int32.
        lengths: `[B]` int32, the newest key included.
        scale: As in `attention`.
        window: Keys a row sees, its own included; None: all.

    Returns:
        `[B, H, 1, D]`.

    Raises:
        CallRefusedError: The backend, or its gate, says no; with every reason.
    """
    kernel = importlib.import_module("hf_attn_backends.kernels.paged")
    signature = (
        id(backend), query.shape, key_cache.shape[2], query.dtype, query.device, window is None,
    )  # fmt: skip
    if signature not in _served:
        explicit_plan(backend, _described(query, key_cache, block_table, window))
        if len(_served) >= _MAX_SERVED:
            _served.clear()
        _served[signature] = backend
    return kernel.paged_attention(
        query, key_cache, value_cache, block_table, lengths, scale=scale, window=window,
        backend=backend.name,
    )  # fmt: skip


def _described(
    query: Tensor, key_cache: Tensor, block_table: Tensor, window: int | None
) -> AttentionCall:
    batch, heads, rows, head_dim = query.shape
    return AttentionCall(
        batch=batch,
        heads=heads,
        kv_heads=key_cache.shape[2],
        q_len=rows,
        k_len=block_table.shape[1] * key_cache.shape[1],
        head_dim=head_dim,
        value_head_dim=head_dim,
        dtype=query.dtype,
        device=query.device,
        visibility="full" if window is None else "window",
        window=window,
        has_cache=True,
    )


proof.on_forget(_served.clear)
