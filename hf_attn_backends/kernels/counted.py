"""One launch: the variant chosen, the kernel launched, the launch counted.

What both ways into a kernel share: the `torch.library` operators of `ops`, and the direct calls of
`direct`. Shapes: `B` batch, `H` query heads, `G` key/value heads, `M` query length, `N` key length,
`D` head dim, `E` the value's head dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from hf_attn_backends import witness
from hf_attn_backends.kernels.variants import resolve_variant
from hf_attn_backends.kernels.visibility import Visibility


class Options(NamedTuple):
    """What a call asks for beside its tensors' values.

    Attributes:
        visibility: Which keys each row sees.
        scale: Factor of the scores.
        backend: The name that the witness counts under.
        variant: `auto`, or one of `variants.VARIANTS`.
        sinks: `[H]` logits, or None.
        seed: `[1]` int64, with dropout.
        softcap: 0: none.
        dropout_p: 0: none.
    """

    visibility: Visibility
    scale: float
    backend: str
    variant: str
    sinks: Tensor | None = None
    seed: Tensor | None = None
    softcap: float = 0.0
    dropout_p: float = 0.0

    @property
    def plain(self) -> bool:
        """Whether the call has none of the features that the portable variant alone knows."""
        return self.sinks is None and not self.softcap and not self.dropout_p

    def extras(self) -> dict[str, Any]:
        """Those features, as the portable variant's launches take them."""
        return {
            "sinks": self.sinks,
            "seed": self.seed,
            "softcap": self.softcap,
            "dropout_p": self.dropout_p,
        }


def forward(query: Tensor, key: Tensor, value: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Output `[B, H, M, E]` and log-sum-exp `[B, H, M]`.

    Args:
        query: `[B, H, M, D]`.
        key: `[B, G, N, D]`.
        value: `[B, G, N, E]`.
        options: The rest.
    """
    visibility, scale, backend, asked = options[:4]
    if options.plain:
        chosen = resolve_variant("forward", asked, query, key, value, visibility, scale)
        result = chosen.launch(query, key, value, visibility, scale)
    else:
        chosen = resolve_variant(
            "forward", asked, query, key, value, visibility, scale,
            sinks=options.sinks is not None, softcap=options.softcap > 0.0,
            dropout=options.dropout_p > 0.0,
        )  # fmt: skip
        result = chosen.launch(query, key, value, visibility, scale, **options.extras())
    witness.count(backend, chosen.name, "forward", chosen.call_class)
    return result


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    options: Options,
    need_dq: bool,
    need_dkdv: bool,
) -> tuple[Tensor, ...]:
    """Gradients of query, key and value; with sinks, theirs too, in fp32.

    Args:
        grad_out: `[B, H, M, E]`.
        query: `[B, H, M, D]`.
        key: `[B, G, N, D]`.
        value: `[B, G, N, E]`.
        out: `[B, H, M, E]`, the forward pass's.
        lse: `[B, H, M]`, likewise.
        options: As in the forward pass.
        need_dq: Whether the query's gradient is wanted; else it comes back empty.
        need_dkdv: Likewise for key and value.
    """
    visibility, scale, backend, asked = options[:4]
    if options.plain:
        chosen = resolve_variant("backward", asked, query, key, value, visibility, scale)
        grads = chosen.launch(
            grad_out, query, key, value, out, lse, visibility, scale,
            need_dq=need_dq, need_dkdv=need_dkdv,
        )  # fmt: skip
    else:
        chosen = resolve_variant(
            "backward", asked, query, key, value, visibility, scale,
            sinks=options.sinks is not None, softcap=options.softcap > 0.0,
            dropout=options.dropout_p > 0.0,
        )  # fmt: skip
        grads = chosen.launch(
            grad_out, query, key, value, out, lse, visibility, scale,
            need_dq=need_dq, need_dkdv=need_dkdv, **options.extras(),
        )  # fmt: skip
    witness.count(backend, chosen.name, "backward", chosen.call_class)
    return grads
