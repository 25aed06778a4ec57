"""The mask function registered beside the attention function: visibility once for a whole model.

transformers calls it where the model builds its masks, with the rule (`mask_function`), the
padding and the places of queries and keys, and hands the result to every layer. It gives

* None where the scalars say everything: full, or causal with the last query at the last key, the
  window then coming to the attention function as an argument;
* int32 `[B, 1, M, 2]`, first and one-past-last visible key of each row, where rows are intervals.
  Four dimensions, because a mask of four dimensions passes every later mask call untouched, and
  `generate` builds masks ahead of the model;
* bool `[B, 1, M, N]` for rows with holes, and for families not known to pass masks on untouched.

It reads values of the padding once per mask (as transformers' own do), and none while tracing.

Shapes: `B` batch, `M` query length, `N` key length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.utils.import_utils import is_tracing

from hf_attn_backends.hf import families
from hf_attn_backends.hf.intervals import (
    causal_rows,
    key_bounds,
    mask_runs,
    query_positions,
    stack_rows,
    symmetric_rows,
)
from hf_attn_backends.hf.memo import DENSE
from hf_attn_backends.hf.rules import rule_of, scalars_suffice
from hf_attn_backends.kernels.visibility import intervals_from_dense

_CHUNK = 1 << 26  # mask elements evaluated at a time: 64 MiB of bool


@dataclass(frozen=True, slots=True)
class _Place:
    """The arguments of one mask, as `visibility_mask` got them."""

    batch_size: int
    q_length: int
    kv_length: int
    q_offset: int | Tensor
    kv_offset: int
    mask_function: Callable
    attention_mask: Tensor | None
    use_vmap: bool
    device: torch.device | str

    def written_out(self, begin: int = 0, length: int | None = None) -> Tensor:
        """The boolean mask `[B, 1, M, N]`, or `length` rows of it from `begin` on."""
        # not above: importing that module is what registers this one
        from transformers.masking_utils import sdpa_mask

        arguments: dict[str, Any] = dict(  # sdpa_mask's own hints say int for q_offset
            batch_size=self.batch_size,
            q_length=self.q_length if length is None else length,
            kv_length=self.kv_length,
            q_offset=self.q_offset + begin,
            kv_offset=self.kv_offset,
            mask_function=self.mask_function,
            attention_mask=self.attention_mask,
            allow_is_causal_skip=False,
            allow_is_bidirectional_skip=False,
            use_vmap=self.use_vmap,
            device=self.device,
        )
        mask: Any = sdpa_mask(**arguments)
        return mask

    def keys(self) -> Tensor | None:
        """The padding mask `[B, N]` of the keys at hand; keys that are still to come are hidden."""
        if self.attention_mask is None:
            return None
        end = self.kv_offset + self.kv_length
        missing = end - self.attention_mask.shape[-1]
        mask = self.attention_mask
        if missing > 0:
            mask = torch.nn.functional.pad(mask, (0, missing))
        return mask[:, self.kv_offset : end]


def visibility_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    *,
    mask_function: Callable,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    config: Any = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Tensor | None:
    """Give the visibility of one kind of layer; the arguments are transformers' mask interface's.

    Args:
        batch_size, q_length, kv_length: `B`, `M`, `N`; `N` is the buffer's for a static cache.
        q_offset, kv_offset: Positions of the first query and the first key; a tensor for a static
            cache.
        mask_function: The rule, without the padding.
        attention_mask: `[B, keys so far]` bool, False at padding.
        local_size: The window's or the chunk's size.
        allow_is_causal_skip: The rule is causal, with a window or chunk of `local_size`, and
            nothing more; or the caller needs a mask in any case.
        allow_is_bidirectional_skip: Likewise for rules that see both ways.
        config: Of the text or vision model; the family's name is read from it.
        use_vmap: The rule is a user's own and may not take index tensors.
        device: Where the mask is wanted.

    Returns:
        None, `[B, 1, M, 2]` int32 or `[B, 1, M, N]` bool; see the module's description.
    """
    family = getattr(config, "model_type", None)
    tracing = is_tracing(attention_mask)

    place = _Place(
        batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,
        use_vmap, device,
    )  # fmt: skip

    def dense() -> Tensor:
        mask = place.written_out()
        if not tracing:
            DENSE.add(mask)
        return mask

    packed = attention_mask is None and isinstance(q_offset, int) and q_length == kv_length > 1
    rule = rule_of(
        config, local_size, allow_is_causal_skip, allow_is_bidirectional_skip, use_vmap, packed
    )
    if rule is None:
        if tracing or family not in families.WHOLE_ROWS:
            return dense()
        return _evaluate(place)

    keys = place.keys()
    bounds = None
    if keys is not None:
        if tracing:
            return dense()
        first, end, count = key_bounds(keys)
        missing, holes = torch.stack(
            [(count != kv_length).any(), (end - first != count).any()]
        ).tolist()
        if holes:
            return dense()
        bounds = (first, end) if missing else None

    if bounds is None and scalars_suffice(rule, family, q_length, kv_length, q_offset, kv_offset):
        return None
    if family not in families.WHOLE_ROWS:
        return dense()
    positions = query_positions(q_length, q_offset, device)
    if rule.causal:
        start, stop = causal_rows(positions, rule.window)
    else:
        start, stop = symmetric_rows(positions, rule.window, kv_offset + kv_length)
    start, stop = start - kv_offset, stop - kv_offset
    if rule.runs:
        runs = mask_runs(mask_function, batch_size, kv_length, kv_offset, device)
        own = (positions - kv_offset).clamp(0, kv_length - 1).long().expand(batch_size, -1)
        start = torch.maximum(start, runs.gather(1, own))
    if bounds is not None:
        start, stop = torch.maximum(start, bounds[0]), torch.minimum(stop, bounds[1])
    return stack_rows(start, stop, batch_size, kv_length)[:, None]


def _evaluate(place: _Place) -> Tensor:
    """Read intervals off any mask function, some rows at a time; the dense mask where it has holes.

    Overlays (image blocks, prefixes, a user's own functions) come this way.
    """
    step = max(1, _CHUNK // max(1, place.batch_size * place.kv_length))
    parts = []
    for begin in range(0, place.q_length, step):
        rows = place.written_out(begin, min(step, place.q_length - begin))
        part = intervals_from_dense(rows)
        if part is None:
            mask = rows if step >= place.q_length else place.written_out()
            DENSE.add(mask)
            return mask
        parts.append(part)
    return torch.cat(parts, dim=1)[:, None].contiguous()
