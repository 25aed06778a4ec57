"""transformers' paged cache, as versions 5.17 and 5.24 hand it to an attention function.

5.24 has the layer call the cache's `update`, which puts the layer's pages into the arguments; 5.17
passes the cache along.

Shapes: `B` sequences, `G` key/value heads, `M` new tokens of all sequences, `N` their keys, `D`
head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_attn_backends.errors import CallRefusedError, compose


@dataclass(frozen=True, slots=True)
class Pages:
    """One layer's pages, and where each sequence's are."""

    key_cache: Tensor
    value_cache: Tensor
    block_table: Tensor


def write(pages: Pages, keys: Tensor, values: Tensor, lengths: Tensor) -> None:
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


def read(cache: Tensor, block_table: Tensor, lengths: Tensor) -> Tensor:
    """The pages of each sequence end to end, `[B, G, pages * page_size, D]`.

    0 behind a sequence's last key: nobody has written there, and even a weight of 0 makes NaN of
    what an empty memory may hold.
    """
    keys = cache[block_table.clamp(min=0).long()].flatten(1, 2)
    inside = torch.arange(keys.shape[1], device=keys.device) < lengths[:, None]
    return torch.where(inside[:, :, None, None], keys, 0).transpose(1, 2)


def window_of(
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


def pages_of(cache: Any, layer: int, rest: dict[str, Any]) -> Pages:
    """One layer's pages: out of the arguments of 5.24, or out of the cache of 5.17."""
    if cache is None:
        return Pages(rest["k_cache"], rest["v_cache"], rest["block_table"])
    group, index = cache.layer_index_to_group_indices[layer]
    shape = (-1, cache.block_size, cache.num_key_value_heads, cache.head_dim)
    return Pages(
        cache.key_cache[index].view(shape),
        cache.value_cache[index].view(shape),
        rest["block_table"][group],
    )


def updated(
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
