"""What a plain `hf-attn gate` measures: the classes of calls that are common."""

from __future__ import annotations

from hf_attn_backends.call import CallClass
from hf_attn_backends.gate.artifact import device_kind
from hf_attn_backends.kernels.visibility import KINDS

GRIDS = {
    "cpu": {"float32": (16, 32, 64, 72, 80, 96, 128), "bfloat16": (64, 128), "float16": (128,)},
    "cuda": {
        "bfloat16": (64, 96, 128, 256),
        "float16": (64, 96, 128, 256),
        "float32": (64, 128),
    },
}
# Features where they are common: softcap in Gemma 2, sinks in gpt-oss, dropout in training. On a
# GPU the plain classes take all the time that a gate may; features are measured there when they are
# asked for, by `hf-attn gate --feature`.
FEATURE_GRIDS: dict[str, dict[str, tuple[str, tuple[int, ...], tuple[str, ...]]]] = {
    "cpu": {
        "softcap": ("float32", (64,), ("causal", "window", "intervals")),
        "sinks": ("float32", (64,), ("causal", "window", "intervals")),
        "dropout": ("float32", (32, 64), ("causal",)),
    },
    "cuda": {},
}


def default_grid(device: object = None) -> list[CallClass]:
    """The classes of a plain `hf-attn gate`."""
    device_type = "cuda" if device_kind(device).startswith("cuda") else "cpu"
    plain = [
        CallClass(dtype, dim, kind)
        for dtype, dims in GRIDS[device_type].items()
        for dim in dims
        for kind in KINDS
    ]
    featured = [
        CallClass(dtype, dim, kind, feature)
        for feature, (dtype, dims, kinds) in FEATURE_GRIDS[device_type].items()
        for dim in dims
        for kind in kinds
    ]
    return plain + featured
