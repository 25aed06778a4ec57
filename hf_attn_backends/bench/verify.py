"""Checks an arm against the fp64 oracle before it is timed; a wrong kernel gets no time.

The oracle is quadratic, so it runs for two of the key/value heads (the first of the first batch
element, the last of the last) with all their query heads, in chunks of query rows; everything else
must be finite. The budget is 3 x the error of SDPA's own kernel in the same dtype plus one rounding
of the largest value. The gate is stricter and finer; this check only keeps a broken kernel out of a
table of times.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_attn_backends.bench.arms import Arm
from hf_attn_backends.bench.workload import Inputs, Workload
from hf_attn_backends.reference import attention_reference

BUDGET_FACTOR = 3.0
_ROWS = 1024


@dataclass(frozen=True, slots=True)
class Truth:
    """The oracle's values for the sampled heads, and the budgets.

    Attributes:
        tensors: `out`, `dq`, `dk`, `dv` of the samples, fp64, concatenated over the samples.
        budgets: Largest absolute error allowed of each.
    """

    tensors: dict[str, Tensor]
    budgets: dict[str, float]


def samples_of(workload: Workload) -> list[tuple[int, int]]:
    """The (batch element, key/value head) pairs that are compared."""
    return list(dict.fromkeys([(0, 0), (workload.batch - 1, workload.kv_heads - 1)]))


def truth_of(workload: Workload, inputs: Inputs, yardstick: Arm) -> Truth:
    """Compute the oracle's values and, from the yardstick's error, the budgets."""
    names = ("out", "dq", "dk", "dv")
    parts = [_oracle(workload, inputs, *sample) for sample in samples_of(workload)]
    tensors = {name: torch.cat([part[name].flatten() for part in parts]) for name in names}
    measured = _errors(workload, inputs, yardstick, tensors, backward=True)
    eps = torch.finfo(workload.dtype).eps
    budgets = {
        name: BUDGET_FACTOR * measured[name] + eps * float(tensors[name].abs().max())
        for name in names
    }
    return Truth(tensors, budgets)


def errors_of(arm: Arm, workload: Workload, inputs: Inputs, truth: Truth) -> dict[str, float]:
    """Largest absolute errors of an arm: `out`, and with a backward pass `dq`, `dk`, `dv`."""
    return _errors(workload, inputs, arm, truth.tensors, backward=arm.backward)


def over_budget(errors: dict[str, float], truth: Truth) -> list[str]:
    """One sentence for each tensor whose error is over its budget (NaN and inf always are)."""
    return [
        f"wrong: {name} is {error:.3g} from the oracle, budget {truth.budgets[name]:.3g}"
        for name, error in errors.items()
        if not error <= truth.budgets[name]
    ]


def _errors(
    workload: Workload,
    inputs: Inputs,
    arm: Arm,
    truth: dict[str, Tensor],
    *,
    backward: bool,
) -> dict[str, float]:
    query, key, value = (t.detach().requires_grad_(backward) for t in inputs[:3])
    with torch.set_grad_enabled(backward):
        out = arm(query, key, value)
    found = {"out": out.detach()}
    if backward:
        grads = torch.autograd.grad(out, (query, key, value), inputs.grad_out)
        found.update(zip(("dq", "dk", "dv"), grads, strict=True))
    result = {}
    for name, tensor in found.items():
        if not bool(tensor.isfinite().all()):
            result[name] = float("inf")
            continue
        group = tensor.shape[1] // workload.kv_heads
        picked = [tensor[b, g * group : (g + 1) * group].flatten() for b, g in samples_of(workload)]
        result[name] = float((torch.cat(picked).double() - truth[name]).abs().max())
    return result


def _oracle(workload: Workload, inputs: Inputs, b: int, g: int) -> dict[str, Tensor]:
    """One batch element and key/value head, by chunks of rows; autograd sums dK and dV."""
    group = workload.heads // workload.kv_heads
    heads = slice(g * group, (g + 1) * group)
    query = inputs.query[b : b + 1, heads].double().requires_grad_()
    key = inputs.key[b : b + 1, g : g + 1].double().requires_grad_()
    value = inputs.value[b : b + 1, g : g + 1].double().requires_grad_()
    outs = []
    for begin in range(0, workload.seq_len, _ROWS):
        rows = slice(begin, min(begin + _ROWS, workload.seq_len))
        # Causal visibility is aligned to the last key, so a chunk ends its keys at its last row.
        end = rows.stop if workload.causal else workload.seq_len
        out, _ = attention_reference(
            query[:, :, rows], key[:, :, :end], value[:, :, :end], is_causal=workload.causal
        )
        out.backward(inputs.grad_out[b : b + 1, heads, rows].double())
        outs.append(out.detach())
    grads = {"dq": query.grad, "dk": key.grad, "dv": value.grad}
    return {"out": torch.cat(outs, dim=2), **{n: t for n, t in grads.items() if t is not None}}
