"""What goes through the tiny models: whole rows, and a batch with one padded row.

Shapes: `M` tokens of the longer row, `C` image channels.
"""

from __future__ import annotations

from typing import Any

import torch
from family_configs import IMAGE_TOKEN, Size
from family_table import Family
from torch import Tensor

CASES = ("whole", "padded")


def inputs(family: Family, case: str, size: Size, device: str) -> tuple[dict[str, Any], Tensor]:
    """Arguments of a forward pass, and which rows of its output are no padding.

    Args:
        family: Its kind says what the model takes.
        case: One of `CASES`.
        size: Lengths.
        device: Where the tensors are wanted.

    Returns:
        Keyword arguments, and `[2, M]` bool (the decoder's rows of a translator).
    """
    ids = _tokens(size.length, seed=1)
    left = family.kind in ("decoder", "image")  # as `generate` pads
    mask = torch.ones_like(ids)
    if case == "padded":
        hidden = size.length - size.short
        mask[1, slice(0, hidden) if left else slice(size.short, None)] = 0
    given: dict[str, Any] = {"input_ids": ids * mask}
    if case == "padded":
        given["attention_mask"] = mask
    seen = mask.bool()
    if family.kind != "encoder":
        given["use_cache"] = False
    if family.kind == "image":
        given |= _image(given["input_ids"], size)
    elif family.kind == "translator":
        given["decoder_input_ids"] = _tokens(size.length - size.length // 3, seed=2)
        seen = torch.ones_like(given["decoder_input_ids"], dtype=torch.bool)
    elif family.kind == "decoder" and case == "padded":
        given["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    moved = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in given.items()}
    return moved, seen.to(device)


def _tokens(length: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 57, (2, length), generator=generator)


def _image(ids: Tensor, size: Size) -> dict[str, Any]:
    """One picture of nine tokens a row, at other places, and wider than the tiny window."""
    kinds = torch.zeros_like(ids)
    for row, last in enumerate((size.length - 12, size.length - 5)):
        ids[row, last - 9 : last] = IMAGE_TOKEN
        kinds[row, last - 9 : last] = 1
    generator = torch.Generator().manual_seed(3)
    pixels = torch.randn(2, 3, 24, 24, generator=generator)
    return {"pixel_values": pixels, "token_type_ids": kinds}
