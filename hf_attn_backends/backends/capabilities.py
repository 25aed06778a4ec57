"""One table of what each backend can do; refusals, doctor and README's matrix come out of it.

What depends on the machine (packages, devices, the gate) is asked elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from hf_attn_backends.kernels.visibility import KINDS

_HALF = ("bfloat16", "float16")
_TORCH = ("float64", "float32", "bfloat16", "float16")
_SCALARS = ("full", "causal", "window")


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """What one backend can serve.

    Attributes:
        devices: Device types.
        min_capability, max_capability: CUDA compute capabilities, both included; None: no bound.
        dtypes: Of query, key and value.
        min_head_dim, max_head_dim, head_dim_multiple: The head dims that its kernels have.
        value_head_dim: Whether the value's head dim may differ from the query's.
        visibilities: Kinds of masks, out of `kernels.visibility.KINDS`.
        softcap, sinks, bias, dropout: Whether it honours them; it refuses what it does not.
        backward: Device types on which it has a backward pass.
        cache_only: Whether it serves only calls whose key and value come from a KV cache.
        unequal_lengths: Whether q_len may differ from k_len.
        exclusive: Pairs of features that it cannot serve in one call.
        package: The module that has to be importable; None: torch alone.
    """

    devices: tuple[str, ...] = ("cpu", "cuda")
    min_capability: tuple[int, int] | None = None
    max_capability: tuple[int, int] | None = None
    dtypes: tuple[str, ...] = _TORCH
    min_head_dim: int = 1
    max_head_dim: int | None = None
    head_dim_multiple: int = 1
    value_head_dim: bool = True
    visibilities: tuple[str, ...] = KINDS
    softcap: bool = False
    sinks: bool = False
    bias: bool = False
    dropout: bool = False
    backward: tuple[str, ...] = ("cpu", "cuda")
    cache_only: bool = False
    unequal_lengths: bool = True
    exclusive: tuple[tuple[str, str], ...] = ()
    package: str | None = None

    def head_dims_text(self) -> str:
        """`8 to 256 in multiples of 8`, or `any`."""
        if self.max_head_dim is None:
            return "any"
        span = f"{self.min_head_dim} to {self.max_head_dim}"
        step = self.head_dim_multiple
        return span if step == 1 else f"{span} in multiples of {step}"

    def takes_head_dim(self, head_dim: int) -> bool:
        """Whether its kernels exist for this head dim."""
        least = head_dim >= self.min_head_dim and head_dim % self.head_dim_multiple == 0
        return least and (self.max_head_dim is None or head_dim <= self.max_head_dim)


_TRITON = {
    "min_capability": (8, 0),
    "dtypes": ("float32", *_HALF),
    "min_head_dim": 16,
    "max_head_dim": 256,
    "softcap": True,
    "sinks": True,
    "package": "triton",
}
_FLASH = {
    "devices": ("cuda",),
    "dtypes": _HALF,
    "min_head_dim": 8,
    "max_head_dim": 256,
    "head_dim_multiple": 8,
    "value_head_dim": False,
    "visibilities": _SCALARS,
    "softcap": True,
    "backward": ("cuda",),
}

CAPABILITIES: dict[str, Capability] = {
    "eager": Capability(softcap=True, sinks=True, bias=True, dropout=True),
    "sdpa": Capability(bias=True, dropout=True),
    # flash_attn_interface.py: "Softcapping does not support dropout for now".
    "flash_attention_2": Capability(
        **_FLASH,
        min_capability=(8, 0),
        dropout=True,
        exclusive=(("softcap", "dropout"),),
        package="flash_attn",
    ),
    # Built for sm_90 alone: a lower bound without an upper one lets sm_120 pick it and crash.
    "flash_attention_3": Capability(
        **_FLASH, min_capability=(9, 0), max_capability=(9, 0), package="flash_attn_interface"
    ),
    # torch.nn.attention.flex_attention: "FlexAttention does not support backward on CPU".
    "flex_attention": Capability(softcap=True, sinks=True, backward=("cuda",)),
    "triton_fa2": Capability(**_TRITON, dropout=True),
    "triton_decode": Capability(**_TRITON, backward=(), cache_only=True),
    # Dense decode alone; here for the matrix, its refusals are structural.
    "flashmla": Capability(
        devices=("cuda",),
        min_capability=(9, 0),
        max_capability=(9, 0),
        dtypes=_HALF,
        min_head_dim=576,
        max_head_dim=576,
        visibilities=("full", "causal"),
        backward=(),
        cache_only=True,
        package="flash_mla",
    ),
}
