"""One family under `triton_fa2` beside the truth: logits, gradients, and what really ran.

The truth is the family's eager attention with the same weights in float64 throughout. The
yardstick is what SDPA's result errs by in the dtype under test (eager's, where the family needs
what SDPA does not know). For the logits, for the gradient of every matrix, and for the gradients
of all vectors (norms, biases, sinks) together, because few numbers make no yardstick:

    budget = factor x (the yardstick's error) + one rounding (eps x the tensor's largest entry)

with the factor 2 for the root mean square, and 3 for the largest error, which scatters more.

The witness has to count exactly the launches that the table expects, forward and backward, so that
another attention in the kernel's place is seen whatever its figures.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from exact_math import Float64
from family_configs import Size
from family_inputs import inputs
from family_table import Family, Refusal
from family_verdict import BACKEND, LOGITS, VECTORS, Measured, compare
from torch import Tensor

from hf_attn_backends import witness
from hf_attn_backends.errors import AttentionBackendError


def build(
    family: Family | Refusal,
    fields: dict[str, Any],
    attention: str,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Any:
    """A model in evaluation mode; the same weights whenever it is called with the same fields."""
    config = transformers.AutoConfig.for_model(family.model_type, **fields)
    torch.manual_seed(0)
    auto = getattr(transformers, family.auto)
    model = auto.from_config(config, dtype=dtype, attn_implementation=attention)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("sinks", "bias")):
                parameter.normal_(std=0.3)  # zero at first, and then they would say nothing
    return model.to(device).eval()


def measure(
    family: Family,
    case: str,
    size: Size,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    backend: str = BACKEND,
) -> Measured:
    """Run a family in one case under three implementations and compare.

    Args:
        family: A row of the table.
        case: `whole` or `padded`.
        size: Head dim, lengths, window and chunk.
        dtype: Of the weights and of the computation.
        device: Where to run.
        backend: What is held to the table; anything else than the default is for tests of this.
    """
    given, seen = inputs(family, case, size, device)
    fields = family.config(size)
    ours = build(family, fields, backend, dtype, device)
    yardstick = build(family, fields, family.yardstick, dtype, device)
    truth = build(family, fields, "eager", dtype, device).double()
    before = witness.snapshot()
    ours_found = run(ours, _in(given, dtype), seen)
    counted = witness.since(before)
    yardstick_found = run(yardstick, _in(given, dtype), seen)
    with Float64():
        exact = run(truth, _in(given, torch.float64), seen)
    expected = family.classes(case, str(dtype).removeprefix("torch."), size)
    return compare(ours_found, yardstick_found, exact, dtype, counted, expected)


def run(model: Any, given: dict[str, Any], seen: Tensor) -> dict[str, Tensor]:
    """Logits of the rows that are no padding, and the gradients of the parameters."""
    logits = model(**given).logits
    generator = torch.Generator().manual_seed(5)
    weights = torch.randn(logits.shape, generator=generator).to(logits.device)
    (logits * (weights * seen[..., None]).to(logits.dtype)).sum().backward()
    found = {LOGITS: logits.detach()[seen]}
    vectors = []
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            if parameter.dim() < 2:
                vectors.append(parameter.grad.flatten())
            else:
                found[name] = parameter.grad
    return {**found, VECTORS: torch.cat(vectors)}


def refusal_of(row: Refusal) -> str:
    """Load and call a family that must be refused; the first line of the reason.

    Raises:
        AssertionError: It was served, or refused for another reason.
    """
    try:
        model = build(row, row.config, BACKEND)
        ids = torch.full((1, 5), 3)
        model(input_ids=ids, decoder_input_ids=ids)
    except AttentionBackendError as refused:
        reasons = getattr(refused, "reasons", ()) or (str(refused),)
        text = "; ".join(reasons)
        if row.reason not in text:
            raise AssertionError(f"{row.title} is refused for another reason: {text}") from refused
        return text
    raise AssertionError(f"{row.title} was served, and should be refused: {row.reason}")


def _in(given: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {
        name: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in given.items()
    }
