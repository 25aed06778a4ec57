"""Which of PyTorch's own attention really ran: read from torch.profiler, not from a name.

transformers' `sdpa` and `eager` run outside this package, so the witness does not see them. For one
micro-batch the profiler lists the operators as PyTorch executed them, forward and backward, on
every autograd thread: SDPA's operator names say which of its kernels was chosen, and eager
attention shows as a softmax over `[B, H, M, N]`. Only CPU-side operator events are taken; no CUPTI
session is opened, so a vendor's profiler around the run is not disturbed.

Under torch.compile the step that compiles runs every operator once more on fake tensors; a step
that compiled anything is therefore not evidence, and the next one is watched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from hf_attn_backends.call import class_name
from hf_attn_backends.witness import Launch

#: SDPA's operators by torch's own name of the backend (`torch.nn.attention.SDPBackend`).
_SDPA = {
    "_scaled_dot_product_flash_attention": "FLASH_ATTENTION",
    "_scaled_dot_product_flash_attention_for_cpu": "FLASH_ATTENTION",
    "_scaled_dot_product_efficient_attention": "EFFICIENT_ATTENTION",
    "_scaled_dot_product_cudnn_attention": "CUDNN_ATTENTION",
    "_scaled_dot_product_attention_math": "MATH",
    "_scaled_dot_product_fused_attention_overrideable": "OVERRIDEABLE",
}
_DTYPES = {
    "float": "float32", "double": "float64", "c10::Half": "float16", "c10::BFloat16": "bfloat16",
}  # fmt: skip
_MASKS = ("attn_mask", "attn_bias")


class OperatorWatch:
    """A profiler around one micro-batch.

    Attributes:
        blind: Why nothing can be seen, or None.
        compiled: Whether anything was compiled while it watched.
    """

    def __init__(self) -> None:
        self.blind: str | None = None
        self.compiled = False
        self._profiler: torch.profiler.profile | None = None
        self._graphs = 0

    def start(self) -> None:
        """Begin to watch; never raises, says in `blind` why it cannot."""
        _stop_abandoned()
        if torch.autograd._profiler_enabled():  # pyright: ignore[reportPrivateImportUsage]
            self.blind = "another profiler was active at the first step, and torch allows only one"
            return
        self._graphs = _compiled_graphs()
        try:
            profiler = torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
            )
            profiler.start()
        except RuntimeError as error:
            self.blind = f"torch.profiler did not start: {error}"
            return
        self._profiler = profiler
        _abandoned.append(self)

    @property
    def running(self) -> bool:
        """Whether the profiler is on."""
        return self._profiler is not None

    def stop(self) -> dict[Launch, int]:
        """End watching; give what ran. Never raises, says in `blind` what went wrong."""
        profiler, self._profiler = self._profiler, None
        if self in _abandoned:
            _abandoned.remove(self)
        if profiler is None:
            return {}
        try:
            profiler.stop()
            results = profiler.profiler.kineto_results if profiler.profiler else None
        except RuntimeError as error:
            self.blind = f"torch.profiler was stopped by somebody else: {error}"
            return {}
        self.compiled = _compiled_graphs() != self._graphs
        return {} if results is None else launches(results.events())


#: Watches that run. One that is still here when the next begins was left behind by a training
#: that raised in its first micro-batch: the Trainer has no event for that.
_abandoned: list[OperatorWatch] = []


def _stop_abandoned() -> None:
    for watch in list(_abandoned):
        watch.stop()


def launches(events: Iterable[Any]) -> dict[Launch, int]:
    """Count attention operators among profiler events.

    A softmax counts as eager attention only where no SDPA operator ran: SDPA's MATH kernel and
    mixture-of-experts routers take softmaxes as well.
    """
    sdpa: Counter[Launch] = Counter()
    eager: Counter[Launch] = Counter()
    other: Counter[Launch] = Counter()
    for event in events:
        space, _, name = event.name().partition("::")
        if space == "aten" and name.removesuffix("_backward") in _SDPA:
            sdpa[_sdpa_launch(name, event)] += 1
        elif space == "aten" and name in ("_softmax", "_softmax_backward_data"):
            shape = next(iter(event.shapes()), [])
            if len(shape) == 4:
                what = f"softmax {_dtype(event)} {list(shape)}"
                phase = "backward" if name.endswith("data") else "forward"
                eager[Launch("eager", "torch", phase, what)] += 1
        elif name and "flash_attn" in space:
            version = "3" if "3" in space else "2"
            phase = "backward" if "bwd" in name or "backward" in name else "forward"
            other[Launch(f"flash_attention_{version}", space, phase, "unknown")] += 1
    return dict(sdpa + other if sdpa or other else eager)


def _sdpa_launch(name: str, event: Any) -> Launch:
    forward = name.removesuffix("_backward")
    shapes = list(event.shapes())
    values = event.concrete_inputs() if hasattr(event, "concrete_inputs") else []
    # In a backward operator the incoming gradient comes first, then query, key and value.
    schema = [each.name for each in getattr(torch.ops.aten, name).default._schema.arguments]
    query = schema.index("query")
    masks = [schema.index(mask) for mask in _MASKS if mask in schema]
    causal = schema.index("is_causal")
    if any(index < len(shapes) and shapes[index] for index in masks):
        kind = "dense"
    elif causal < len(values) and values[causal] is not None:
        kind = "causal" if values[causal] else "full"
    else:
        kind = "unknown"
    head_dim = shapes[query][-1] if query < len(shapes) and shapes[query] else 0
    phase = "forward" if name == forward else "backward"
    return Launch("sdpa", _SDPA[forward], phase, class_name(_dtype(event, query), head_dim, kind))


def _dtype(event: Any, index: int = 0) -> str:
    dtypes = event.dtypes()
    name = dtypes[index] if index < len(dtypes) else "unknown"
    return _DTYPES.get(name, name) or "unknown"


def _compiled_graphs() -> int:
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]
