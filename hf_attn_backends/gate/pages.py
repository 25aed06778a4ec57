"""The kernel for paged caches, which serves one-row calls of continuous batching.

It is measured beside the other variants of a class: the same inputs, their keys and values laid
into pages in a scattered order.

Shapes: `B` batch, `H` query heads, `G` key/value heads, `N` key length, `D` head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_attn_backends.gate.attend import WITNESS_NAME
from hf_attn_backends.gate.cases import Case
from hf_attn_backends.gate.inputs import Inputs

PAGE_SIZES = (16, 256)
"""Smaller than the kernel's tiles, and a multiple of them: it reads the two in different ways."""


def applies(case: Case, inputs: Inputs) -> bool:
    """Whether continuous batching could ask for such a call, and the kernel serve it."""
    plain = not inputs.kernel_options() and inputs.value.shape[3] == inputs.query.shape[3]
    return plain and case.q_len == 1 and inputs.visibility.kind in ("full", "window")


def attend(inputs: Inputs, page_size: int) -> Tensor:
    """`[B, H, 1, D]` over pages of `page_size` keys; NaN wherever nobody may look."""
    from hf_attn_backends.kernels.paged import paged_attention

    batch, _, length, _ = inputs.key.shape
    pages = -(-length // page_size)
    table = torch.arange(batch * pages, dtype=torch.int32, device=inputs.key.device)
    table = table.flip(0).view(pages, batch).T.contiguous() + 1
    return paged_attention(
        inputs.query,
        _laid(inputs.key, table, page_size),
        _laid(inputs.value, table, page_size),
        table,
        torch.full((batch,), length, dtype=torch.int32, device=inputs.key.device),
        scale=inputs.scale,
        window=inputs.visibility.window,
        backend=WITNESS_NAME,
    )


def _laid(keys: Tensor, table: Tensor, page_size: int) -> Tensor:
    """`[1 + pages, page_size, G, D]` of keys `[B, G, N, D]`; the first page is nobody's."""
    batch, kv_heads, length, dim = keys.shape
    shape = (1 + table.numel(), page_size, kv_heads, dim)
    cache = torch.full(shape, float("nan"), dtype=keys.dtype, device=keys.device)
    place = torch.arange(length, device=keys.device)
    for row in range(batch):
        page = table[row].long()[place // page_size]
        cache[page, place % page_size] = keys[row].transpose(0, 1)
    return cache
