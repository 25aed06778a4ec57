"""What a mask function of transformers is known to do, from the arguments that come with it.

Shapes: `M` query length, `N` key length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hf_attn_backends.hf import families


@dataclass(frozen=True, slots=True)
class Rule:
    """What a mask function is known to do.

    Attributes:
        causal: Rows see no later position.
        window: With `causal` the keys a row sees, its own included; else how far it sees each way.
        runs: Rows see only keys of their own run: packed samples or chunks.
    """

    causal: bool
    window: int | None = None
    runs: bool = False


def rule_of(
    config: Any,
    local_size: int | None,
    causal_skip: bool,
    bidirectional_skip: bool,
    use_vmap: bool,
    may_be_packed: bool,
) -> Rule | None:
    """The rule behind the arguments, or None where only evaluating the mask function can tell."""
    if bidirectional_skip and not causal_skip:
        return Rule(causal=False, window=local_size)
    if not causal_skip and (
        use_vmap
        or getattr(config, "model_type", None) not in families.PLAIN
        or getattr(config, "is_causal", True) is False
    ):
        return None
    # In a plain decoder what forbids to leave the mask out is packing (no mask, no cache), or a
    # static cache's decode step: the first is told by the runs, the second by the positions.
    packed = not causal_skip and may_be_packed
    if local_size is None:
        return Rule(causal=True, runs=packed)
    is_chunk = getattr(config, "attention_chunk_size", None) == local_size
    is_window = getattr(config, "sliding_window", None) == local_size
    if is_chunk == is_window:  # both, or a size that the configuration does not know
        return None
    if is_chunk:
        return Rule(causal=True, runs=True)
    return Rule(causal=True, window=local_size, runs=packed)


def scalars_suffice(
    rule: Rule,
    family: str | None,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    kv_offset: int,
) -> bool:
    """Whether no mask is needed, given that no key is padding."""
    if not rule.causal:
        return rule.window is None or kv_length <= rule.window
    if rule.runs or not isinstance(q_offset, int):
        return False
    if kv_length != q_length + q_offset - kv_offset:  # a static cache's buffer
        return False
    binding = rule.window is not None and kv_length > rule.window
    return not binding or family in families.PASSES_WINDOW
