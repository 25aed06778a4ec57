"""Counting of calls whose kernel is not ours, at run time, eagerly and inside compiled graphs.

Eagerly a call counts in Python and a hook on its node counts the backward pass. In a traced graph
Python does not run again, so an operator counts: it writes to a ticket tensor, which keeps the
compiler from removing it, and its implementation calls the witness.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from hf_attn_backends import witness
from hf_attn_backends.call import AttentionCall

_LIBRARY = torch.library.Library("hf_attn_backends_witness", "DEF")
_LIBRARY.define(
    "tally(Tensor(a!) ticket, Tensor? after, str backend, str variant, str phase, "
    "str call_class) -> ()"
)
_TICKET = torch.zeros((), dtype=torch.int64)
_MAX_NAMES = 4096

_names: dict[int, tuple[AttentionCall, str]] = {}


def _tally(
    ticket: Tensor, after: Tensor | None, backend: str, variant: str, phase: str, call_class: str
) -> None:
    if phase == "substituted":
        witness.count_substitution(backend, variant, call_class)
    else:
        witness.count(backend, variant, phase, call_class)


_LIBRARY.impl("tally", _tally, "CompositeExplicitAutograd")
torch.library.register_fake(
    "hf_attn_backends_witness::tally", lambda *_: None, lib=_LIBRARY, allow_override=True
)
_OPERATOR = torch.ops.hf_attn_backends_witness.tally.default


def class_text(call: AttentionCall) -> str:
    """`str(call.call_class)`, kept by the call's identity: dispatch reuses its calls."""
    held = _names.get(id(call))
    if held is not None and held[0] is call:
        return held[1]
    if len(_names) >= _MAX_NAMES:
        _names.clear()
    text = str(call.call_class)
    _names[id(call)] = (call, text)  # holding the call keeps its id from being reused
    return text


def count_forward(backend: str, call: AttentionCall, variant: str = "torch") -> None:
    """Count a forward launch; to be called right before it.

    Before and not after: checkpointing without reentry ends a recomputation by an exception out of
    the last operation that saves a tensor, which may be this one, after its kernel ran.

    Inside a traced graph it does nothing: dispatch counts there, by `counted_in_graph`.
    """
    if not torch.compiler.is_compiling():
        witness.count(backend, variant, "forward", class_text(call))


def with_backward_counted(
    out: Tensor, backend: str, call: AttentionCall, variant: str = "torch"
) -> Tensor:
    """Have the backward launch of `out` counted when it comes; returns `out`."""
    if not torch.compiler.is_compiling() and out.requires_grad:
        # On the node and not on the tensor: 2 us in place of 3.3.
        hook = _backward_hook(backend, variant, class_text(call))
        out.grad_fn.register_prehook(hook)  # pyright: ignore[reportOptionalMemberAccess]
    return out


def counted_in_graph(out: Tensor, backend: str, name: str, variant: str = "torch") -> Tensor:
    """The same inside a traced graph, where the compiled code counts each time it runs."""
    _OPERATOR(_TICKET, None, backend, variant, "forward", name)
    return _CountBackward.apply(out, backend, variant, name) if out.requires_grad else out


def substituted_in_graph(requested: str, served: str, name: str) -> None:
    """Count, each time the compiled code runs, that `served` stands in for `requested`."""
    _OPERATOR(_TICKET, None, requested, served, "substituted", name)


class _CountBackward(torch.autograd.Function):
    """The identity; its backward pass counts."""

    @staticmethod
    def forward(ctx, out: Tensor, backend: str, variant: str, name: str) -> Tensor:
        ctx.launch = (backend, variant, name)
        return out.view_as(out)

    @staticmethod
    def backward(ctx, *gradients):
        backend, variant, name = ctx.launch
        # It takes the gradient, or the partitioner would move it into the forward graph.
        _OPERATOR(_TICKET, gradients[0], backend, variant, "backward", name)
        return gradients[0], None, None, None


@lru_cache(maxsize=_MAX_NAMES)
def _backward_hook(backend: str, variant: str, name: str) -> Callable[[tuple[Tensor, ...]], None]:
    def hook(gradients: tuple[Tensor, ...]) -> None:
        witness.count(backend, variant, "backward", name)

    return hook
