"""FlashAttention-3 (arXiv 2407.08608), the `hopper/` directory of flash-attention: sm_90 only."""

from __future__ import annotations

import importlib

from torch import Tensor

from hf_attn_backends.backends import machine
from hf_attn_backends.backends.base import AttentionBackend, ProbeContext
from hf_attn_backends.backends.counting import count_forward, with_backward_counted
from hf_attn_backends.call import AttentionCall
from hf_attn_backends.kernels.visibility import FULL, Visibility


class FlashAttention3Backend(AttentionBackend, any_length=True):
    """`flash_attn_interface.flash_attn_func`; calls without a mask tensor, in half precision."""

    name = "flash_attention_3"
    counts_itself = True
    remedy = "pip install ./flash-attention/hopper (a checkout of Dao-AILab/flash-attention)"

    def praise(self, context: ProbeContext) -> str:
        """Names the installed version."""
        version = machine.version_of("flash-attn-3") or "of an unknown version"
        return f"flash_attention_3 is flash_attn_interface {version}"

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
        """As `AttentionBackend.forward`; masks, sinks, biases and dropout were refused."""
        count_forward(self.name, call)
        window = (-1, -1) if visibility.window is None else (visibility.window - 1, 0)
        out = importlib.import_module("flash_attn_interface").flash_attn_func(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            softmax_scale=scale,
            causal=visibility.causal,
            window_size=window,
            softcap=softcap or 0.0,
        )
        out = out[0] if isinstance(out, tuple) else out  # builds before 3.0.0b2 add the LSE
        return with_backward_counted(out.transpose(1, 2), self.name, call)
