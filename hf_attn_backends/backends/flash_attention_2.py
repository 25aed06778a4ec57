"""The flash-attn package, version 2: FlashAttention-2 in CUDA (arXiv 2307.08691)."""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from hf_attn_backends.backends import machine
from hf_attn_backends.backends.base import AttentionBackend, ProbeContext
from hf_attn_backends.backends.counting import count_forward, with_backward_counted
from hf_attn_backends.call import AttentionCall
from hf_attn_backends.kernels.visibility import FULL, Visibility

_OLDEST = (2, 6)  # the first with softcap; from 2.1 on causal is aligned to the last key


class FlashAttentionBackend(AttentionBackend, any_length=True):
    """`flash_attn.flash_attn_func`; calls without a mask tensor, in half precision."""

    name = "flash_attention_2"
    counts_itself = True
    remedy = "pip install flash-attn --no-build-isolation"

    def environment_refusals(self, device: torch.device) -> list[str]:
        """Device and package, and whether the package is the one that is meant."""
        found = super().environment_refusals(device)
        if found:
            return found
        # FlashAttention-4 is distributed under the same module name.
        version = machine.version_of("flash-attn")
        if version is None:
            return [f"{self.name} needs the distribution flash-attn; flash_attn here is another's"]
        if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < _OLDEST:
            return [f"{self.name} needs flash-attn 2.6 or newer, and {version} is installed"]
        return []

    def praise(self, context: ProbeContext) -> str:
        """Names the installed version."""
        return f"flash_attention_2 is flash-attn {machine.version_of('flash-attn')}"

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
        """As `AttentionBackend.forward`; masks, sinks and biases were refused."""
        count_forward(self.name, call)
        window = (-1, -1) if visibility.window is None else (visibility.window - 1, 0)
        out = importlib.import_module("flash_attn").flash_attn_func(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            dropout_p=dropout_p,
            softmax_scale=scale,
            causal=visibility.causal,
            window_size=window,
            softcap=softcap or 0.0,
        )
        return with_backward_counted(out.transpose(1, 2), self.name, call)
