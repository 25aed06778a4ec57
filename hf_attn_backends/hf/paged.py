"""Continuous batching: the attention function over transformers' paged cache.

`generate_batch` lays the new tokens of many sequences end to end in one row, and keeps their keys
and values in pages. A call comes in one of two forms:

* with indices (`read_index`, `write_index`): the cache writes the new keys and values and reads
  those of every sequence back, end to end; `cu_seq_lens_q/k` tell the sequences apart, and each
  row sees an interval of that;
* with a `block_table`: every sequence has one new token, and the kernel reads the pages in place.

transformers 5.24 lets the layer call the cache's `update`; 5.17 hands the cache to the function
registered as `paged|<name>`. Both arrive here.

Shapes: `H` query heads, `G` key/value heads, `M` new tokens of all sequences, `B` sequences, `D`
head dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_attn_backends.backends.paged import page_reader, run_paged
from hf_attn_backends.dispatch import run_call
from hf_attn_backends.errors import CallRefusedError, compose
from hf_attn_backends.hf import arguments, paged_cache
from hf_attn_backends.hf.intervals import lengths_of
from hf_attn_backends.hf.paged_cache import Pages
from hf_attn_backends.hf.paged_routing import PREFIX
from hf_attn_backends.hf.paged_rows import ROWS
from hf_attn_backends.kernels.visibility import Visibility

MARK = "write_index"
"""The argument that only continuous batching passes."""

_CONSUMED = frozenset(
    (
        "block_table", "cache", "carry_over_ids", "k_cache", "logits_indices",
        "logits_processor_args", "max_seqlen_k", "max_seqlen_q", "read_index", "v_cache",
        "write_index",
    )
)  # fmt: skip


class Extras(NamedTuple):
    """What changes the scores, as the adapter got it."""

    scaling: float | None
    softcap: float | None
    sinks: Tensor | None
    dropout: float


def attend(
    backend: str,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None,
    lengths_q: Tensor,
    lengths_k: Any,
    extras: Extras,
    rest: dict[str, Any],
) -> Tensor:
    """Attend over the paged cache, the new keys and values written to it.

    Args:
        backend: The name that the model was loaded under.
        module: The attention module; its `layer_idx` is the cache's.
        query: `[1, H, M, D]`.
        key, value: `[1, G, M, D]`, the new ones; or what the cache has already read back.
        window: `sliding_window` as the module gave it.
        lengths_q: `[B + 1]` cumulative new tokens.
        lengths_k: `[B + 1]` cumulative keys, or one for each kind of layer, by its name.
        extras: What else changes the scores.
        rest: Everything else that came with the call.

    Returns:
        `[1, H, M, D]`.

    Raises:
        CallRefusedError: The backend or its gate refuses, or an argument would be dropped.
    """
    arguments.check(backend, {k: v for k, v in rest.items() if k not in _CONSUMED})
    layer = int(module.layer_idx)  # pyright: ignore[reportArgumentType]
    cache = rest.get("cache")
    window, kind = paged_cache.window_of(module, layer, window, cache)
    if isinstance(lengths_k, dict):
        lengths_k = lengths_k[kind]
    if rest.get("block_table") is not None:
        pages = paged_cache.pages_of(cache, layer, rest)
        return _step(
            backend, query,  # pyright: ignore[reportCallIssue]  # `disable` is typed for one
            key, value, pages, lengths_k, window, extras,
        )  # fmt: skip
    if cache is not None:
        key, value = paged_cache.updated(cache, layer, key, value, rest)
    rows = ROWS.of(layer, lengths_q, lengths_k, query.shape[2], key.shape[2], window)
    return _run(backend, query, key, value, Visibility(intervals=rows), extras)


def over_pages(backend: str, attention: Callable[..., Any]) -> Callable[..., Any]:
    """The function of `paged|<backend>`, which transformers makes no masks for.

    Args:
        backend: The name without prefix.
        attention: Its function.
    """

    @functools.wraps(attention)
    def attention_over_pages(
        module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **rest: Any
    ) -> Any:
        if MARK not in rest:
            reason = (
                f"{PREFIX}{backend} was called without a paged cache: no mask is made under that "
                "name, so that padding and causality would be lost"
            )
            raise CallRefusedError(
                compose(
                    "this call cannot be served",
                    [reason],
                    works="continuous batching (generate_batch) under this name",
                    fix=f'model.set_attn_implementation("{backend}")',
                ),
                [reason],
            )
        return attention(module, query, key, value, *args, **rest)

    return attention_over_pages


def _run(
    backend: str, query: Tensor, key: Tensor, value: Tensor, visibility: Visibility, extras: Extras
) -> Tensor:
    return run_call(
        backend, query, key, value, visibility, scale=extras.scaling, softcap=extras.softcap,
        sinks=extras.sinks, dropout_p=extras.dropout, has_cache=True,
    )  # fmt: skip


@torch.compiler.disable  # as transformers' own step over pages: it writes to the cache in place
def _step(
    backend: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pages: Pages,
    lengths_k: Tensor,
    window: int | None,
    extras: Extras,
) -> Tensor:
    """One new token for each sequence; a sequence of no keys is padding."""
    query = query.permute(2, 1, 0, 3).to(pages.key_cache.dtype)  # [B, H, 1, D]
    lengths = lengths_of(lengths_k, query.shape[0])
    paged_cache.write(pages, key[0].transpose(0, 1), value[0].transpose(0, 1), lengths)
    reader = page_reader(backend)
    featured = extras.softcap is not None or extras.sinks is not None or extras.dropout > 0.0
    if reader is not None and not featured and query.shape[3] == value.shape[3]:
        out = run_paged(
            reader, query, pages.key_cache, pages.value_cache, pages.block_table, lengths,
            scale=extras.scaling, window=window,
        )  # fmt: skip
    else:  # the kernel over pages has none of these: read the pages out, at a copy's cost
        keys = paged_cache.read(pages.key_cache, pages.block_table, lengths)
        values = paged_cache.read(pages.value_cache, pages.block_table, lengths)
        start = torch.zeros_like(lengths) if window is None else (lengths - window).clamp(min=0)
        rows = torch.stack([start, lengths], dim=-1)[:, None]
        out = _run(backend, query, keys, values, Visibility(intervals=rows), extras)
    return out.permute(2, 1, 0, 3)
