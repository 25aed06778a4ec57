"""Arms of the peers: FlexAttention and the flash-attn packages, where they can be imported."""

from __future__ import annotations

import contextlib
import importlib
from importlib import metadata
from typing import NamedTuple

import torch
from torch import Tensor

from hf_attn_backends.bench.arm import Arm, Unavailable
from hf_attn_backends.bench.workload import Workload


class _Package(NamedTuple):
    """Where a flash-attn function may come from.

    Attributes:
        module: Holds `flash_attn_func`, `[B, S, heads, D]` in and out.
        distributions: Whose versions decide what it computes.
        backward: Whether it has a backward pass.
    """

    module: str
    distributions: tuple[str, ...]
    backward: bool = True


_PACKAGES = {
    "flash_attention_2": (_Package("flash_attn", ("flash-attn",)),),
    "flash_attention_3": (
        _Package("flash_attn_interface", ("flash-attn-3",)),
        _Package("fa3_fwd_interface", ("fa3-fwd",), backward=False),
    ),
    "flash_attention_4": (_Package("flash_attn.cute", ("flash-attn-4", "nvidia-cutlass-dsl")),),
}


def flash_arm(name: str, workload: Workload) -> Arm:
    """flash-attn 2, 3 or 4, whichever package of it is installed.

    Raises:
        Unavailable: Not importable, with what each import said.
    """
    if workload.device.startswith("cpu"):
        raise Unavailable(f"{name} runs on CUDA tensors only, got {workload.device}")
    missing = []
    for package in _PACKAGES[name]:
        try:
            function = importlib.import_module(package.module).flash_attn_func
            break
        except (ImportError, AttributeError, OSError) as error:
            missing.append(f"{package.module}: {type(error).__name__}: {str(error)[:120]}")
    else:
        raise Unavailable("not importable (" + "; ".join(missing) + ")")

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        args = (tensor.transpose(1, 2) for tensor in (query, key, value))
        out = function(*args, causal=workload.causal)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return Arm(name, attend, backward=package.backward, source=_source(package))


def flex_arm(name: str, workload: Workload) -> Arm:
    """FlexAttention, compiled for the workload's one shape.

    Raises:
        Unavailable: On a CPU.
    """
    if workload.device.startswith("cpu"):
        raise Unavailable("flex_attention is fused only by torch.compile on a GPU")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()  # one specialised kernel a shape, and no recompile limit
    compiled = torch.compile(flex_attention, dynamic=False)
    mask = None
    if workload.causal:
        length = workload.seq_len
        mask = create_block_mask(
            lambda b, h, row, column: row >= column,
            None,
            None,
            length,
            length,
            device=workload.device,
        )

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = compiled(query, key, value, block_mask=mask, enable_gqa=True)
        return out  # pyright: ignore[reportReturnType]

    return Arm(name, attend, source=f"torch {torch.__version__}, compiled", context=repeatable)


def repeatable() -> contextlib.AbstractContextManager[object]:
    """What is compiled under it has a backward pass that can run more than once.

    By default a compiled backward writes into what its forward saved ("donated buffers") and
    refuses `retain_graph=True`, so that it can be neither timed in turns nor replayed.
    """
    from torch._functorch import config

    return config.patch(donated_buffer=False)


def _source(package: _Package) -> str:
    """`flash_attn.cute (flash-attn-4 4.0.0, nvidia-cutlass-dsl 4.8.1)`."""
    versions = []
    for name in package.distributions:
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            versions.append(f"{name} of unknown version")
    return f"{package.module} ({', '.join(versions)})"
