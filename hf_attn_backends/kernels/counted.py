"""One launch: the variant chosen, the kernel launched, the launch counted.

What both ways into a kernel share: the `torch.library` operators of `ops`, and the direct calls of
`direct`. Shapes: `B` batch, `H` query heads, `G` key/value heads, `M` query length, `N` key length,
`D` head dim, `E` the value's head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from hf_attn_backends import witness
from hf_attn_backends.kernels.variants import Resolved, resolve_variant
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


class Lane(NamedTuple):
    """A forward launch for calls of one layout, for which nothing is left to be chosen.

    Attributes:
        launch: Takes query, key, value and visibility.
        variant: Whose kernel it is.
        call_class: What is counted.
    """

    launch: Callable[[Tensor, Tensor, Tensor, Visibility], tuple[Tensor, Tensor]]
    variant: str
    call_class: str


_LANES_KEPT = 1024
_lanes: dict[tuple[object, ...], Lane | None] = {}  # None: seen once


def _lane_key(
    query: Tensor, key: Tensor, value: Tensor, options: Options
) -> tuple[object, ...] | None:
    """What a lane depends on; None for calls without one.

    Addresses that are no multiples of 16 have none: another variant may be chosen for them.
    """
    if (query.data_ptr() | key.data_ptr() | value.data_ptr()) & 15:
        return None
    visibility = options.visibility
    mask = visibility.dense if visibility.intervals is None else visibility.intervals
    form = visibility.causal if mask is None else (mask.shape, mask.stride())
    return (
        query.shape, query.stride(), key.shape, key.stride(), value.shape, value.stride(),
        query.dtype, query.device, form, visibility.window, options.scale, options.variant,
    )  # fmt: skip


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
        which = _lane_key(query, key, value, options)
        lane = None if which is None else _lanes.get(which)
        if lane is not None:
            result = lane.launch(query, key, value, visibility)
            witness.count(backend, lane.variant, "forward", lane.call_class)
            return result
        chosen = resolve_variant("forward", asked, query, key, value, visibility, scale)
        result = chosen.launch(query, key, value, visibility, scale)
        if which in _lanes:
            _lanes[which] = _lane(chosen, query, key, value, visibility, scale)
        elif which is not None:
            # Only a layout that comes again is worth binding: a cache that grows makes a new one
            # with every step, which the first layer meets alone.
            if len(_lanes) >= _LANES_KEPT:
                _lanes.clear()
            _lanes[which] = None
    else:
        chosen = resolve_variant(
            "forward", asked, query, key, value, visibility, scale,
            sinks=options.sinks is not None, softcap=options.softcap > 0.0,
            dropout=options.dropout_p > 0.0,
        )  # fmt: skip
        result = chosen.launch(query, key, value, visibility, scale, **options.extras())
    witness.count(backend, chosen.name, "forward", chosen.call_class)
    return result


def _lane(
    chosen: Resolved, query: Tensor, key: Tensor, value: Tensor, visibility: Visibility,
    scale: float,
) -> Lane:  # fmt: skip
    """A lane for the layout of a call that was launched."""
    bound = chosen.bind and chosen.bind(query, key, value, visibility, scale)

    def unbound(query: Tensor, key: Tensor, value: Tensor, visibility: Visibility) -> Any:
        return chosen.launch(query, key, value, visibility, scale)

    return Lane(bound or unbound, chosen.name, chosen.call_class)


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
