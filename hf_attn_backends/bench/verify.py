"""Checks an arm against the fp64 oracle before it is timed; a wrong kernel gets no time.

The oracle is quadratic, so it runs for two of the key/value heads (the first of the first batch
element, the last of the last) with all their query heads, in chunks of query rows; everything else
must be finite. The budgets are the gate's (`gate.budgets`): twice SDPA's error in the same dtype
plus one rounding at the size of the summed terms, in the largest error and in the root mean square.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_attn_backends.bench.arm import Arm
from hf_attn_backends.bench.workload import Inputs, Workload
from hf_attn_backends.gate.budgets import METRICS, SDPA_FACTOR, error_of, term_sizes
from hf_attn_backends.gate.inputs import Inputs as GateInputs
from hf_attn_backends.kernels.visibility import CAUSAL, FULL
from hf_attn_backends.reference import attention_reference_grads, visible_keys

TENSORS = ("out", "dq", "dk", "dv")
Errors = dict[str, dict[str, float]]  # tensor -> metric -> error
_ROWS = 1024


@dataclass(frozen=True, slots=True)
class Truth:
    """The oracle's values for the sampled heads, and the budgets.

    Attributes:
        tensors: `out`, `dq`, `dk`, `dv` of the samples, fp64, concatenated over the samples.
        budgets: Error allowed of each, by metric (`max`, `rms`).
    """

    tensors: dict[str, Tensor]
    budgets: Errors


def samples_of(workload: Workload) -> list[tuple[int, int]]:
    """The (batch element, key/value head) pairs that are compared."""
    return list(dict.fromkeys([(0, 0), (workload.batch - 1, workload.kv_heads - 1)]))


def truth_of(workload: Workload, inputs: Inputs, yardstick: Arm) -> Truth:
    """Compute the oracle's values and, from the yardstick's error, the budgets."""
    parts = [_oracle(workload, inputs, *sample) for sample in samples_of(workload)]
    tensors, sizes = (
        {name: torch.cat([part[i][name].flatten() for part in parts]) for name in TENSORS}
        for i in range(2)
    )
    measured = _errors(workload, inputs, yardstick, tensors, backward=True)
    eps = torch.finfo(workload.dtype).eps
    budgets = {}
    for name in TENSORS:
        size = error_of(sizes[name], torch.zeros_like(sizes[name]))
        budgets[name] = {m: SDPA_FACTOR * measured[name][m] + eps * size[m] for m in METRICS}
    return Truth(tensors, budgets)


def errors_of(arm: Arm, workload: Workload, inputs: Inputs, truth: Truth) -> Errors:
    """Errors of an arm, by metric: `out`, and with a backward pass `dq`, `dk`, `dv`."""
    return _errors(workload, inputs, arm, truth.tensors, backward=arm.backward)


def over_budget(errors: Errors, truth: Truth) -> list[str]:
    """One sentence for each tensor whose error is over its budget (NaN and inf always are)."""
    return [
        f"wrong: {name} is {error:.3g} from the oracle ({metric}), budget {budget:.3g}"
        for name, found in errors.items()
        for metric, budget in truth.budgets[name].items()
        if not (error := found[metric]) <= budget
    ]


def _errors(
    workload: Workload,
    inputs: Inputs,
    arm: Arm,
    truth: dict[str, Tensor],
    *,
    backward: bool,
) -> Errors:
    query, key, value = (t.detach().requires_grad_(backward) for t in inputs[:3])
    with torch.set_grad_enabled(backward):
        out = arm(query, key, value)
    found = {"out": out.detach()}
    if backward:
        # A compiled backward is compiled by its first call: for being called again, as when timed.
        with arm.context():
            grads = torch.autograd.grad(
                out, (query, key, value), inputs.grad_out, retain_graph=True
            )
        found.update(zip(("dq", "dk", "dv"), grads, strict=True))
    result = {}
    for name, tensor in found.items():
        if not bool(tensor.isfinite().all()):
            result[name] = dict.fromkeys(METRICS, float("inf"))
            continue
        group = tensor.shape[1] // workload.kv_heads
        picked = [tensor[b, g * group : (g + 1) * group].flatten() for b, g in samples_of(workload)]
        result[name] = error_of(torch.cat(picked), truth[name])
    return result


def _oracle(
    workload: Workload, inputs: Inputs, b: int, g: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """One batch element and key/value head, by chunks of rows: the values, and the sizes.

    dK and dV are sums over the chunks. Their sizes add like the terms that they are sizes of: in
    quadrature for 16-bit dtypes, plainly for fp32.
    """
    group = workload.heads // workload.kv_heads
    heads = slice(g * group, (g + 1) * group)
    query, grad_out = (t[b : b + 1, heads] for t in (inputs.query, inputs.grad_out))
    key, value = (t[b : b + 1, g : g + 1] for t in (inputs.key, inputs.value))
    power = 1 if workload.dtype == torch.float32 else 2
    values, sizes = (
        {
            "out": torch.zeros_like(query, dtype=torch.float64),
            "dq": torch.zeros_like(query, dtype=torch.float64),
            "dk": torch.zeros_like(key, dtype=torch.float64),
            "dv": torch.zeros_like(key, dtype=torch.float64),
        }
        for _ in range(2)
    )
    visibility = CAUSAL if workload.causal else FULL
    for begin in range(0, workload.seq_len, _ROWS):
        rows = slice(begin, min(begin + _ROWS, workload.seq_len))
        # Causal visibility is aligned to the last key, so a chunk ends its keys at its last row.
        seen = slice(0, rows.stop if workload.causal else workload.seq_len)
        chunk = GateInputs(
            query[:, :, rows], key[:, :, seen], value[:, :, seen], grad_out[:, :, rows],
            visibility, workload.head_dim**-0.5,
        )  # fmt: skip
        exact = attention_reference_grads(*chunk[:4], **chunk.oracle_options())
        shown = visible_keys(
            1, group, exact.out.shape[2], seen.stop, key.device, visibility=visibility
        )
        size = term_sizes(chunk, exact, shown)
        for name in ("out", "dq"):
            values[name][:, :, rows] = getattr(exact, name)
            sizes[name][:, :, rows] = size[name]
        for name in ("dk", "dv"):
            values[name][:, :, seen] += getattr(exact, name)
            sizes[name][:, :, seen] += size[name] ** power
    for name in ("dk", "dv"):
        sizes[name] **= 1 / power
    return values, sizes
