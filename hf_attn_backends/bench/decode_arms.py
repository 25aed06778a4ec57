"""Who is timed at a decode step, and the check of what it computes.

Shapes: `B` batch, `H` query heads, `G` key/value heads, `N` keys, `D` head dim.
"""

from __future__ import annotations

import importlib
import math

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from hf_attn_backends.bench.arm import Attend, Unavailable
from hf_attn_backends.errors import BenchmarkError
from hf_attn_backends.kernels.visibility import FULL
from hf_attn_backends.reference import attention_reference

ARMS = ("triton_fa2", "FLASH_ATTENTION", "CUDNN_ATTENTION", "flash_attention_3")


def check_name(name: str) -> None:
    """Raise unless an arm, or a kernel of SDPA's, has this name.

    Raises:
        BenchmarkError: Lists the arms.
    """
    if name not in ARMS and not hasattr(SDPBackend, name):
        raise BenchmarkError(f"arm must be one of {', '.join(ARMS)}, got {name!r}")


def attend_of(name: str) -> Attend:
    """The call of an arm.

    Raises:
        Unavailable: It cannot be imported.
    """
    if name == "triton_fa2":
        from hf_attn_backends.kernels.ops import triton_attention

        return lambda query, key, value: triton_attention(query, key, value, FULL)
    if name == "flash_attention_3":
        return _flash_attention_3()
    kernel = getattr(SDPBackend, name)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel([kernel]):
            return scaled_dot_product_attention(query, key, value, enable_gqa=True)

    return attend


def _flash_attention_3() -> Attend:
    missing = []
    for module in ("flash_attn_interface", "fa3_fwd_interface"):
        try:
            function = importlib.import_module(module).flash_attn_with_kvcache
        except (ImportError, AttributeError, OSError) as error:
            missing.append(f"{module}: {type(error).__name__}: {str(error)[:120]}")
            continue

        def attend(query: Tensor, key: Tensor, value: Tensor, function=function) -> Tensor:
            out = function(*(tensor.transpose(1, 2) for tensor in (query, key, value)))
            return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

        return attend
    raise Unavailable("not importable (" + "; ".join(missing) + ")")


def oracle(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, float]:
    """fp64 output of the last sequence's last key head `[1, H / G, 1, D]`, and its terms' size."""
    group = query.shape[1] // key.shape[1]
    picked = query[-1:, -group:], key[-1:, -1:], value[-1:, -1:]
    exact, _ = attention_reference(*picked, visibility=FULL)
    terms, _ = attention_reference(*picked[:2], picked[2].abs(), visibility=FULL)
    return exact, float(terms.max())


def error_of(out: Tensor, exact: Tensor) -> float:
    """Largest error where the oracle was computed; inf where anything is not finite."""
    if not bool(out.isfinite().all()):
        return math.inf
    return float((out[-1:, -exact.shape[1] :].double() - exact).abs().max())


def budget_of(query: Tensor, key: Tensor, value: Tensor, exact: Tensor, size: float) -> float:
    """Twice SDPA's own error, and one rounding of the terms that are summed."""
    out = scaled_dot_product_attention(query, key, value, enable_gqa=True)
    return 2 * error_of(out, exact) + torch.finfo(query.dtype).eps * size
