"""The backends: one file each, one table of what they can do, one factory."""

from __future__ import annotations

from hf_attn_backends.backends.base import AttentionBackend, BackendReport, ProbeContext
from hf_attn_backends.backends.capabilities import CAPABILITIES, Capability
from hf_attn_backends.backends.dims import ModelDims
from hf_attn_backends.backends.eager import EagerBackend
from hf_attn_backends.backends.factory import AttentionBackendFactory, backend_of
from hf_attn_backends.backends.flash_attention_2 import FlashAttentionBackend
from hf_attn_backends.backends.flash_attention_3 import FlashAttention3Backend
from hf_attn_backends.backends.flashmla import FlashMLABackend
from hf_attn_backends.backends.flex_attention import FlexBackend
from hf_attn_backends.backends.names import ALL_BACKENDS, AUTO
from hf_attn_backends.backends.sdpa import SdpaBackend
from hf_attn_backends.backends.triton_decode import TritonDecodeBackend
from hf_attn_backends.backends.triton_fa2 import TritonFA2Backend

__all__ = [
    "ALL_BACKENDS",
    "AUTO",
    "CAPABILITIES",
    "AttentionBackend",
    "AttentionBackendFactory",
    "BackendReport",
    "Capability",
    "EagerBackend",
    "FlashAttention3Backend",
    "FlashAttentionBackend",
    "FlashMLABackend",
    "FlexBackend",
    "ModelDims",
    "ProbeContext",
    "SdpaBackend",
    "TritonDecodeBackend",
    "TritonFA2Backend",
    "backend_of",
]
