"""Which keys each row of one attention call sees, of the arguments that transformers passes.

A mask says everything; without one it is `cu_seq_lens`, then the positions, then causality and
window alone. Shapes: `B` batch, `M` query length, `N` key length.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.utils.import_utils import is_tracing

from hf_attn_backends.hf import families
from hf_attn_backends.hf.custom_masks import visibility_of
from hf_attn_backends.hf.memo import POSITIONS
from hf_attn_backends.hf.packing import intersect, rows_of_lengths, rows_of_positions
from hf_attn_backends.kernels.visibility import CAUSAL, FULL, Visibility

_windows: dict[int, Visibility] = {}


def window_counts(module: torch.nn.Module) -> bool:
    """Whether a layer's `sliding_window` is the model's, where there is no mask.

    The mask function leaves a window to the argument in the families that are known to give it to
    their sliding layers; in others it is in the mask, or (OLMoE) in no mask and then eager ignores
    it.
    """
    family = getattr(getattr(module, "config", None), "model_type", None)
    return family is None or family in families.PASSES_WINDOW


def visibility_of_arguments(
    batch: int,
    q_length: int,
    k_length: int,
    mask: Tensor | None,
    window: int | None,
    causal: bool,
    position_ids: Tensor | None,
    cu_seq_lens_q: Tensor | None,
    cu_seq_lens_k: Tensor | None,
) -> Visibility:
    """Which keys each row sees, of everything that says so."""
    if mask is not None:  # says everything: window and causality are in it
        visibility = visibility_of(mask, q_length, k_length)
        if cu_seq_lens_q is None:
            return visibility
        rows = rows_of_lengths(cu_seq_lens_q, cu_seq_lens_k, batch, q_length, k_length, False, None)
        return intersect(visibility, rows)
    if cu_seq_lens_q is not None:
        if not causal or window is None or window >= k_length:
            window = None
        return Visibility(
            intervals=rows_of_lengths(
                cu_seq_lens_q, cu_seq_lens_k, batch, q_length, k_length, causal, window
            )
        )
    return visibility_of_scalars(batch, q_length, k_length, window, causal, position_ids)


def visibility_of_scalars(
    batch: int,
    q_length: int,
    k_length: int,
    window: int | None,
    causal: bool,
    position_ids: Tensor | None,
) -> Visibility:
    """Likewise without a mask; positions tell packed samples apart."""
    if not causal:
        return FULL  # a window that sees both ways comes as a mask, or was found not to bind
    if window is not None and window >= k_length:
        window = None  # not binding
    if q_length == 1 and window is None:
        return FULL
    if q_length > 1 and position_ids is not None:
        compiling = torch.compiler.is_compiling()
        kept: dict = {} if compiling else POSITIONS.of(position_ids)
        key = (batch, q_length, k_length, window)
        found = kept.get(key)
        if found is None:
            found = _of_positions(position_ids, batch, q_length, k_length, window)
            if not compiling and not is_tracing(position_ids):
                kept[key] = found
        return found
    return _causal(window)


def _of_positions(
    position_ids: Tensor, batch: int, q_length: int, k_length: int, window: int | None
) -> Visibility:
    if _per_token(position_ids, batch, q_length):
        rows = rows_of_positions(position_ids, batch, q_length, k_length, window)
        if rows is not None:
            return Visibility(intervals=rows)
    return _causal(window)


def _causal(window: int | None) -> Visibility:
    if window is None:
        return CAUSAL
    if torch.compiler.is_compiling():
        return Visibility(causal=True, window=window)
    found = _windows.get(window)
    if found is None:
        found = _windows[window] = Visibility(causal=True, window=window)
    return found


def _per_token(position_ids: Tensor, batch: int, q_length: int) -> bool:
    """Whether the ids are one a token; three-dimensional ones of image and video are not."""
    shape = position_ids.shape
    return len(shape) == 2 and shape[1] == q_length and shape[0] in (1, batch)
