"""What the three launches share: device, strides, visibility arguments, tiles.

Shapes: `B` batch, `H` query heads, `G` key/value heads, `M` query length, `N` key length, `D`
head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, reduce
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from hf_attn_backends.kernels.block import Block
from hf_attn_backends.kernels.triton.tiles import TileSet, tiles_for
from hf_attn_backends.kernels.visibility import Visibility

INTERPRETED: bool = knobs.runtime.interpret
"""Whether this process runs the kernels in Triton's interpreter; fixed at triton's import."""

_BLOCKS: dict[tuple[object, ...], Block | None] = {}
_BLOCKS_KEPT = 1024
WIDE_FROM = 2**31 // 256  # a tile has at most 128 rows; half the int32 range is kept in reserve


class VisibilityArguments(NamedTuple):
    """Visibility as the kernels take it."""

    kind: str
    window: int
    intervals: Tensor
    interval_strides: tuple[int, int]
    mask: Tensor
    mask_strides: tuple[int, int, int, int]


def visibility_arguments(visibility: Visibility, unused: Tensor) -> VisibilityArguments:
    """Turn visibility into kernel arguments; `unused` stands in for absent pointers."""
    intervals, mask = unused, unused
    interval_strides, mask_strides = (0, 0), (0, 0, 0, 0)
    if visibility.intervals is not None:
        intervals = visibility.intervals
        if intervals.stride(2) != 1:
            intervals = intervals.contiguous()
        interval_strides = (
            0 if intervals.shape[0] == 1 else intervals.stride(0),
            intervals.stride(1),
        )
    if visibility.dense is not None:
        mask = visibility.dense.view(torch.uint8)
        strides = [0 if n == 1 else s for n, s in zip(mask.shape, mask.stride(), strict=True)]
        mask_strides = (strides[0], strides[1], strides[2], strides[3])
    return VisibilityArguments(
        visibility.kind, visibility.window or 0, intervals, interval_strides, mask, mask_strides
    )


def rows_contiguous(tensor: Tensor) -> Tensor:
    """The tensor itself when its last dimension is contiguous, else one copy."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def wide(*tensors: Tensor) -> bool:
    """Whether a tile of any of these `[B, H, L, D]` tensors spans more than int32 offsets."""
    return any(t.stride(2) >= WIDE_FROM for t in tensors)


def describable(*tensors: Tensor) -> bool:
    """Whether tensor descriptors can address these `[B, H, L, D]` tensors on their device.

    The tensor memory accelerator (sm_90 and newer) wants a base and strides that are multiples of
    16 bytes, and pays off for 16-bit dtypes.
    """
    first = tensors[0]
    if INTERPRETED or first.element_size() != 2 or _capability(first.device.index) < (9, 0):
        return False
    return all(
        t.data_ptr() % 16 == 0
        and all(n == 1 or (s % 8 == 0 and 0 < s < 2**36) for n, s in _leading(t))
        for t in tensors
    )


def _leading(tensor: Tensor) -> list[tuple[int, int]]:
    return list(zip(tensor.shape[:3], tensor.stride()[:3], strict=True))


def describe(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A descriptor of `[B, H, L, D]` in tiles of `[1, 1, rows, columns]`; zeros lie outside."""
    # The stride of a dimension of size 1 is never used, but it is checked.
    strides = [s if n > 1 else 8 * (1 << 20) for n, s in _leading(tensor)] + [1]
    return TensorDescriptor(tensor, list(tensor.shape), strides, [1, 1, rows, columns])


@lru_cache(maxsize=64)
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def tiles_of(tensor: Tensor, kind: str, value_dim: int = 0, *, costly: bool = False) -> TileSet:
    """The tile table's entry for a query `[B, H, M, D]` and a kind of visibility.

    A value head dim beyond `D` is what has to fit; `costly` says softcap or dropout.
    """
    head_dim = max(tensor.shape[-1], value_dim)
    if INTERPRETED:
        return tiles_for(None, head_dim, tensor.element_size())
    capability = _capability(tensor.device.index)
    return tiles_for(capability, head_dim, tensor.element_size(), kind, costly)


def block_d(head_dim: int) -> int:
    """The power of two, at least 16, that a head dim is padded to."""
    return max(16, 1 << (head_dim - 1).bit_length())


def on_device(tensor: Tensor) -> AbstractContextManager[object]:
    """Make the tensor's device the current one: Triton launches on whatever is current."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype a kernel works in.

    Triton's interpreter multiplies the bit patterns of bfloat16 in `tl.dot` and cuts instead of
    rounding; there, bfloat16 is computed in float32.
    """
    if INTERPRETED and tensor.dtype == torch.bfloat16:
        return torch.float32
    return tensor.dtype


def precision(dtype: torch.dtype) -> str:
    """`input_precision` of `tl.dot`: IEEE products for fp32, where Triton's default is TF32."""
    return "ieee" if dtype == torch.float32 else "tf32"


def launch_options(warps: int) -> dict[str, object]:
    """Compile options; FP fusion is named because Triton 3.10 turns its default off."""
    return {"num_warps": warps, "num_stages": 1, "enable_fp_fusion": True}


def regular(tensor: Tensor, addresses: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a launch can go by a kept `Block`, on the current device.

    Triton compiles a kernel for the class of each address and stride: 1, a multiple of 16 or
    another. Regular are launches with nothing but multiples of 16 (0 is one), in 32 bits.

    Args:
        tensor: One of the kernel's tensors.
        addresses: Of all of them.
        strides: Every integer that Triton specialises, in elements.
    """
    if INTERPRETED or tensor.device.index != torch.cuda.current_device():
        return False
    bits = reduce(or_, strides)
    return bits < 2**31 and not (bits | reduce(or_, addresses)) & 15


def block_of(which: tuple[object, ...]) -> Block | None:
    """The block of a kernel: `which` names it, its device and all that it was compiled for."""
    return _BLOCKS.get(which)


def keep_block(which: tuple[object, ...], compiled: object, codes: str) -> None:
    """Keep a block of what a regular launch through Triton returned, where that is possible."""
    if which not in _BLOCKS:
        if len(_BLOCKS) >= _BLOCKS_KEPT:
            _BLOCKS.clear()
        _BLOCKS[which] = Block.of(compiled, codes)


class Arguments(NamedTuple):
    """What a kernel without descriptors takes at run time, in the order of its parameters.

    Attributes:
        pointers: Tensors.
        strides: Integers that Triton specialises.
        numbers: The others, and floats; `between_keys` among them is specialised too.
        between_keys: Where in `numbers` the stride between a mask's keys is; -1: nowhere.
    """

    pointers: tuple[Tensor, ...]
    strides: tuple[int, ...]
    numbers: tuple[int | float, ...]
    between_keys: int = -1


def launch_kernel(
    kernel: Any, which: tuple[object, ...], programs: int, arguments: Arguments,
    constants: Callable[[], dict[str, object]],
) -> None:  # fmt: skip
    """Launch by a kept block where the launch is regular, else through Triton.

    Args:
        kernel: The jit function.
        which: All that it is compiled for, its name and device first.
        programs: Of the grid.
        arguments: Those of run time.
        constants: Makes the others, and Triton's options.
    """
    pointers, strides, numbers, at = arguments
    addresses = tuple([tensor.data_ptr() for tensor in pointers])
    kept, passed = regular(pointers[0], addresses, strides), numbers
    if at >= 0:
        kept = kept and numbers[at] in (0, 1) and max(numbers[: at + 1]) < 2**31
        if numbers[at] == 1:  # Triton makes a constant of it, and no parameter
            passed, which = numbers[:at] + numbers[at + 1 :], (*which, 1)
    block = block_of(which) if kept else None
    if block is not None:
        block.launch(stream_of(pointers[0]), programs, 1, addresses + strides + passed)
        return
    with on_device(pointers[0]):
        compiled = kernel[(programs,)](*pointers, *strides, *numbers, **constants())
    if kept:
        letters = ("f" if isinstance(number, float) else "i" for number in passed)
        keep_block(which, compiled, "q" * len(pointers) + "i" * len(strides) + "".join(letters))


def stream_of(tensor: Tensor) -> int:
    """The current CUDA stream of a tensor's device."""
    return torch._C._cuda_getCurrentRawStream(tensor.device.index)


def rows_first(
    tensor: Tensor, batch: int, heads: int, length: int, dim: int
) -> tuple[Tensor, tuple[int, int, int]]:
    """An empty `[B, H, L, D]` over `[B, L, H, D]` memory, and its strides but the last."""
    row = heads * dim
    strides = (length * row, dim, row)
    out = torch.empty_strided(
        (batch, heads, length, dim), (*strides, 1), dtype=tensor.dtype, device=tensor.device
    )
    return out, strides


def row_sums(tensor: Tensor, batch: int, heads: int, length: int) -> Tensor:
    """An empty fp32 `[B, H, L]`."""
    return torch.empty_strided(
        (batch, heads, length), (heads * length, length, 1), dtype=torch.float32,
        device=tensor.device,
    )  # fmt: skip
