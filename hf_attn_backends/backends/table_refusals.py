"""The refusals that the capability table gives: of one call, and of a model on any machine.

Each is derived from a row, so that the table cannot say one thing and the code another.
"""

from __future__ import annotations

from hf_attn_backends.backends.capabilities import Capability
from hf_attn_backends.backends.dims import ModelDims
from hf_attn_backends.call import AttentionCall, dtype_name

_FEATURES = {
    "softcap": "softcap (tanh-capped scores)",
    "sinks": "sinks (a logit per head in the denominator)",
    "bias": "an additive mask (pass a bool attn_mask where it only hides keys)",
    "dropout": "dropout of attention weights",
}


def call_refusals(name: str, capability: Capability, call: AttentionCall) -> list[str]:
    """Every reason in the table why a backend cannot serve a call; empty where it can."""
    reasons = []
    device, dtype = call.device.type, dtype_name(call.dtype)
    if device not in capability.devices:
        reasons.append(f"{name} runs on {' or '.join(capability.devices)}, the call is on {device}")
    if dtype not in capability.dtypes:
        reasons.append(
            f"{name} computes in {' or '.join(capability.dtypes)}, the call is in {dtype}"
        )
    if not capability.takes_head_dim(call.head_dim):
        reasons.append(
            f"{name} has kernels for head_dim {capability.head_dims_text()}, "
            f"the call has head_dim {call.head_dim}"
        )
    if call.value_head_dim != call.head_dim and not capability.value_head_dim:
        reasons.append(
            f"{name} needs value head_dim = query head_dim, "
            f"got {call.value_head_dim} and {call.head_dim}"
        )
    elif call.value_head_dim != call.head_dim and not capability.takes_head_dim(
        call.value_head_dim
    ):
        reasons.append(
            f"{name} has kernels for value head_dim {capability.head_dims_text()}, "
            f"the call has value head_dim {call.value_head_dim}"
        )
    if call.visibility not in capability.visibilities and not call.bias:
        reasons.append(
            f"{name} serves the visibilities {', '.join(capability.visibilities)}; "
            f"it would ignore this call's mask ({call.visibility})"
        )
    asked = {
        "softcap": call.softcap is not None,
        "sinks": call.sinks,
        "bias": call.bias,
        "dropout": call.dropout_p > 0.0,
    }
    reasons += [
        f"{name} does not implement {_FEATURES[feature]}, and will not ignore it"
        for feature, present in asked.items()
        if present and not getattr(capability, feature)
    ]
    for one, other in capability.exclusive:
        if asked[one] and asked[other]:
            reasons.append(f"{name} cannot serve {one} together with {other} in one call")
    if call.needs_grad and device not in capability.backward:
        where = f"on {' or '.join(capability.backward)} only" if capability.backward else "nowhere"
        reasons.append(f"{name} has a backward pass {where}, the call on {device} needs gradients")
    if capability.cache_only and not call.has_cache:
        reasons.append(f"{name} serves calls with a KV cache only, the call comes without one")
    if call.q_len != call.k_len and not capability.unequal_lengths:
        reasons.append(f"{name} needs q_len = k_len, got {call.q_len} and {call.k_len}")
    return reasons


def structural_refusals(name: str, capability: Capability, dims: ModelDims) -> list[str]:
    """Every reason why no machine at all lets this backend serve a model of these dimensions."""
    reasons = []
    if dims.head_dim is not None and not capability.takes_head_dim(dims.head_dim):
        reasons.append(
            f"{name} has kernels for head_dim {capability.head_dims_text()}, "
            f"the model has head_dim {dims.head_dim}"
        )
    if dims.v_head_dim != dims.head_dim and not capability.value_head_dim:
        reasons.append(
            f"{name} needs value head_dim = query head_dim, "
            f"the model has {dims.v_head_dim} and {dims.head_dim}"
        )
    if dims.softcap is not None and not capability.softcap:
        reasons.append(f"{name} does not implement {_FEATURES['softcap']}, which the model needs")
    return reasons
