"""Decoding with a KV cache, under its own name in the witness."""

from __future__ import annotations

from hf_attn_backends.backends.base import ProbeContext
from hf_attn_backends.backends.triton_fa2 import TritonFA2Backend


class TritonDecodeBackend(TritonFA2Backend, any_length=True):
    """Calls that come with a KV cache and need no gradient.

    Up to 16 query rows run the decode kernel (keys split among programs, a key head's group of
    query heads packed); longer chunks, and dense masks, run what `triton_fa2` runs.
    """

    name = "triton_decode"

    def praise(self, context: ProbeContext) -> str:
        """Says which kernels run."""
        return f"{super().praise(context)}; up to 16 query rows run the split-KV decode kernel"
