"""Calls whose elements lie further than 2^31 elements from the tensor's first.

Address arithmetic in 32 bits wraps around there, reads other memory and reports nothing. On a GPU
with room for it, three calls reach beyond: inputs whose batches are far apart, inputs whose rows
are (a tile of them spans more than 2^31), and a batch so large that the outputs are far from their
beginning. The first two are views of one buffer, the third has inputs without memory of their own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_attn_backends.call import CallClass
from hf_attn_backends.gate.attend import Attend, Attended
from hf_attn_backends.gate.cases import Case
from hf_attn_backends.gate.inputs import Inputs, make_inputs

FAR = 2**31 + 64  # elements; a multiple of 64, so that 16-byte alignment holds
NEEDED_BYTES = 36 * 2**30

_BATCHES = Case(
    name="far batches", batch=2, heads=4, kv_heads=2, q_len=133, k_len=133, mask="causal"
)
_ROWS = Case(name="far rows", batch=1, heads=1, kv_heads=1, q_len=200, k_len=200, mask="causal")
_OUTPUTS = Case(
    name="far outputs", batch=1, heads=8, kv_heads=8, q_len=131, k_len=131, mask="causal"
)


def applies(call_class: CallClass, device: torch.device) -> bool:
    """Whether this class is the one that the far calls are measured with, and there is room.

    One class is enough: how addresses are computed does not depend on dtype, head dim or mask.
    """
    if device.type != "cuda" or tuple(call_class) != ("bfloat16", 128, "causal", ""):
        return False
    return torch.cuda.mem_get_info(device)[0] > NEEDED_BYTES


def far_batches(call_class: CallClass, device: torch.device) -> tuple[Case, Inputs]:
    """Query, key and value whose second batch begins 2^31 elements after the first."""
    plain = make_inputs(_BATCHES, call_class, device)
    room = sum(x[0].numel() for x in plain[:3])
    buffer = torch.empty(FAR + room, dtype=plain.query.dtype, device=device)
    begin, moved = 0, []
    for tensor in plain[:3]:
        _, h, n, d = tensor.shape
        view = buffer.as_strided((2, h, n, d), (FAR, n * d, d, 1), begin)
        moved.append(view.copy_(tensor))
        begin += h * n * d
    return _BATCHES, plain._replace(query=moved[0], key=moved[1], value=moved[2])


def far_rows(call_class: CallClass, device: torch.device) -> tuple[Case, Inputs]:
    """Query, key and value whose rows are so far apart that a tile spans 2^31 elements."""
    plain = make_inputs(_ROWS, call_class, device)
    apart = FAR // 120 // 64 * 64  # row 120 of 200 is the first beyond
    buffer = torch.empty(apart * 200, dtype=plain.query.dtype, device=device)
    moved: list[Tensor] = []
    for index, tensor in enumerate(plain[:3]):
        _, _, n, d = tensor.shape
        view = buffer.as_strided((1, 1, n, d), (apart * n, apart * n, apart, 1), index * d)
        moved.append(view.copy_(tensor))
    return _ROWS, plain._replace(query=moved[0], key=moved[1], value=moved[2])


def far_outputs(call_class: CallClass, device: torch.device) -> tuple[Case, Inputs]:
    """One sequence; `last_of_many` makes a huge batch of it."""
    return _OUTPUTS, make_inputs(_OUTPUTS, call_class, device)


def last_of_many(attend: Attend) -> Attend:
    """Run one sequence as a batch of thousands of itself; return the last one's results."""

    def attend_many(inputs: Inputs) -> Attended:
        batch = FAR // inputs.query[0].numel() + 2
        query, key, value, grad_out = (x.expand(batch, *x.shape[1:]) for x in inputs[:4])
        found = attend(Inputs(query, key, value, grad_out, inputs.visibility, inputs.scale))
        return Attended(*(x[-1:].clone() for x in found[:5]))

    return attend_many
