"""FlashMLA: always refused here, and accurately so, from the model's dimensions alone.

Its decode kernel computes latent attention: query head_dim 576, value head_dim 512 ("head_dim_v:
Must be 512", flash_mla_interface.py), one key/value head. It also ships a dense multi-head prefill
for SM100 (key head_dim 192 or 128, value 128), whose backward pass raises "SM100 bwd doesn't
support GQA now". So which contract fails depends on the model; no GPU changes it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_attn_backends.backends.base import AttentionBackend, BackendReport, ProbeContext
from hf_attn_backends.backends.dims import ModelDims
from hf_attn_backends.call import AttentionCall
from hf_attn_backends.errors import CallRefusedError, compose

_LATENT_HEAD_DIM, _LATENT_VALUE_HEAD_DIM = 576, 512


class FlashMLABackend(AttentionBackend, any_length=True):
    """Refuses every request; the environment is never asked."""

    name = "flashmla"

    def structural_refusals(self, dims: ModelDims) -> list[str]:
        """Which of FlashMLA's contracts the model breaks."""
        if dims.kv_lora_rank is not None:
            return [
                f"flashmla needs an MLA integration: its kernel reads the compressed latent cache "
                f"(head_dim {_LATENT_HEAD_DIM}, value head_dim {_LATENT_VALUE_HEAD_DIM}), and "
                f"transformers' attention interface hands over the expanded heads (head_dim "
                f"{dims.head_dim}, value head_dim {dims.v_head_dim})"
            ]
        who = dims.describe() if dims.head_dim is not None else "a grouped-query model"
        reasons = [
            f"flashmla's decode kernel needs value head_dim {_LATENT_VALUE_HEAD_DIM} and query "
            f"head_dim {_LATENT_HEAD_DIM} over one latent key/value head, which is not {who}"
        ]
        if dims.grouped or dims.heads is None:
            reasons.append(
                "flashmla's prefill kernel (SM100, key head_dim 192 or 128, value head_dim 128) "
                "has no backward pass for GQA, so it cannot train this model"
            )
        else:
            reasons.append(
                "flashmla's prefill kernel (SM100, key head_dim 192 or 128, value head_dim 128) "
                "is not integrated here"
            )
        return reasons

    def probe(self, context: ProbeContext) -> BackendReport:
        """Structure alone, also where no model is known: any model that comes through here."""
        refusals = tuple(self.structural_refusals(context.dims or ModelDims()))
        return BackendReport(self.name, False, refusals[0], refusals)

    def environment_refusals(self, device: torch.device) -> list[str]:
        """None is asked: no machine could change the answer."""
        return []

    def available(self) -> bool:
        """Never."""
        return False

    def refusals(self, call: AttentionCall) -> list[str]:
        """The structural reasons, from the call's own dimensions."""
        return self.structural_refusals(
            ModelDims(
                head_dim=call.head_dim,
                v_head_dim=call.value_head_dim,
                heads=call.heads,
                kv_heads=call.kv_heads,
            )
        )

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall, **kwargs: Any
    ) -> Tensor:
        """Refuses, for those who call it without asking."""
        reasons = self.refusals(call)
        raise CallRefusedError(compose("flashmla cannot serve this call", reasons), reasons)
