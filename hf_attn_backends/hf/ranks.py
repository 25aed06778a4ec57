"""What the processes of one training run tell each other about their attention.

Every function here is called by all ranks or by none. A rank that fails says so to the others
before it raises; otherwise they would wait for it in the next collective until a timeout.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from hf_attn_backends import errors
from hf_attn_backends.errors import RecordError, compose

T = TypeVar("T")


def world() -> tuple[int, int]:
    """(rank, world size); (0, 1) without a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def launcher() -> str:
    """What started the processes, as far as the environment tells."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        accelerate = any(name.startswith("ACCELERATE_") for name in os.environ)
        return "accelerate launch" if accelerate else "torchrun"
    if "SLURM_PROCID" in os.environ:
        return "srun"
    return "python" if world()[1] == 1 else "unknown: no launcher left its mark in the environment"


def gather(mine: T) -> list[T]:
    """Every rank's object, in the order of ranks, on every rank."""
    size = world()[1]
    if size == 1:
        return [mine]
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, mine)
    return everyone


def all_or_none(action: Callable[[], T]) -> T:
    """Run an action on this rank; raise on every rank if it failed on any.

    Raises:
        Exception: This rank's own failure, as it is.
        AttentionBackendError: Another rank's, in its class, with the rank's number.
    """
    failure: Exception | None = None
    result: Any = None
    try:
        result = action()
    except Exception as error:  # handed to every rank below, then raised
        failure = error
    told = gather(None if failure is None else (type(failure).__name__, str(failure)))
    if failure is not None:
        raise failure
    for rank, said in enumerate(told):
        if said is not None:
            kind = getattr(errors, said[0], RecordError)
            kind = kind if issubclass(kind, errors.AttentionBackendError) else RecordError
            raise kind(compose(f"rank {rank} stopped the run", [said[1]]))
    return result


def disagreements(everyone: list[dict[str, Any]]) -> list[str]:
    """The keys in which the ranks differ, one sentence each."""
    found = []
    for key in everyone[0]:
        values: dict[str, list[int]] = {}
        for rank, each in enumerate(everyone):
            values.setdefault(str(each.get(key)), []).append(rank)
        if len(values) > 1:
            said = "; ".join(f"rank {', '.join(map(str, r))}: {v}" for v, r in values.items())
            found.append(f"{key} differs: {said}")
    return found
