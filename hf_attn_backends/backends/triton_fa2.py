"""The project's own kernels (`kernels/`), forward and backward, gated."""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor

from hf_attn_backends.backends import proof
from hf_attn_backends.backends.base import AttentionBackend, ProbeContext
from hf_attn_backends.backends.capabilities import CAPABILITIES
from hf_attn_backends.backends.proof import forget
from hf_attn_backends.call import AttentionCall, dtype_name
from hf_attn_backends.kernels.visibility import FULL, Visibility

__all__ = ["TritonFA2Backend", "forget"]

_attend: Any = None  # kernels.ops.triton_attention, once it was needed: importing it loads triton


class TritonFA2Backend(AttentionBackend, any_length=True):
    """FlashAttention-2 in Triton; the operator counts its launches itself."""

    name = "triton_fa2"
    gated = True
    counts_itself = True
    counts_in_graphs = True
    remedy = "pip install triton"

    def refusals(self, call: AttentionCall) -> list[str]:
        """The table's reasons, the kernel's own (the interpreter, the device), the gate's."""
        found = super().refusals(call)
        if not found:  # a call that the table lets through is what the kernel is asked about
            variants = importlib.import_module("hf_attn_backends.kernels.variants")
            found = variants.kernel_refusals(
                call.device, call.dtype, call.head_dim, call.value_head_dim
            )
        row = CAPABILITIES[self.name]
        if (
            call.bias
            or dtype_name(call.dtype) not in row.dtypes
            or not (row.takes_head_dim(call.head_dim))
        ):
            return found  # no gate can measure what the kernel does not implement
        return [*found, *proof.call_refusals(call)]

    def prepare_tracing(self) -> None:
        """Import the kernels."""
        _operator()

    def praise(self, context: ProbeContext) -> str:
        """Cites the artifact, and what a CPU needs."""
        summary = context.gate_verdict.summary or {}
        digest = str(summary.get("artifact_sha256") or summary.get("sha256") or "")[:12]
        reason = f"{self.name}: the equivalence gate vouches for it (artifact {digest}…)"
        if context.gate_verdict.note:
            reason += f"; {context.gate_verdict.note}"
        if context.torch_device.type == "cpu":
            reason += "; on a CPU it runs in Triton's interpreter (TRITON_INTERPRET=1)"
        return reason

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
        """As `AttentionBackend.forward`; what the kernel does not implement was refused."""
        attend = _attend or _operator()
        return attend(
            query, key, value, visibility, scale=scale, softcap=softcap, sinks=sinks,
            dropout_p=dropout_p, backend=self.name,
        )  # fmt: skip


def _operator() -> Any:
    global _attend
    if _attend is None:
        _attend = importlib.import_module("hf_attn_backends.kernels.ops").triton_attention
    return _attend
