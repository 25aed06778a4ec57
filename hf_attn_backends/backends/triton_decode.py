"""Decoding with a KV cache; until its own kernel exists it runs the portable forward pass."""

from __future__ import annotations

from hf_attn_backends.backends.base import ProbeContext
from hf_attn_backends.backends.triton_fa2 import TritonFA2Backend


class TritonDecodeBackend(TritonFA2Backend):
    """Calls that come with a KV cache and need no gradient, under its own name in the witness."""

    name = "triton_decode"

    def praise(self, context: ProbeContext) -> str:
        """Says which kernel really runs."""
        return f"{super().praise(context)}; it runs triton_fa2's portable forward kernel for now"
