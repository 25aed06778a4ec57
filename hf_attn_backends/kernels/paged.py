"""The operator over a paged cache: one query row a sequence, keys and values in pages.

Shapes: `B` sequences, `H` query heads, `G` key/value heads, `D` head dim.

`hf_attn_backends::paged_attention` is opaque to torch.compile and counts each launch in the
witness, as variant `paged`, when it runs. It has no backward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_attn_backends import witness
from hf_attn_backends.call import class_name, dtype_name
from hf_attn_backends.errors import CallRefusedError, compose
from hf_attn_backends.kernels.variants import kernel_refusals
from hf_attn_backends.kernels.visibility import FULL, Visibility

VARIANT = "paged"

_LIBRARY = torch.library.Library("hf_attn_backends", "FRAGMENT")
_LIBRARY.define(
    "paged_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, "
    "Tensor lengths, float scale, int window, str backend) -> Tensor"
)


def _visibility(window: int) -> Visibility:
    """The newest token sees every key of its sequence: full, as in any step without a window."""
    return Visibility(causal=True, window=window) if window else FULL


def _forward(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor, lengths: Tensor,
    scale: float, window: int, backend: str,
) -> Tensor:  # fmt: skip
    from hf_attn_backends.kernels.triton.decode import launch_paged_decode

    head_dim = query.shape[-1]
    reasons = kernel_refusals(query.device, query.dtype, head_dim)
    if reasons:
        raise CallRefusedError(compose("no kernel serves this call", reasons), reasons)
    visibility = _visibility(window)
    out, _ = launch_paged_decode(
        query, key_cache, value_cache, block_table, lengths, visibility, scale
    )
    name = class_name(dtype_name(query.dtype), head_dim, visibility.kind)
    witness.count(backend, VARIANT, "forward", name)
    return out


def _fake(query: Tensor, *_: object) -> Tensor:
    batch, heads, rows, dim = query.shape
    return query.new_empty(batch, rows, heads, dim).transpose(1, 2)


for _key in ("CUDA", "CPU"):
    _LIBRARY.impl("paged_attention", _forward, _key)
torch.library.register_fake("hf_attn_backends::paged_attention", _fake, lib=_LIBRARY)

_operator = torch.ops.hf_attn_backends.paged_attention.default


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    backend: str = "triton_fa2",
) -> Tensor:
    """Attention of the newest token of each sequence over its pages.

    Args:
        query: `[B, H, 1, D]`, bf16, fp16 or fp32.
        key_cache: `[pages, page_size, G, D]`, last dimension contiguous; never copied.
        value_cache: Likewise.
        block_table: `[B, pages of a sequence]` int32; entries beyond a length are never read.
        lengths: `[B]` int32, keys of each sequence, the newest included; 0 gives a row of zeros.
        scale: Factor of the scores; None is `D ** -0.5`.
        window: Keys a row sees, its own included; None: all.
        backend: Under which name the witness counts.

    Returns:
        `[B, H, 1, D]`, a view of `[B, 1, H, D]` memory, in the query's dtype; not differentiable,
        deterministic.

    Raises:
        CallRefusedError: The kernel's own limits (head dim, dtype, device), every one.
    """
    if scale is None:
        scale = query.shape[-1] ** -0.5
    return _operator(
        query, key_cache, value_cache, block_table, lengths, scale, window or 0, backend
    )
