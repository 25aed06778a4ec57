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

import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_attn_backends.backends.paged import page_reader, run_paged
from hf_attn_backends.dispatch import run_call
from hf_attn_backends.errors import CallRefusedError, compose
from hf_attn_backends.hf import arguments
from hf_attn_backends.hf.intervals import lengths_of, segment_intervals
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


@dataclass(frozen=True, slots=True)
class _Pages:
    """One layer's pages, and where each sequence's are."""

    key_cache: Tensor
    value_cache: Tensor
    block_table: Tensor


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
    window, kind = _window_of(module, layer, window, cache)
    if isinstance(lengths_k, dict):
        lengths_k = lengths_k[kind]
    if rest.get("block_table") is not None:
        pages = _pages_of(cache, layer, rest)
        return _step(backend, query, key, value, pages, lengths_k, window, extras)
    if cache is not None:
        key, value = _updated(cache, layer, key, value, rest)
    rows = _rows.of(layer, lengths_q, lengths_k, query.shape[2], key.shape[2], window)
    return _run(backend, query, key, value, Visibility(intervals=rows), extras)


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
    pages: _Pages,
    lengths_k: Tensor,
    window: int | None,
    extras: Extras,
) -> Tensor:
    """One new token for each sequence; a sequence of no keys is padding."""
    query = query.permute(2, 1, 0, 3).to(pages.key_cache.dtype)  # [B, H, 1, D]
    lengths = lengths_of(lengths_k, query.shape[0])
    _write(pages, key[0].transpose(0, 1), value[0].transpose(0, 1), lengths)
    reader = page_reader(backend)
    featured = extras.softcap is not None or extras.sinks is not None or extras.dropout > 0.0
    if reader is not None and not featured and query.shape[3] == value.shape[3]:
        out = run_paged(
            reader, query, pages.key_cache, pages.value_cache, pages.block_table, lengths,
            scale=extras.scaling, window=window,
        )  # fmt: skip
    else:  # the kernel over pages has none of these: read the pages out, at a copy's cost
        keys, values = (_read(c, pages.block_table) for c in (pages.key_cache, pages.value_cache))
        start = torch.zeros_like(lengths) if window is None else (lengths - window).clamp(min=0)
        rows = torch.stack([start, lengths], dim=-1)[:, None]
        out = _run(backend, query, keys, values, Visibility(intervals=rows), extras)
    return out.permute(2, 1, 0, 3)


def _write(pages: _Pages, keys: Tensor, values: Tensor, lengths: Tensor) -> None:
    """Put each sequence's new key and value, `[B, G, D]`, into the place of its newest token.

    Without reading a length: padding rows write once more what the first sequence writes.
    """
    size = pages.key_cache.shape[1]
    last = lengths - 1
    real = last >= 0
    page = pages.block_table.gather(1, (last.clamp(min=0) // size).long()[:, None])[:, 0].long()
    slot = (last % size).long()
    page, slot = torch.where(real, page, page[:1]), torch.where(real, slot, slot[:1])
    for cache, new in ((pages.key_cache, keys), (pages.value_cache, values)):
        new = torch.where(real[:, None, None], new, new[:1]).to(cache.dtype)
        cache.index_put_((page, slot), new)


def _read(cache: Tensor, block_table: Tensor) -> Tensor:
    """The pages of each sequence end to end, `[B, G, pages * page_size, D]`."""
    pages = cache[block_table.clamp(min=0).long()]
    return pages.flatten(1, 2).transpose(1, 2)


def _window_of(
    module: torch.nn.Module, layer: int, given: int | None, cache: Any
) -> tuple[int | None, str]:
    """The keys a row of this layer sees, and transformers' name for this kind of layer.

    Not every family passes its window to the attention function: the cache, or the configuration
    that the cache was laid out by, knows it.
    """
    config: Any = module.config
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    size = getattr(config, "sliding_window", None)
    if cache is not None:  # transformers 5.17, where 1 is no window
        sliding = cache.sliding_windows[layer] != 1
    elif getattr(config, "layer_types", None) is not None:
        sliding = config.layer_types[layer] == "sliding_attention"
    else:
        sliding = size is not None
    if not sliding:
        return None, "full_attention"
    return (size if given is None else given), "sliding_attention"


def _pages_of(cache: Any, layer: int, rest: dict[str, Any]) -> _Pages:
    if cache is None:
        return _Pages(rest["k_cache"], rest["v_cache"], rest["block_table"])
    group, index = cache.layer_index_to_group_indices[layer]
    shape = (-1, cache.block_size, cache.num_key_value_heads, cache.head_dim)
    return _Pages(
        cache.key_cache[index].view(shape),
        cache.value_cache[index].view(shape),
        rest["block_table"][group],
    )


def _updated(
    cache: Any, layer: int, key: Tensor, value: Tensor, rest: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Let the cache write and read back; it gives `[N, G, D]`."""
    if not hasattr(cache, "layer_index_to_group_indices"):
        reason = (
            f"the cache is a {type(cache).__name__}, and a paged cache of transformers 5.17 or "
            "newer is what can be read here"
        )
        raise CallRefusedError(compose("this call cannot be served", [reason]), [reason])
    keys, values = cache.update(
        key_states=key, value_states=value, layer_idx=layer, read_index=rest["read_index"],
        write_index=rest["write_index"],
    )  # fmt: skip
    return keys.transpose(0, 1)[None], values.transpose(0, 1)[None]


class _Rows(threading.local):
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


_rows = _Rows()
