"""Which variant of the kernel serves a call.

A few query rows over more keys go to `decode` (it has no backward pass: the others' continue from
its results), the rest to `hopper`; whatever they refuse, the portable `triton` variant serves. A
variant that was asked for by name is served or refused with its reasons.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_attn_backends.call import class_name, dtype_name, features_name
from hf_attn_backends.errors import CallRefusedError, InvalidCallError, compose
from hf_attn_backends.kernels.visibility import Visibility

VARIANTS = ("triton", "hopper", "decode")
MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256
FEW_ROWS = 16  # up to which `auto` decodes; decode.MAX_QUERY_LENGTH, whose module loads triton
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Variant(NamedTuple):
    """A variant's name and its launch function for one phase.

    Attributes:
        name: One of `VARIANTS`.
        launch: See `kernels.triton.forward` and `.backward`.
        bind: Makes a cheaper launch for calls of one layout; None where there is none.
    """

    name: str
    launch: Any
    bind: Any = None


def kernel_refusals(
    device: torch.device, dtype: torch.dtype, head_dim: int, value_head_dim: int | None = None
) -> list[str]:
    """Why no variant can serve a call, whatever its mask; empty when one can.

    Args:
        device: Of query, key and value.
        dtype: Likewise.
        head_dim: `D`.
        value_head_dim: The value's, where it differs.
    """
    reasons = []
    if not MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM:
        reasons.append(
            f"head_dim must be {MIN_HEAD_DIM} to {MAX_HEAD_DIM}, got head_dim {head_dim}"
        )
    if value_head_dim is not None and not MIN_HEAD_DIM <= value_head_dim <= MAX_HEAD_DIM:
        reasons.append(
            f"value head_dim must be {MIN_HEAD_DIM} to {MAX_HEAD_DIM}, "
            f"got value head_dim {value_head_dim}"
        )
    if dtype not in _DTYPES:
        reasons.append(f"dtype must be bfloat16, float16 or float32, got {dtype}")
    if device.type == "cpu":
        if not interpreted():
            reasons.append(
                "a CPU tensor needs Triton's interpreter: set TRITON_INTERPRET=1 in the "
                "environment before Python starts (it is read once, when triton is imported)"
            )
        else:
            reasons += interpreter_refusals()
    elif device.type != "cuda":
        reasons.append(f"device must be cuda (or cpu under the interpreter), got {device}")
    elif interpreted():
        reasons.append("TRITON_INTERPRET=1 is set: unset it to launch on the GPU")
    elif torch.cuda.get_device_capability(device) < (8, 0):
        major, minor = torch.cuda.get_device_capability(device)
        reasons.append(f"compute capability must be 8.0 or newer, got {major}.{minor}")
    return reasons


def interpreter_refusals() -> list[str]:
    """Why Triton's interpreter cannot run with the numpy that is installed; empty when it can.

    Triton 3.6 reads the bounds of a loop as `int()` of arrays with one element, which numpy 2.4
    refuses; Triton 3.9 does not (the versions between are not tested, so they are refused).
    """
    import numpy
    import triton

    old = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)
    new = tuple(map(int, numpy.__version__.split(".")[:2])) >= (2, 4)
    if not (old and new):
        return []
    return [
        f"the interpreter of triton {triton.__version__} does not work with numpy "
        f"{numpy.__version__}: pip install 'numpy<2.4', or triton 3.9 or newer"
    ]


@lru_cache(maxsize=1)
def interpreted() -> bool:
    """Whether the kernels of this process run in Triton's interpreter. Imports triton."""
    from hf_attn_backends.kernels.triton.launch import INTERPRETED

    return INTERPRETED


@lru_cache(maxsize=2)
def _portable(phase: str) -> Variant:
    from hf_attn_backends.kernels.triton import backward, forward

    if phase == "forward":
        return Variant("triton", forward.launch_forward, forward.bind)
    return Variant("triton", backward.launch_backward)


@lru_cache(maxsize=2)
def _hopper(phase: str) -> tuple[Variant, Any]:
    """The hopper variant of one phase, and the function that says why it cannot serve."""
    if phase == "forward":
        from hf_attn_backends.kernels.hopper import forward

        return Variant("hopper", forward.launch_forward, forward.bind), forward.refusals
    from hf_attn_backends.kernels.hopper import backward

    return Variant("hopper", backward.launch_backward), backward.refusals


@lru_cache(maxsize=256)
def _kernel_refusals(
    device: torch.device, dtype: torch.dtype, head_dim: int, value_head_dim: int | None
) -> tuple[str, ...]:
    return tuple(kernel_refusals(device, dtype, head_dim, value_head_dim))


@lru_cache(maxsize=1)
def _decode() -> tuple[Variant, Any]:
    """The decode variant, and the function that says why it cannot serve."""
    from hf_attn_backends.kernels.triton import decode

    return Variant("decode", decode.launch_decode, decode.bind), decode.refusals


class Resolved(NamedTuple):
    """Who serves a call: a variant, and the call's class as text."""

    name: str
    launch: Any
    bind: Any
    call_class: str


_resolved: dict[tuple[object, ...], Resolved] = {}
_RESOLVED_KEPT = 4096


def resolve_variant(
    phase: str,
    asked: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visibility: Visibility,
    scale: float,
    *,
    sinks: bool = False,
    softcap: bool = False,
    dropout: bool = False,
) -> Resolved:
    """Choose the variant for one call; the answer is kept for calls of the same layout.

    Args:
        phase: `forward` or `backward`.
        asked: `auto`, or a variant's name.
        query: `[B, H, M, D]`.
        key: `[B, G, N, D]`.
        value: `[B, G, N, E]`.
        visibility: Which keys each row sees.
        scale: Factor of the scores.
        sinks, softcap, dropout: Features of the call's class; the portable variant alone has them.

    Raises:
        CallRefusedError: Nothing serves the call, or not the variant that was asked for.
    """
    shape, key_shape = query.shape, key.shape
    if asked == "auto" and phase == "forward" and shape[2] <= FEW_ROWS and key_shape[2] > shape[2]:
        # A step of decoding: no length decides, and a growing cache must not be a new layout.
        layout = (
            query.device, query.dtype, visibility.kind, shape[3], value.shape[3], sinks, softcap,
            dropout,
        )  # fmt: skip
    else:
        layout = (
            phase, asked, query.device, query.dtype, visibility.kind, scale > 0, shape,
            query.stride(), key_shape, key.stride(), value.shape[3], value.stride(), sinks,
            softcap, dropout, (query.data_ptr() | key.data_ptr() | value.data_ptr()) & 15,
            torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
    found = _resolved.get(layout)
    if found is None:
        features = features_name(
            sinks=sinks, softcap=softcap, dropout=dropout, value_dim=value.shape[3] != shape[3]
        )
        variant = _resolve(phase, asked, query, key, value, visibility, scale, features)
        name = class_name(dtype_name(query.dtype), shape[3], visibility.kind, features)
        if len(_resolved) >= _RESOLVED_KEPT:
            _resolved.clear()
        found = _resolved[layout] = Resolved(*variant, name)
    return found


def _resolve(
    phase: str,
    asked: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visibility: Visibility,
    scale: float,
    features: str,
) -> Variant:
    if asked not in ("auto", *VARIANTS):
        raise InvalidCallError(f"variant must be auto, {' or '.join(VARIANTS)}, got {asked!r}")
    d, e = query.shape[-1], value.shape[-1]
    reasons = list(_kernel_refusals(query.device, query.dtype, d, None if e == d else e))
    if reasons:
        raise CallRefusedError(compose("no kernel serves this call", reasons), reasons)
    if asked == "triton":
        return _portable(phase)
    cached = key.shape[2] > query.shape[2]  # where they are equal, there is nothing to split
    if phase == "forward" and (asked == "decode" or (asked == "auto" and cached)):
        variant, refusals = _decode()
        refused = _features_refused("decode", features) + refusals(query, visibility)
        if not refused:
            return variant
        if asked == "decode":
            raise CallRefusedError(
                compose(
                    "variant 'decode' was asked for, and cannot serve this call",
                    refused,
                    works="variant='triton', or variant='auto' to choose by the call",
                ),
                refused,
            )
    refused = hopper_refusals(phase, query, key, value, visibility, scale, features)
    if not refused:
        return _hopper(phase)[0]
    if asked == "hopper":
        raise CallRefusedError(
            compose(
                f"variant 'hopper' was asked for, and its {phase} pass cannot serve this call",
                refused,
                works="variant='triton', or variant='auto' to choose by the call",
            ),
            refused,
        )
    return _portable(phase)


def _features_refused(variant: str, features: str) -> list[str]:
    """The portable variant alone has softcap, sinks, dropout and value head dims of their own."""
    names = features.replace("+", ", ")
    return [f"the {variant} variant does not implement {names}"] if features else []


def hopper_refusals(
    phase: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visibility: Visibility,
    scale: float,
    features: str = "",
) -> list[str]:
    """Why the hopper variant cannot serve a phase of a call; empty when it can."""
    if not query.is_cuda or interpreted():
        return [f"the hopper variant needs a CUDA device of capability 9.0, not {query.device}"]
    refused = _features_refused("hopper", features)
    if refused:
        return refused
    return _hopper(phase)[1](query, key, value, visibility, scale)
