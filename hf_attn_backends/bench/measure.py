"""Measures arms on workloads: verified against the oracle first, then timed, then weighed."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hf_attn_backends.bench import timing
from hf_attn_backends.bench.arm import Arm, Unavailable
from hf_attn_backends.bench.arms import arm_for
from hf_attn_backends.bench.calls import FAILURES, call_of, own_stream, peak_mib, release
from hf_attn_backends.bench.timing import Timing, Turn, untimed
from hf_attn_backends.bench.verify import Errors, Truth, errors_of, over_budget, truth_of
from hf_attn_backends.bench.workload import PHASES, Inputs, Workload
from hf_attn_backends.errors import BenchmarkError

Progress = Callable[[str], None]
_ABOUT_BACKWARD = "it has no backward pass"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One arm, phase and mode on one workload.

    Attributes:
        workload: What was timed.
        arm: The arm's name.
        phase: `forward` or `backward`.
        mode: `graph`, `graph_warm`, `eager` or `wall`; see `bench.timing`.
        timing: Median and quantiles, or NaN and the reason.
        errors: Error against the oracle by tensor and metric (`max`, `rms`); empty: not verified.
        peak_mib: Peak memory of the phase above its inputs (backward: of forward + backward); NaN
            on a CPU or where it was not asked for.
        source: What the arm calls.
    """

    workload: Workload
    arm: str
    phase: str
    mode: str
    timing: Timing
    errors: Errors = field(default_factory=dict)
    peak_mib: float = math.nan
    source: str = ""

    @property
    def tflops(self) -> float:
        """TFLOP/s of the median; NaN where there is none."""
        return self.workload.tflops(self.phase, self.timing.ms)


def measure(
    workload: Workload,
    names: Sequence[str],
    *,
    phases: Sequence[str] = ("forward",),
    modes: Sequence[str] | None = None,
    verify: bool = True,
    memory: bool = False,
    budget_s: float = 0.6,
    progress: Progress = lambda text: None,
) -> list[Row]:
    """Measure every named arm on one workload.

    Never raises for an arm that cannot run: its rows carry NaN and the reason.

    Raises:
        BenchmarkError: A name that nothing has.
    """
    for phase in phases:
        if phase not in PHASES:
            raise BenchmarkError(f"phase must be one of {', '.join(PHASES)}, got {phase!r}")
    on_gpu = workload.device.startswith("cuda")
    modes = modes or (("graph",) if on_gpu else ("wall",))
    with own_stream(workload.device):
        inputs = workload.inputs()
        progress(f"{workload.label}: oracle")
        truth = _truth(workload, inputs) if verify else None
        arms, refused, errors = {}, {}, {}
        for name in dict.fromkeys(names):
            progress(f"{workload.label}: {name}")
            try:
                arms[name], errors[name] = _verified(name, workload, inputs, truth)
            except Unavailable as why:
                refused[name] = str(why)
        rows = []
        for phase in phases:
            peaks = {n: peak_mib(a, workload, inputs, phase) for n, a in arms.items() if memory}
            for mode in modes:
                progress(f"{workload.label}: timing {phase}, {mode}")
                timed = _time(arms, workload, inputs, phase, mode, budget_s)
                for name in dict.fromkeys(names):
                    rows.append(
                        Row(
                            workload=workload,
                            arm=name,
                            phase=phase,
                            mode=mode,
                            timing=timed.get(name) or untimed(refused.get(name, "")),
                            errors=errors.get(name, {}),
                            peak_mib=peaks.get(name, math.nan),
                            source=arms[name].source if name in arms else "",
                        )
                    )
        return rows


def _verified(
    name: str, workload: Workload, inputs: Inputs, truth: Truth | None
) -> tuple[Arm, Errors]:
    """Build an arm and try it; raises `Unavailable` with everything that speaks against it."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")  # SDPA gives its reasons as warnings
        try:
            arm = arm_for(name, workload)
            errors = errors_of(arm, workload, inputs, truth) if truth else {}
        except FAILURES as error:
            notes = [_first_line(str(note.message)) for note in said]
            notes = [note for note in dict.fromkeys(notes) if not note.endswith("because:")]
            raise Unavailable("; ".join([_why(error), *notes[:2]])) from error
    wrong = over_budget(errors, truth) if truth else []
    if wrong:
        raise Unavailable("; ".join(wrong))
    return arm, errors


def _truth(workload: Workload, inputs: Inputs) -> Truth:
    """The gate's yardstick: SDPA's FLASH for 16 bit on a GPU, elsewhere SDPA's own choice."""
    on_gpu, narrow = workload.device.startswith("cuda"), workload.dtype.itemsize == 2
    name = "FLASH_ATTENTION" if on_gpu and narrow else "sdpa"
    return truth_of(workload, inputs, arm_for(name, workload))


def _time(
    arms: dict[str, Arm],
    workload: Workload,
    inputs: Inputs,
    phase: str,
    mode: str,
    budget_s: float,
) -> dict[str, Timing]:
    """Time one phase of every arm, interleaved."""
    turns, timed = {}, {}
    for name, arm in arms.items():
        if phase == "backward" and not arm.backward:
            timed[name] = untimed(_ABOUT_BACKWARD)
            continue
        try:
            with arm.context():
                call = call_of(arm, inputs, phase)
                for _ in range(1 if mode == "wall" else 3):
                    call()
                call = timing.capture(call) if mode in timing.REPLAYS else call
            turns[name] = Turn(call, arm.context)
        except FAILURES as error:
            timed[name] = untimed(_why(error))
    timed.update(timing.interleaved(turns, workload.device, mode, budget_s=budget_s))
    turns.clear()
    release(workload.device)
    return timed


def _why(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _first_line(text: str) -> str:
    """A warning without where in C++ it comes from."""
    return " ".join(text.split("(Triggered")[0].split())[:240]
