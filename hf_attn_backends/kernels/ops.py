"""The operator: one `torch.library` boundary over every variant of the kernel.

Shapes: `B` batch, `H` query heads, `G` key/value heads, `M` query length, `N` key length, `D`
head dim, `E` the value's head dim.

`hf_attn_backends::attention_forward` and `::attention_backward` are opaque to torch.compile, have
fake implementations with the exact strides, and count each launch in the witness when they run.
Autograd is a plain `autograd.Function` around them. Eager calls on plain tensors pass by the
operators and launch directly (`direct`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_attn_backends.kernels import counted, direct
from hf_attn_backends.kernels.counted import Options
from hf_attn_backends.kernels.variants import VARIANTS
from hf_attn_backends.kernels.visibility import Visibility

__all__ = ["VARIANTS", "triton_attention", "triton_attention_with_lse"]

_LIBRARY = torch.library.Library("hf_attn_backends", "DEF")
_LIBRARY.define(
    "attention_forward(Tensor query, Tensor key, Tensor value, Tensor? intervals, Tensor? dense, "
    "float scale, bool causal, int window, str backend, str variant, Tensor? sinks=None, "
    "Tensor? seed=None, float softcap=0.0, float dropout_p=0.0) -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, "
    "Tensor lse, Tensor? intervals, Tensor? dense, float scale, bool causal, int window, "
    "str backend, str variant, bool need_dq, bool need_dkdv, Tensor? sinks=None, "
    "Tensor? seed=None, float softcap=0.0, float dropout_p=0.0) -> (Tensor, Tensor, Tensor, Tensor)"
)


def _visibility(
    intervals: Tensor | None, dense: Tensor | None, causal: bool, window: int
) -> Visibility:
    return Visibility(causal=causal, window=window or None, intervals=intervals, dense=dense)


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    intervals: Tensor | None,
    dense: Tensor | None,
    scale: float,
    causal: bool,
    window: int,
    backend: str,
    variant: str,
    sinks: Tensor | None = None,
    seed: Tensor | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    visibility = _visibility(intervals, dense, causal, window)
    options = Options(visibility, scale, backend, variant, sinks, seed, softcap, dropout_p)
    return counted.forward(query, key, value, options)


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    intervals: Tensor | None,
    dense: Tensor | None,
    scale: float,
    causal: bool,
    window: int,
    backend: str,
    variant: str,
    need_dq: bool,
    need_dkdv: bool,
    sinks: Tensor | None = None,
    seed: Tensor | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    visibility = _visibility(intervals, dense, causal, window)
    options = Options(visibility, scale, backend, variant, sinks, seed, softcap, dropout_p)
    grads = counted.backward(
        grad_out, query, key, value, out, lse, options, need_dq, need_dkdv
    )  # fmt: skip
    dsinks = query.new_empty(0) if sinks is None else grads[3].to(sinks.dtype)
    return grads[0], grads[1], grads[2], dsinks


def _rows_first(tensor: Tensor, batch: int, heads: int, length: int, dim: int) -> Tensor:
    """An empty `[B, H, L, D]` view of `[B, L, H, D]` memory: the layout of every result."""
    return tensor.new_empty(batch, length, heads, dim).transpose(1, 2)


def _forward_fake(query, key, value, *_):
    b, h, m, _ = query.shape
    out = _rows_first(query, b, h, m, value.shape[3])
    return out, query.new_empty(b, h, m, dtype=torch.float32)


def _backward_fake(
    grad_out, query, key, value, out, lse, intervals, dense, scale, causal, window, backend,
    variant, need_dq, need_dkdv, sinks=None, seed=None, softcap=0.0, dropout_p=0.0,
):  # fmt: skip
    b, h, m, d = query.shape
    g, n = key.shape[1], key.shape[2]
    nothing = query.new_empty(0)
    return (
        _rows_first(query, b, h, m, d) if need_dq else nothing,
        _rows_first(key, b, g, n, d) if need_dkdv else query.new_empty(0),
        _rows_first(value, b, g, n, value.shape[3]) if need_dkdv else query.new_empty(0),
        query.new_empty(0) if sinks is None else torch.empty_like(sinks),
    )


for _key in ("CUDA", "CPU"):
    _LIBRARY.impl("attention_forward", _forward, _key)
    _LIBRARY.impl("attention_backward", _backward, _key)
torch.library.register_fake("hf_attn_backends::attention_forward", _forward_fake, lib=_LIBRARY)
torch.library.register_fake("hf_attn_backends::attention_backward", _backward_fake, lib=_LIBRARY)

_forward_op = torch.ops.hf_attn_backends.attention_forward.default
_backward_op = torch.ops.hf_attn_backends.attention_backward.default


class TritonAttention(torch.autograd.Function):
    """Autograd over the two operators; the log-sum-exp is not differentiable."""

    @staticmethod
    def forward(
        ctx, query, key, value, intervals, dense, scale, causal, window, backend, variant,
        sinks, seed, softcap, dropout_p,
    ):  # fmt: skip
        """Run the forward operator and keep what the backward one needs."""
        out, lse = _forward_op(
            query, key, value, intervals, dense, scale, causal, window, backend, variant,
            sinks, seed, softcap, dropout_p,
        )  # fmt: skip
        ctx.save_for_backward(query, key, value, out, lse, intervals, dense, sinks, seed)
        ctx.scalars = (scale, causal, window, backend, variant)
        ctx.features = (softcap, dropout_p)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out, _grad_lse):  # pyright: ignore[reportIncompatibleMethodOverride]
        """Run the backward operator for the gradients that are wanted."""
        query, key, value, out, lse, intervals, dense, sinks, seed = ctx.saved_tensors
        wants_q, wants_k, wants_v = ctx.needs_input_grad[:3]
        dq, dk, dv, dsinks = _backward_op(
            grad_out, query, key, value, out, lse, intervals, dense, *ctx.scalars,
            wants_q, wants_k or wants_v, sinks, seed, *ctx.features,
        )  # fmt: skip
        return (
            dq if wants_q else None,
            dk if wants_k else None,
            dv if wants_v else None,
            *(None,) * 7,
            dsinks if ctx.needs_input_grad[10] else None,
            *(None,) * 3,
        )


def triton_attention_with_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visibility: Visibility,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    backend: str = "triton_fa2",
    variant: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Attention by our kernels, with the log-sum-exp of each row.

    Args:
        query: `[B, H, M, D]`, bf16, fp16 or fp32; any strides (a last dimension that is not
            contiguous costs one copy).
        key: `[B, G, N, D]`; query head `h` reads key head `h // (H // G)`.
        value: `[B, G, N, E]`; `E` may differ from `D`.
        visibility: Which keys each row sees.
        scale: Factor of the scores; default `D ** -0.5`.
        softcap: `c` in `c * tanh(scores / c)`, after the scale and before the mask.
        sinks: `[H]` logits that join each head's denominator; differentiable.
        dropout_p: Probability of dropping a weight; the others are divided by `1 - dropout_p`.
        seed: With dropout: `[1]` int64 on the query's device, which alone decides what is
            dropped. Default: drawn from torch's generator of that device, so that
            `torch.manual_seed` and checkpointing reproduce it.
        backend: The name that the witness counts under.
        variant: `auto`, or one of `VARIANTS` to insist.

    Returns:
        Output `[B, H, M, E]`, a view of contiguous `[B, M, H, E]` memory, and log-sum-exp
        `[B, H, M]` fp32, natural log, -inf where a row sees nothing (its output is 0). Sinks are
        included in it.

    Raises:
        CallRefusedError: No variant serves this device, dtype or head dim.

    Notes:
        The forward pass is deterministic. So is the portable variant's backward pass. Dropout
        is a function of the seed and of the weight's place.
        FlashAttention-2: arXiv 2307.08691.
    """
    options = _options(query, visibility, scale, softcap, sinks, dropout_p, seed, backend, variant)
    grad = _wants_gradients(query, key, value, sinks)
    if not grad and not torch.compiler.is_compiling() and direct.possible(query, key, value):
        return counted.forward(query, key, value, options)
    arguments = (
        query, key, value, visibility.intervals, visibility.dense, options.scale,
        visibility.causal, visibility.window or 0, backend, variant, sinks, options.seed,
        options.softcap, dropout_p,
    )  # fmt: skip
    if grad:
        return TritonAttention.apply(*arguments)  # pyright: ignore[reportReturnType]
    return _forward_op(*arguments)


def triton_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visibility: Visibility,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    backend: str = "triton_fa2",
    variant: str = "auto",
) -> Tensor:
    """`triton_attention_with_lse` without the log-sum-exp."""
    if not torch.compiler.is_compiling() and direct.possible(query, key, value):
        options = (
            Options(visibility, scale, backend, variant)
            if type(scale) is float and sinks is None and not softcap and not dropout_p
            else _options(
                query, visibility, scale, softcap, sinks, dropout_p, seed, backend, variant
            )
        )
        if _wants_gradients(query, key, value, sinks):
            return direct.attend(query, key, value, sinks, options)
        return counted.forward(query, key, value, options)[0]
    return triton_attention_with_lse(
        query, key, value, visibility, scale=scale, softcap=softcap, sinks=sinks,
        dropout_p=dropout_p, seed=seed, backend=backend, variant=variant,
    )[0]  # fmt: skip


def _options(
    query: Tensor, visibility: Visibility, scale: float | None, softcap: float | None,
    sinks: Tensor | None, dropout_p: float, seed: Tensor | None, backend: str, variant: str,
) -> Options:  # fmt: skip
    factor = query.shape[-1] ** -0.5 if scale is None else float(scale)
    if dropout_p == 0.0:
        seed = None
    elif seed is None:
        seed = torch.randint(2**62, (1,), dtype=torch.int64, device=query.device)
    return Options(
        visibility, factor, backend, variant, sinks, seed, softcap or 0.0, dropout_p
    )  # fmt: skip


def _wants_gradients(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> bool:
    return torch.is_grad_enabled() and (
        query.requires_grad
        or key.requires_grad
        or value.requires_grad
        or (sinks is not None and sinks.requires_grad)
    )
