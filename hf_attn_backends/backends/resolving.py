"""One name against the probe: what transformers is given, or the refusal with every reason."""

from __future__ import annotations

import re
import sys

from hf_attn_backends.backends import machine
from hf_attn_backends.backends.base import ProbeContext
from hf_attn_backends.backends.decision import report_on
from hf_attn_backends.backends.factory import AttentionBackendFactory
from hf_attn_backends.backends.names import ALL_BACKENDS, RequestedName, unknown
from hf_attn_backends.errors import BackendRefusedError, compose

_FLASH_NAME = re.compile(r"^flash_attention_(\d+)$")


def resolve(name: RequestedName, origin: str, context: ProbeContext) -> tuple[str, str]:
    """Resolve one of our names or a plug-in's: (name for transformers, why), or the refusal."""
    report = report_on(name.plain, context)
    refusals, error = list(report.refusals), report.error
    if name.plain not in ALL_BACKENDS and report.available and not _registered_with_host(name):
        refusals.append(
            f"{name.plain} is a plug-in for single calls, transformers does not know it: load with "
            f"attn_implementation='auto' and run under attn_backend('{name.plain}')"
        )
    if refusals:
        message = compose(
            f"attn_implementation '{name.asked}' (from the {origin}) is refused",
            refusals,
            works=_works(context),
            fix=report.fix,
        )
        if issubclass(error, BackendRefusedError):
            raise error(message, refusals)
        raise error(message)
    # transformers 5.17 needs the prefix to choose its paged functions.
    resolved = f"paged|{name.plain}" if name.paged else name.plain
    return resolved, report.reason


def _works(context: ProbeContext) -> str:
    """What would be served: SDPA, or eager where the model needs what SDPA leaves out."""
    if report_on("sdpa", context).refusals:
        return "attn_implementation='eager'"
    return "attn_implementation='sdpa', or None"


def resolve_foreign(name: RequestedName, origin: str) -> tuple[str, str]:
    """A name that is none of ours: another flash version, or one that a third party registered."""
    flash = _FLASH_NAME.match(name.plain)
    if not _registered_with_host(name) and not flash:
        raise unknown(name.asked, origin, AttentionBackendFactory.list_registered())
    if flash and machine.version_of(f"flash-attn-{flash[1]}") is None:
        reason = (
            f"{name.plain} needs the distribution flash-attn-{flash[1]}, which is not installed in "
            "this environment (transformers would quietly load a hub kernel in its place)"
        )
        message = compose(
            f"attn_implementation '{name.asked}' (from the {origin}) is refused",
            [reason],
            works="attn_implementation='sdpa', or None",
            fix=f"pip install flash-attn-{flash[1]}",
        )
        raise BackendRefusedError(message, [reason])
    reason = f"{name.asked} is registered with transformers by others: not probed and not gated"
    return name.asked, reason


def _registered_with_host(name: RequestedName) -> bool:
    """Whether transformers, if it is loaded, has an attention function under this name."""
    host = sys.modules.get("transformers.modeling_utils")
    functions = getattr(host, "ALL_ATTENTION_FUNCTIONS", None)
    return functions is not None and name.plain in functions.valid_keys()
