"""Keyword arguments that reach an attention function, and what is done with each.

transformers passes on whatever the model was called with. What changes the result is honoured by
the adapter or refused here; what is known to change nothing is accepted. Of the unknown, a tensor
is refused (position biases, block tables and sparse indices are tensors), and anything else is
accepted with one warning.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from hf_attn_backends.errors import CallRefusedError, compose

logger = logging.getLogger(__name__)

INERT = frozenset(
    (
        "cache",
        "cache_position",
        "deterministic",
        "labels",
        "layer_idx",
        "logits_to_keep",
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "past_key_value",
        "past_key_values",
        "position_embeddings",
        "return_dict",
        "seq_idx",
        "use_cache",
    )
)
"""Leak through from the model, the Trainer or a collator, and change no attention."""

_PAGED = "a paged cache is read only as continuous batching hands it out, with cu_seq_lens_q"

REFUSED = {
    "alibi": "an ALiBi bias is not implemented",
    "attention_bias": "an additive bias is not implemented",
    "attn_bias": "an additive bias is not implemented",
    "block_indices": "block-sparse attention is not implemented",
    "block_table": _PAGED,
    "cross_attn_head_mask": "head masks need attention weights, which are never formed",
    "head_mask": "head masks need attention weights, which are never formed",
    "indices": "sparse attention over chosen keys is not implemented",
    "k_cache": _PAGED,
    "layer_head_mask": "head masks need attention weights, which are never formed",
    "output_attentions": "the attention weights are never formed, so none can be returned",
    "position_bias": "a position bias is not implemented",
    "read_index": _PAGED,
    "relative_position_bias": "a position bias is not implemented",
    "score_mod": "score functions are not implemented",
    "sinks": "sinks under this name are not implemented",
    "v_cache": _PAGED,
    "write_index": _PAGED,
}
"""Change the result, and are not served by this package under any of its names."""

_warned: set[str] = set()


def check(backend: str, arguments: dict[str, Any]) -> None:
    """Accept keyword arguments that change nothing.

    Args:
        backend: The name under which the attention function is registered.
        arguments: What came beside the arguments that the adapter reads.

    Raises:
        CallRefusedError: Names every argument that would have been dropped.
    """
    reasons = []
    for name, value in arguments.items():
        if name in INERT or value is None or value is False:
            continue
        if name in REFUSED:
            reasons.append(f"{name} was given, and {REFUSED[name]}")
        elif _holds_tensor(value):
            reasons.append(f"{name} was given, a tensor whose meaning is unknown to the backend")
        elif name not in _warned and not torch.compiler.is_compiling():
            _warned.add(name)
            logger.warning(
                "%s ignores the argument %s=%r of the attention function: unknown, and no tensor",
                backend, name, value,
            )  # fmt: skip
    if reasons:
        raise CallRefusedError(
            compose(
                f"attn_implementation='{backend}' cannot serve this call",
                reasons,
                works='attn_implementation="eager" serves all that the model itself does',
                fix='model.set_attn_implementation("eager")',
            ),
            reasons,
        )


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_holds_tensor(item) for item in value)
    return isinstance(value, torch.Tensor)
