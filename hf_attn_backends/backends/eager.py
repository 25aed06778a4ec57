"""Attention written out in PyTorch: slow, all of it in memory, serves everything.

As transformers' eager attention: scores in the input's dtype, softmax in float32 (float64 for
float64), weights rounded back. Different from it in one thing: a row that sees nothing gives 0.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_attn_backends.backends.base import AttentionBackend, ProbeContext
from hf_attn_backends.backends.counting import count_forward, with_backward_counted
from hf_attn_backends.backends.masks import no_keys, seen_mask, split_bias
from hf_attn_backends.call import AttentionCall
from hf_attn_backends.kernels.visibility import FULL, Visibility


class EagerBackend(AttentionBackend, any_length=True):
    """The scores as one tensor `[B, H, M, N]`."""

    name = "eager"
    counts_itself = True

    def praise(self, context: ProbeContext) -> str:
        """It needs torch alone."""
        return f"eager is plain PyTorch {torch.__version__}, serves every call, O(S^2) memory"

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
        """As `AttentionBackend.forward`."""
        count_forward(self.name, call)
        batch, heads, q_len, head_dim = query.shape
        groups, k_len = key.shape[1], key.shape[2]
        if k_len == 0:
            return no_keys(query, value)
        factor = head_dim**-0.5 if scale is None else scale
        by_group = query.unflatten(1, (groups, heads // groups))
        scores = (by_group @ key.unsqueeze(2).transpose(-1, -2)).flatten(1, 2) * factor
        scores = scores if scores.dtype == torch.float64 else scores.float()
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        seen = seen_mask(visibility, q_len, k_len, query.device)
        if bias is not None:
            kept, bias = split_bias(bias)
            seen = kept if seen is None else kept & seen
            scores = scores + bias
        if seen is not None:
            # The lowest number and not -inf: a row that sees nothing would be NaN, and so would
            # its gradients, whatever is written over the output afterwards.
            scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
        if sinks is not None:
            column = sinks.to(scores.dtype)[None, :, None, None].expand(batch, heads, q_len, 1)
            weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        if seen is not None:
            weights = weights.masked_fill(~seen, 0.0)
        weights = F.dropout(weights.to(query.dtype), dropout_p)
        out = weights.unflatten(1, (groups, heads // groups)) @ value.unsqueeze(2)
        return with_backward_counted(out.flatten(1, 2), self.name, call)
