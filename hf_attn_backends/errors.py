"""Every exception of the package, one tree.

AttentionBackendError
├── SelectionError (RuntimeError)             load time: a name cannot be served
│   ├── UnknownBackendError (ValueError)      no backend has that name, wherever it came from
│   ├── BackendRefusedError                   known name; structural or environmental refusals
│   └── GateError                             the equivalence gate says no
│       ├── GateNotImplementedError           the gate module itself is absent
│       ├── GateMissingError                  no artifact for this device
│       ├── GateStaleError                    the kernel's source or the environment changed
│       ├── GateInvalidError (ValueError)     truncated, edited, future-schema or foreign artifact
│       └── GateFailedError                   a measured class is over its budget
├── CallError                                 call time: one attention call
│   ├── InvalidCallError (ValueError)         arguments that describe no attention call
│   ├── InvalidDtypeError (TypeError)         dtypes that no backend takes
│   └── CallRefusedError (RuntimeError, ValueError)   a valid call that the backend cannot serve
├── RegistrationError (RuntimeError)          a foreign value under our name; no class to patch
├── RecordError (RuntimeError)                the run registry
│   ├── BannerIncompleteError (ValueError)    a mandatory key is empty or missing
│   ├── RegistryCorruptError                  a broken line in the middle, or a broken chain
│   ├── BackendChangedError                   a resumed run would change its backend
│   └── ExecutionMismatchError                what is loaded or ran is not what was decided
├── BenchmarkError (RuntimeError)             no baseline, or one that cannot be read
└── LaunchError (ValueError)                  a configuration of scripts/ that cannot be run
"""

from __future__ import annotations

from collections.abc import Iterable


def compose(
    asked: str, reasons: Iterable[str], *, works: str | None = None, fix: str | None = None
) -> str:
    """Build the text of a refusal: what was asked, every reason, what would work, the command.

    Args:
        asked: The request, as a sentence without a full stop.
        reasons: Every reason, in the order structural, environment, gate, call.
        works: What would work instead, or None.
        fix: The command (or the line of code) that removes the reason, or None.
    """
    reasons = list(reasons)
    if len(reasons) == 1:
        text = f"{asked}: {reasons[0]}"
    else:
        text = f"{asked}:" + "".join(f"\n  {i}. {reason}" for i, reason in enumerate(reasons, 1))
    if works:
        text += f"\n  what would work: {works}"
    if fix:
        text += f"\n  to fix it: {fix}"
    return text


class AttentionBackendError(Exception):
    """Base of every error that the package raises on purpose."""


class SelectionError(AttentionBackendError, RuntimeError):
    """A requested attention implementation cannot be served at load time."""


class UnknownBackendError(SelectionError, ValueError):
    """No backend has the requested name; the text lists the names and the nearest one."""


class BackendRefusedError(SelectionError):
    """A known backend cannot serve this model or this machine; carries every reason.

    Attributes:
        reasons: The refusals, in the order structural, environment, gate.
    """

    def __init__(self, message: str, reasons: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.reasons = tuple(reasons)


class GateError(SelectionError):
    """The equivalence gate does not vouch for the kernel on this machine."""


class GateNotImplementedError(GateError):
    """The module that holds the gate cannot be imported."""


class GateMissingError(GateError):
    """No artifact was written for this device kind yet."""


class GateStaleError(GateError):
    """The artifact was measured with another kernel source or in another environment."""


class GateInvalidError(GateError, ValueError):
    """The artifact cannot be trusted: truncated, edited, of a future schema, of another device."""


class GateFailedError(GateError):
    """The gate ran, and a class of calls is over its error budget; no artifact was written."""


class CallError(AttentionBackendError):
    """One attention call is wrong or cannot be served."""


class InvalidCallError(CallError, ValueError):
    """The arguments describe no attention call: ranks, heads, lengths, window, softcap, mask."""


class InvalidDtypeError(CallError, TypeError):
    """The dtypes of query, key and value differ, or no backend computes in them."""


class CallRefusedError(CallError, RuntimeError, ValueError):
    """A valid call that the backend cannot serve; carries every reason.

    Attributes:
        reasons: The refusals of the call.
    """

    def __init__(self, message: str, reasons: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.reasons = tuple(reasons)


class RegistrationError(AttentionBackendError, RuntimeError):
    """transformers holds a foreign value under one of our names, or a class cannot be patched."""


class RecordError(AttentionBackendError, RuntimeError):
    """The run registry cannot be written or read."""


class BannerIncompleteError(RecordError, ValueError):
    """A mandatory banner key is missing or empty; the launch is refused."""


class RegistryCorruptError(RecordError):
    """A line in the middle of the registry is broken, or its hash chain is."""


class BackendChangedError(RecordError):
    """A resumed run would continue under another attention backend than it began with."""


class ExecutionMismatchError(RecordError):
    """The live model, or what the witness counted, contradicts the decision."""


class BenchmarkError(AttentionBackendError, RuntimeError):
    """A benchmark baseline is missing or unreadable."""


class LaunchError(AttentionBackendError, ValueError):
    """A launch configuration names something that does not exist or contradicts itself."""
