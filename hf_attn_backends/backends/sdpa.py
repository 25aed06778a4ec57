"""PyTorch's scaled_dot_product_attention; which of its kernels runs is PyTorch's choice.

Its `is_causal` is aligned to the first key, ours to the last one, so it is used only where the
two agree; else the mask is written out.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_attn_backends.backends.base import AttentionBackend, ProbeContext
from hf_attn_backends.backends.counting import count_forward, with_backward_counted
from hf_attn_backends.backends.masks import no_keys, seen_mask
from hf_attn_backends.call import AttentionCall
from hf_attn_backends.kernels.visibility import FULL, Visibility


class SdpaBackend(AttentionBackend, any_length=True):
    """`torch.nn.functional.scaled_dot_product_attention`."""

    name = "sdpa"
    counts_itself = True

    def praise(self, context: ProbeContext) -> str:
        """It needs torch alone."""
        return f"sdpa is PyTorch {torch.__version__}'s scaled_dot_product_attention"

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
        """As `AttentionBackend.forward`; softcap and sinks were refused."""
        count_forward(self.name, call)
        heads, q_len = query.shape[1], query.shape[2]
        groups, k_len = key.shape[1], key.shape[2]
        if k_len == 0:
            return no_keys(query, value)
        causal, mask = False, None
        if visibility.causal and (visibility.window is None or visibility.window >= k_len):
            # Branches and not an expression: sizes are symbols inside a traced graph.
            if q_len == k_len:
                causal = True
            elif q_len > 1:
                mask = seen_mask(visibility, q_len, k_len, query.device)
        else:
            mask = seen_mask(visibility, q_len, k_len, query.device)
        if bias is not None:
            lowest = torch.finfo(bias.dtype).min
            hidden = bias <= lowest if mask is None else (bias <= lowest) | ~mask
            mask = bias.masked_fill(hidden, -torch.inf)
        grouped = True if groups != heads else False  # noqa: SIM210
        if grouped and mask is not None:
            # With a mask no fused kernel takes grouped heads, and MATH would be chosen; repeating
            # them, as transformers does, keeps EFFICIENT and CUDNN in the choice.
            key = key.repeat_interleave(heads // groups, 1)
            value = value.repeat_interleave(heads // groups, 1)
            grouped = False
        out = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=dropout_p,
            is_causal=causal,
            scale=scale,
            enable_gqa=grouped,
        )
        # Under causality every row sees its own key, unless there are more rows than keys.
        if mask is not None and (bias is not None or not visibility.causal or q_len > k_len):
            # CUDNN gives the mean value to a row that sees nothing, the other kernels 0. Filling
            # takes the row out of the gradients as well: its output's gradient is 0.
            some = mask if mask.dtype == torch.bool else mask > -torch.inf
            out = out.masked_fill(~some.any(-1, keepdim=True), 0.0)
        return with_backward_counted(out, self.name, call)
