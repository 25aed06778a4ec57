"""Arms that leave something of the sm_90 forward out, to see what it is worth.

`hf-attn bench --ablate turns=0` times `hopper_forward` beside `hopper_forward:turns=0`. Settings
are the fields of `kernels.hopper.forward.Tuning`; the product never uses any but the default.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from torch import Tensor

from hf_attn_backends.bench.arm import Arm, Unavailable
from hf_attn_backends.bench.workload import Workload
from hf_attn_backends.errors import BenchmarkError

if TYPE_CHECKING:  # the module needs triton
    from hf_attn_backends.kernels.hopper.forward import Tuning

NAME = "hopper_forward"


def ablation_names(settings: list[str]) -> list[str]:
    """The arms of `--ablate`: the kernel as it is, then each setting; nothing for no setting."""
    return [NAME, *(f"{NAME}:{setting}" for setting in settings)] if settings else []


def ablation_arm(name: str, workload: Workload) -> Arm:
    """The launch of the forward kernel alone, with the settings behind the colon.

    Raises:
        Unavailable: On a CPU.
        BenchmarkError: No such setting, or not a number.
    """
    if workload.device.startswith("cpu"):
        raise Unavailable(f"the sm_90 kernel runs on CUDA tensors only, got {workload.device}")
    from hf_attn_backends.kernels.hopper import forward
    from hf_attn_backends.kernels.visibility import CAUSAL, FULL

    tuning = _changed(forward.DEFAULT, name.partition(":")[2])
    visibility = CAUSAL if workload.causal else FULL
    scale = workload.head_dim**-0.5

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return forward.launch_forward(query, key, value, visibility, scale, tuning=tuning)[0]

    return Arm(name, attend, backward=False, source=str(tuning))


def _changed(tuning: Tuning, settings: str) -> Tuning:
    """`tuning` with `FIELD=VALUE;...` changed; values are numbers, 0 and 1 for switches."""
    fields = {field.name: type(getattr(tuning, field.name)) for field in dataclasses.fields(tuning)}
    changes = {}
    for setting in filter(None, settings.split(";")):
        field, _, value = setting.partition("=")
        if field not in fields:
            raise BenchmarkError(
                f"nothing to ablate is called {field!r}; known: {', '.join(fields)}"
            )
        try:
            changes[field] = fields[field](int(value))
        except ValueError as error:
            raise BenchmarkError(f"{field} must be a number, got {value!r}") from error
    return dataclasses.replace(tuning, **changes)
