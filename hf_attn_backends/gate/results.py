"""What a measurement found, as plain data that travels between processes and into the artifact."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hf_attn_backends.errors import GateFailedError, compose


class Failure(NamedTuple):
    """One thing that is wrong with a kernel.

    Attributes:
        tensor: `out`, `lse`, `dq`, `dk`, `dv`, or `call` for a call that raised.
        check: `error` (over its budget), `finite`, `hidden rows`, `hidden keys`, `determinism`,
            `form` (shape or dtype) or `raised`.
        case: Name of the case.
        variant: The kernel variant.
        text: The sentence for people.
    """

    tensor: str
    check: str
    case: str
    variant: str
    text: str


@dataclass(slots=True, kw_only=True)
class VariantResult:
    """One kernel variant over every case of a class.

    Attributes:
        cases: How many were measured.
        deterministic: Whether repeated runs gave the same bits, gradients included.
        yardsticks: What set the budgets: `sdpa`, `eager`.
        tensors: Tensor -> its worst case: `error`, `budget`, `ratio` = error / budget, `metric`,
            `case`.
    """

    cases: int = 0
    deterministic: bool = True
    yardsticks: list[str] = field(default_factory=list)
    tensors: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, tensor: str, metric: str, case: str, error: float, budget: float) -> None:
        """Keep the worst error, measured by its share of the budget."""
        ratio = error / budget if budget > 0 else (0.0 if error == 0 else float("inf"))
        if tensor not in self.tensors or ratio > self.tensors[tensor]["ratio"]:
            self.tensors[tensor] = {
                "error": error, "budget": budget, "ratio": ratio, "metric": metric, "case": case,
            }  # fmt: skip


@dataclass(slots=True, kw_only=True)
class ClassResult:
    """One call class.

    Attributes:
        name: Such as `bfloat16/d128/causal`.
        status: `passed`, `failed`, or `refused` where the kernel itself does not serve the class.
        reasons: Why it is refused.
        failures: Everything that was wrong.
        variants: Kernel variant -> what was measured.
        seconds: How long it took.
    """

    name: str
    status: str = "passed"
    reasons: list[str] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    variants: dict[str, VariantResult] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def over(self) -> set[str]:
        """Names of the tensors that failed some check."""
        return {failure.tensor for failure in self.failures}

    def add_failure(self, tensor: str, check: str, case: str, variant: str, what: str) -> None:
        """Note a failure and what the kernel did, in the class's words."""
        text = f"{self.name}, case {case!r}, variant {variant}: {tensor} {what}"
        self.failures.append(Failure(tensor, check, case, variant, text))
        self.status = "failed"

    def worst(self) -> tuple[str, dict[str, Any]] | None:
        """The tensor nearest to its budget, or furthest beyond it."""
        found = [pair for variant in self.variants.values() for pair in variant.tensors.items()]
        return max(found, key=lambda pair: pair[1]["ratio"], default=None)

    def to_dict(self) -> dict[str, Any]:
        """As plain data; `from_dict` reads it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ClassResult:
        """Read what `to_dict` wrote, also after JSON."""
        variants = {name: VariantResult(**found) for name, found in data["variants"].items()}
        failures = [Failure(*failure) for failure in data["failures"]]
        return cls(**{**data, "variants": variants, "failures": failures})


@dataclass(slots=True, kw_only=True)
class GateResult:
    """What a run of the gate found.

    Attributes:
        device: Device kind.
        classes: Class name -> result; empty where a valid artifact already covered everything.
        reused: Whether it did.
        path: The artifact, or None where nothing was written.
        seconds: How long it took, waiting for other ranks included.
    """

    device: str
    classes: dict[str, ClassResult] = field(default_factory=dict)
    reused: bool = False
    path: Path | None = None
    seconds: float = 0.0

    @property
    def failures(self) -> list[str]:
        """Every failure, as a sentence."""
        return [f.text for result in self.classes.values() for f in result.failures]

    @property
    def refused(self) -> list[str]:
        """Names of the classes that the kernel itself does not serve on this device."""
        return [name for name, result in self.classes.items() if result.status == "refused"]

    @property
    def passed(self) -> bool:
        """Whether everything that could be measured is within budget, and something was."""
        passing = any(result.status == "passed" for result in self.classes.values())
        return self.reused or (not self.failures and passing)

    def check(self) -> GateResult:
        """Return itself, or raise `GateFailedError` with every failure."""
        if self.passed:
            return self
        reasons = self.failures or [
            f"{name}: {reason}"
            for name, result in self.classes.items()
            for reason in result.reasons
        ]
        asked = f"the equivalence gate refuses triton_fa2 on {self.device}"
        raise GateFailedError(compose(asked, reasons, works="attn_implementation='sdpa'"))

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for `--json`."""
        return {
            "device": self.device,
            "passed": self.passed,
            "reused": self.reused,
            "artifact": str(self.path) if self.path else None,
            "seconds": round(self.seconds, 3),
            "refused": self.refused,
            "failures": self.failures,
            "classes": {name: result.to_dict() for name, result in sorted(self.classes.items())},
        }
