"""The class of an attention call: what a gate covers and the witness counts it by."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

FEATURES = ("bias", "dropout", "sinks", "softcap", "value_dim")


class CallClass(NamedTuple):
    """What the gate proves and the witness counts by; `str()` gives `bfloat16/d128/causal`.

    Attributes:
        dtype: `bfloat16`, `float16`, `float32`.
        head_dim: `D`.
        visibility: One of `kernels.visibility.KINDS`.
        features: Sorted, `+`-joined extras out of `FEATURES`.
    """

    dtype: str
    head_dim: int
    visibility: str
    features: str = ""

    def __str__(self) -> str:
        return class_name(*self)


@lru_cache(maxsize=4096)
def class_name(dtype: str, head_dim: int, visibility: str, features: str = "") -> str:
    """The one spelling of a call class."""
    return f"{dtype}/d{head_dim}/{visibility}" + (f"+{features}" if features else "")


@lru_cache(maxsize=64)
def features_name(
    *,
    bias: bool = False,
    dropout: bool = False,
    sinks: bool = False,
    softcap: bool = False,
    value_dim: bool = False,
) -> str:
    """The features of a class, in the one order that they are written in."""
    present = {
        "bias": bias,
        "dropout": dropout,
        "sinks": sinks,
        "softcap": softcap,
        "value_dim": value_dim,
    }
    return "+".join(name for name in FEATURES if present[name])


@lru_cache(maxsize=16)
def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")
