"""PyTorch's FlexAttention: compiled on a GPU; on a CPU the forward pass alone, uncompiled."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hf_attn_backends.backends.base import AttentionBackend, ProbeContext
from hf_attn_backends.backends.counting import count_forward, with_backward_counted
from hf_attn_backends.backends.masks import no_keys
from hf_attn_backends.call import AttentionCall
from hf_attn_backends.kernels.visibility import FULL, Visibility


class FlexBackend(AttentionBackend, any_length=True):
    """`torch.nn.attention.flex_attention.flex_attention`."""

    name = "flex_attention"
    counts_itself = True

    def praise(self, context: ProbeContext) -> str:
        """Says where there is no backward pass."""
        if context.torch_device.type == "cpu":
            return f"flex_attention is PyTorch {torch.__version__}'s; on a CPU forward only, slow"
        return f"flex_attention is PyTorch {torch.__version__}'s, compiled at the first call"

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        call: AttentionCall,
        *,
        visibility: Visibility = FULL,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        dropout_p: float = 0.0,
        bias: Tensor | None = None,
    ) -> Tensor:
        """As `AttentionBackend.forward`; dropout and biases were refused.

        Sinks enter through the log-sum-exp: `out * sigmoid(lse - sink)`.
        """
        from torch.nn.attention.flex_attention import AuxRequest

        count_forward(self.name, call)
        if key.shape[2] == 0 or query.shape[2] == 0 or query.shape[0] == 0:
            return no_keys(query, value)
        if query.device.type == "cpu":
            # It looks at requires_grad and not at whether a graph is being built.
            query, key, value = query.detach(), key.detach(), value.detach()

        out: Any = _flex(query.device.type)(
            query,
            key,
            value,
            score_mod=None if softcap is None else _capped_at(softcap),
            block_mask=_block_mask(visibility, query, key),
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
            return_aux=None if sinks is None else AuxRequest(lse=True),
        )
        if sinks is not None:
            out, aux = out
            share = torch.sigmoid(aux.lse - sinks.to(aux.lse.dtype)[None, :, None])
            out = (out * share[..., None]).to(out.dtype)  # rounded once
        return with_backward_counted(out, self.name, call)


@lru_cache(maxsize=2)
def _flex(device_type: str) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    # Uncompiled it writes out all scores; compiled, a CPU build needs a C++ compiler.
    return torch.compile(flex_attention) if device_type == "cuda" else flex_attention


def _block_mask(visibility: Visibility, query: Tensor, key: Tensor) -> Any:
    """The block mask of a visibility, or None where every key is seen."""
    from torch.nn.attention.flex_attention import create_block_mask

    q_len, k_len = query.shape[2], key.shape[2]
    if visibility.kind == "full":
        return None
    if visibility.causal:
        mode = torch.is_inference_mode_enabled()  # its tensors serve no backward pass
        return _scalar_block_mask(visibility.window, q_len, k_len, query.device, mode)
    batches = heads = None  # None: the same for all
    if visibility.intervals is not None:
        seen = _between(visibility.intervals)
        batches = visibility.intervals.shape[0]
    else:
        dense: Any = visibility.dense
        # Zero strides of a broadcast mask are kept: it is indexed, not copied.
        seen = _where(dense.expand(query.shape[0], query.shape[1], q_len, k_len))
        batches, heads = dense.shape[:2]
    return create_block_mask(
        seen,
        None if batches == 1 else batches,
        None if heads == 1 else heads,
        q_len,
        k_len,
        device=str(query.device),
    )


def _capped_at(softcap: float) -> Callable[..., Tensor]:
    def capped(score, batch, head, row, column):
        return softcap * torch.tanh(score / softcap)

    return capped


def _between(intervals: Tensor) -> Callable[..., Tensor]:
    def seen(batch, head, row, column):
        return (column >= intervals[batch, row, 0]) & (column < intervals[batch, row, 1])

    return seen


def _where(mask: Tensor) -> Callable[..., Tensor]:
    def seen(batch, head, row, column):
        return mask[batch, head, row, column]

    return seen


@lru_cache(maxsize=16)
def _scalar_block_mask(
    window: int | None, q_len: int, k_len: int, device: torch.device, inference: bool
) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    # Tensors and not Python numbers: those would be guarded, and each length compiled anew.
    offset = torch.tensor(k_len - q_len, device=device)
    width = torch.tensor(k_len + q_len if window is None else window, device=device)

    def seen(batch, head, row, column):
        last = row + offset
        return (column <= last) & (column > last - width)

    return create_block_mask(seen, None, None, q_len, k_len, device=str(device))
