"""The attention functions registered with transformers.

One call: which keys each row sees is read from the mask and the arguments, query, key and value
are brought to one dtype, and `dispatch.run_call` refuses or runs. Softcap, sinks and dropout go
along as they are; the backend honours or refuses them.

Shapes: `B` batch, `H` query heads, `G` key/value heads, `M` query length, `N` key length, `D` head
dim, `E` the value's head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_attn_backends.dispatch import run_call
from hf_attn_backends.hf import arguments, paged
from hf_attn_backends.hf.call_visibility import (
    visibility_of_arguments,
    visibility_of_scalars,
    window_counts,
)

_C: Any = torch._C
_any_autocast = _C._is_any_autocast_enabled  # of any device: cheaper than asking for one


def attention_function(backend: str) -> Callable[..., tuple[Tensor, None]]:
    """The attention function of one registered name."""

    def attention(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        is_causal: bool | None = None,
        position_ids: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        use_cache: bool | None = None,
        **rest: Any,
    ) -> tuple[Tensor, None]:
        """Attend; transformers' contract of an attention function.

        Args:
            module: The attention module; says `is_causal` where the call does not.
            query: `[B, H, M, D]`.
            key: `[B, G, N, D]`.
            value: `[B, G, N, E]`.
            attention_mask: None, or four dimensions; see `custom_masks`.
            dropout: Probability; 0 in evaluation.
            scaling: Factor of the scores; None is `D ** -0.5`.
            sliding_window: Keys a row sees, its own included; counts where there is no mask.
            softcap: `c` in `c * tanh(scores / c)`.
            s_aux: `[H]` sink logits.
            is_causal: Over the module's own.
            position_ids: `[1 or B, M]`; tell packed samples apart where there is no mask.
            cu_seq_lens_q, cu_seq_lens_k: Likewise, as cumulative lengths.
            use_cache: Whether the model keeps a cache; None where the family does not say.
            rest: Anything else; see `arguments`.

        Returns:
            `[B, M, H, E]` contiguous, in the dtype that the output projection takes, and None.
        """
        over_pages = paged.MARK in rest and cu_seq_lens_q is not None
        if rest and not over_pages:
            arguments.check(backend, rest)
        compiling = torch.compiler.is_compiling()
        if not query.dtype == key.dtype == value.dtype or (
            (compiling or _any_autocast()) and torch.is_autocast_enabled(query.device.type)
        ):
            target = _one_dtype(module, query, key, value)
            query, key, value = query.to(target), key.to(target), value.to(target)
        batch, _, q_length, _ = query.shape
        key_batch, _, k_length, _ = key.shape
        if batch != key_batch and batch == 1:  # learned queries
            query, batch = query.expand(key_batch, -1, -1, -1), key_batch
        if over_pages and cu_seq_lens_q is not None:
            extras = paged.Extras(scaling, softcap, s_aux, dropout)
            out = paged.attend(
                backend, module, query, key, value, sliding_window, cu_seq_lens_q, cu_seq_lens_k,
                extras, rest,
            )  # fmt: skip
            return out.transpose(1, 2).contiguous(), None
        if sliding_window is not None and not window_counts(module):
            sliding_window = None
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if attention_mask is None and cu_seq_lens_q is None and not compiling:
            visibility = visibility_of_scalars(
                batch, q_length, k_length, sliding_window, causal, position_ids
            )  # fmt: skip
        else:
            visibility = visibility_of_arguments(
                batch, q_length, k_length, attention_mask, sliding_window, causal, position_ids,
                cu_seq_lens_q, cu_seq_lens_k,
            )  # fmt: skip
        out = run_call(
            backend,
            query,
            key,
            value,
            visibility,
            scale=scaling,
            softcap=softcap,
            sinks=s_aux,
            dropout_p=dropout,
            has_cache=k_length != q_length or _keeps_a_cache(use_cache),
        )
        return out.transpose(1, 2).contiguous(), None

    attention.__name__ = attention.__qualname__ = f"{backend}_attention"
    return attention


def _keeps_a_cache(use_cache: bool | None) -> bool:
    """Whether a call as long as its keys may be a prompt's; not every family passes `use_cache`.

    Where it does not, only a call that wants no gradients can be: right either way, for a backend
    that decodes serves it like any other.
    """
    return not torch.is_grad_enabled() if use_cache is None else use_cache


def _one_dtype(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor) -> torch.dtype:
    """The dtype to compute in, by transformers' rule for flash attention.

    Under autocast rotary embeddings leave query and key in fp32 beside a bf16 value; a norm kept
    in fp32 does the same without autocast. An operator of one's own is on no list of autocast's.
    """
    device = query.device.type
    if torch.is_autocast_enabled(device):
        if any(x.dtype == torch.float64 for x in (query, key, value)):
            return query.dtype
        return torch.get_autocast_dtype(device)
    if query.dtype != torch.float32:
        return query.dtype
    config: Any = getattr(module, "config", None)
    if hasattr(config, "_is_quantized") and isinstance(config.dtype, torch.dtype):
        return config.dtype
    for layer in module.modules():
        if isinstance(layer, torch.nn.Linear):
            return layer.weight.dtype
    return value.dtype
