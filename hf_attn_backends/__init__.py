"""Attention for Hugging Face transformers that carries its own proof.

Importing this package makes `attn_implementation="triton_fa2"`, `"triton_decode"` and `"auto"`
valid in transformers, and routes Mistral's loading through the selector. It imports neither torch
nor Triton, touches no CUDA, and costs milliseconds: the public names below are loaded on first use.

    import hf_attn_backends
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="triton_fa2")

`patch(LlamaPreTrainedModel)` brings the same gated loading to another family.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

from hf_attn_backends.hf.register import register, unregister

if TYPE_CHECKING:
    from hf_attn_backends.backends.base import AttentionBackend, BackendReport
    from hf_attn_backends.backends.factory import AttentionBackendFactory
    from hf_attn_backends.bench import (
        benchmark_backends,
        benchmark_backends_with_reasons,
        load_sdpa_baseline,
    )
    from hf_attn_backends.call import AttentionCall
    from hf_attn_backends.dispatch import ATTN_BACKEND, attention, attn_backend, get_backend
    from hf_attn_backends.errors import (
        AttentionBackendError,
        BackendChangedError,
        BackendRefusedError,
        BannerIncompleteError,
        BenchmarkError,
        CallError,
        CallRefusedError,
        ExecutionMismatchError,
        GateError,
        GateFailedError,
        GateInvalidError,
        GateMissingError,
        GateNotImplementedError,
        GateStaleError,
        InvalidCallError,
        InvalidDtypeError,
        LaunchError,
        RecordError,
        RegistrationError,
        RegistryCorruptError,
        SelectionError,
        UnknownBackendError,
    )
    from hf_attn_backends.hf.callback import AttentionBackendCallback
    from hf_attn_backends.hf.decisions import decision_of
    from hf_attn_backends.hf.patching import patch, unpatch
    from hf_attn_backends.selection import (
        ALL_BACKENDS,
        TRITON_FA2_GATE_MODULE,
        Decision,
        banner_value,
        probe_backends,
        select_attn_implementation,
    )

__all__ = [  # noqa: RUF022 - in the plain order of sorted()
    "ALL_BACKENDS",
    "ATTN_BACKEND",
    "AttentionBackend",
    "AttentionBackendCallback",
    "AttentionBackendError",
    "AttentionBackendFactory",
    "AttentionCall",
    "BackendChangedError",
    "BackendRefusedError",
    "BackendReport",
    "BannerIncompleteError",
    "BenchmarkError",
    "CallError",
    "CallRefusedError",
    "Decision",
    "ExecutionMismatchError",
    "GateError",
    "GateFailedError",
    "GateInvalidError",
    "GateMissingError",
    "GateNotImplementedError",
    "GateStaleError",
    "InvalidCallError",
    "InvalidDtypeError",
    "LaunchError",
    "RecordError",
    "RegistrationError",
    "RegistryCorruptError",
    "SelectionError",
    "TRITON_FA2_GATE_MODULE",
    "UnknownBackendError",
    "attention",
    "attn_backend",
    "banner_value",
    "benchmark_backends",
    "benchmark_backends_with_reasons",
    "decision_of",
    "get_backend",
    "load_sdpa_baseline",
    "patch",
    "probe_backends",
    "register",
    "select_attn_implementation",
    "unpatch",
    "unregister",
]

_SUBMODULES = frozenset(
    (
        "backends", "bench", "call", "dispatch", "environment", "errors", "gate", "hf", "kernels",
        "reference", "registry", "report", "selection", "witness",
    )
)  # fmt: skip

_MODULE_OF = {
    "AttentionBackend": "backends.base",
    "AttentionBackendCallback": "hf.callback",
    "AttentionBackendFactory": "backends.factory",
    "AttentionCall": "call",
    "decision_of": "hf.decisions",
    **dict.fromkeys(("patch", "unpatch"), "hf.patching"),
    **dict.fromkeys(("ATTN_BACKEND", "attention", "attn_backend", "get_backend"), "dispatch"),
    **dict.fromkeys(
        ("benchmark_backends", "benchmark_backends_with_reasons", "load_sdpa_baseline"), "bench"
    ),
    **dict.fromkeys(
        (
            "ALL_BACKENDS", "BackendReport", "Decision", "TRITON_FA2_GATE_MODULE", "banner_value",
            "probe_backends", "select_attn_implementation",
        ),
        "selection",
    ),
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Load a public name, or a submodule, on first use.

    Nothing is kept here: a name is always read from the module that defines it.
    """
    if name in _MODULE_OF:
        return getattr(_import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    if name in _SUBMODULES:
        return _import_module(f"{__name__}.{name}")
    if name in __all__:
        return getattr(_import_module(f"{__name__}.errors"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})


register()
