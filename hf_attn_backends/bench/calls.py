"""The calls that are timed, and the stream and memory around them."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Iterator

import torch

from hf_attn_backends.bench.arm import Arm
from hf_attn_backends.bench.workload import Inputs, Workload

Call = Callable[[], object]
# What an implementation raises for a call that it cannot serve; anything else is a defect here.
FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, ImportError, AssertionError)


def call_of(arm: Arm, inputs: Inputs, phase: str) -> Call:
    """The forward pass without autograd, or the backward pass alone of a forward made here.

    Gradients are returned, not accumulated: adding them up would be timed too.
    """
    query, key, value = (t.detach().requires_grad_(phase == "backward") for t in inputs[:3])
    if phase == "forward":

        def forward() -> object:
            with torch.no_grad():
                return arm.attend(query, key, value)

        return forward
    out = arm.attend(query, key, value)

    def backward() -> object:
        return torch.autograd.grad(out, (query, key, value), inputs.grad_out, retain_graph=True)

    return backward


def peak_mib(arm: Arm, workload: Workload, inputs: Inputs, phase: str) -> float:
    """Peak memory above the inputs, of the forward pass or of forward + backward."""
    if not workload.device.startswith("cuda") or (phase == "backward" and not arm.backward):
        return math.nan
    release(workload.device)
    before = torch.cuda.memory_allocated(workload.device)
    torch.cuda.reset_peak_memory_stats(workload.device)
    try:
        with arm.context():
            call_of(arm, inputs, phase)()
    except FAILURES:
        return math.nan  # the timing of the same call carries the reason
    torch.cuda.synchronize(workload.device)
    return (torch.cuda.max_memory_allocated(workload.device) - before) / 2**20


@contextlib.contextmanager
def own_stream(device: str) -> Iterator[None]:
    """A side stream for everything: a CUDA graph cannot be captured on the default one."""
    if not device.startswith("cuda"):
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream()):
        yield
    torch.cuda.synchronize(device)
    release(device)


def release(device: str) -> None:
    """Give memory that nothing refers to any more back to the device."""
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
