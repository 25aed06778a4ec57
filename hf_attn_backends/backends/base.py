"""The contract of a backend: how it is asked what it can serve, and how it is called."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from hf_attn_backends.backends import machine, proof, table_refusals
from hf_attn_backends.backends.capabilities import CAPABILITIES, Capability
from hf_attn_backends.backends.dims import ModelDims
from hf_attn_backends.backends.probe import BackendReport, ProbeContext
from hf_attn_backends.call import AttentionCall
from hf_attn_backends.errors import BackendRefusedError
from hf_attn_backends.kernels.visibility import FULL, Visibility

__all__ = ["AttentionBackend", "BackendReport", "ProbeContext"]


class AttentionBackend(ABC):
    """A named way to compute attention.

    A subclass sets `name` and implements `forward`; its row in the capability table (or its own
    `capability`) says what it refuses. Instances hold no state of a call and may be shared.
    """

    name: str = ""
    capability: Capability | None = None
    gated: ClassVar[bool] = False  # whether the equivalence gate has to vouch for it
    counts_itself: ClassVar[bool] = False  # else dispatch counts its calls, as variant "plugin"
    counts_in_graphs: ClassVar[bool] = False  # whether its operator counts in compiled code too
    remedy: ClassVar[str | None] = None  # the command that makes it available
    any_length: ClassVar[bool] = False

    def __init_subclass__(cls, *, any_length: bool = False, **options: object) -> None:
        """`any_length=True`: nothing that it answers or does depends on a call's batch and lengths.

        Beyond whether q_len equals k_len. Dispatch then asks it once for calls of every length,
        and hands `forward` a call of another length. Not inherited: a subclass says it again.
        """
        super().__init_subclass__(**options)
        cls.any_length = any_length

    def available(self) -> bool:
        """Whether this machine's default device and packages let it run at all."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return not self.environment_refusals(torch.device(device))

    def probe(self, context: ProbeContext) -> BackendReport:
        """Collect every reason against it: structural, then environment, then gate."""
        structural = [] if context.dims is None else self.structural_refusals(context.dims)
        environment = self.machine_refusals(context.torch_device)
        verdict = context.gate_verdict if self.gated else proof.GateVerdict()
        refusals = (*structural, *environment, *verdict.refusals)
        if not refusals:
            reason = self.praise(context)
            return BackendReport(self.name, True, reason, gate=verdict.summary)
        only_gate = not structural and not environment
        return BackendReport(
            self.name,
            False,
            refusals[0],
            refusals,
            verdict.fix if only_gate else self._environment_fix(context, structural),
            verdict.summary,
            verdict.error if only_gate else BackendRefusedError,
        )

    def _environment_fix(self, context: ProbeContext, structural: list[str]) -> str | None:
        table, device = self.table(), context.torch_device
        # No command changes a model's structure or the device.
        stuck = structural or (table and machine.device_refusals(self.name, table, device))
        return None if stuck else self.remedy

    def structural_refusals(self, dims: ModelDims) -> list[str]:
        """Reasons that no machine can change."""
        table = self.table()
        return [] if table is None else table_refusals.structural_refusals(self.name, table, dims)

    def environment_refusals(self, device: torch.device) -> list[str]:
        """Reasons that lie in the device or in what is installed."""
        table = self.table()
        if table is None:
            return []
        found = machine.device_refusals(self.name, table, device)
        # A CPU is asked without importing anything: triton must not load before its interpreter
        # is chosen, and a package for GPUs has nothing to say there.
        ready = device.type == "cuda" and not found
        return found + machine.package_refusals(self.name, table.package, really_import=ready)

    def machine_refusals(self, device: torch.device) -> list[str]:
        """`environment_refusals`, and a subclass's own `available()` where it has one."""
        found = self.environment_refusals(device)
        if not found and type(self).available is not AttentionBackend.available:
            answer = self.available()
            if not isinstance(answer, bool):
                return [f"{self.name}'s available() must say True or False, got {answer!r}"]
            return [] if answer else [f"{self.name} says that it is not available here"]
        return found

    def refusals(self, call: AttentionCall) -> list[str]:
        """Every reason why it cannot serve this call; empty where it can."""
        table = self.table()
        return [] if table is None else table_refusals.call_refusals(self.name, table, call)

    def supports_call(self, call: AttentionCall) -> bool:
        """Whether it serves this call."""
        return not self.refusals(call)

    @abstractmethod
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        call: AttentionCall,
        *,
        visibility: Visibility = FULL,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        dropout_p: float = 0.0,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Compute attention.

        Args:
            query: `[B, H, M, D]`.
            key: `[B, G, N, D]`.
            value: `[B, G, N, E]`.
            call: The call's description; it was found servable.
            visibility: Which keys each row sees.
            scale: Factor of the scores; None: `D ** -0.5`.
            softcap: `c` in `c * tanh(scores / c)`, or None.
            sinks: `[H]` logits that join each head's denominator, or None.
            dropout_p: Probability of dropping a weight.
            bias: Additive mask, broadcastable to `[B, H, M, N]`; passed only where there is one.

        Returns:
            `[B, H, M, E]`, any strides; zeros for rows that see nothing.
        """

    def prepare_tracing(self) -> None:  # noqa: B027 - most backends have nothing to prepare
        """Import what `forward` needs; called while a graph is traced, where imports are late."""

    def praise(self, context: ProbeContext) -> str:
        """Why it is available, in one sentence."""
        return f"{self.name} has everything it needs on {context.device}"

    def table(self) -> Capability | None:
        """Its row of the capability table, or its own; None for a plug-in without one."""
        return self.capability or CAPABILITIES.get(self.name)

    def __eq__(self, other: object) -> bool:
        """Equal to its name, so that `get_backend() == "sdpa"` and enum members compare."""
        if isinstance(other, str):
            return self.name == str(other)
        if not isinstance(other, AttentionBackend):
            return NotImplemented
        return self is other or (type(self) is type(other) and self.name == other.name)

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(name={self.name!r})"
