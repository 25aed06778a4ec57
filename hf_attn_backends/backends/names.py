"""Backend names: the list, the spellings that mean one of them, and the refusal of all others."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from hf_attn_backends.errors import UnknownBackendError, compose

ALL_BACKENDS = (
    "eager",
    "sdpa",
    "flash_attention_2",
    "flash_attention_3",
    "flex_attention",
    "triton_fa2",
    "triton_decode",
    "flashmla",
)

AUTO = "auto"  # not a backend: every call is dispatched on its own

ENVIRONMENT_VARIABLE = "HF_ATTN_BACKEND"  # a preference for every call that nothing else decides

OUR_KERNELS = ("triton_fa2", "triton_decode")  # what the gate has to vouch for

_HUB = re.compile(r"^(?P<org>[^/:]+)/(?P<repo>[^/:@]+)(?:@[^/:]+)?(?::[^/:]+)?$")


@dataclass(frozen=True, slots=True)
class RequestedName:
    """A request, taken apart.

    Attributes:
        asked: The request as it came.
        plain: The backend that it means (`flashmla` also for a hub kernel of FlashMLA), or the
            request itself where it means none of ours.
        paged: Whether it carried transformers' `paged|` prefix of continuous batching.
        hub: Whether it names a kernel of the hub, `org/repo[@revision][:function]`.
    """

    asked: str
    plain: str
    paged: bool = False
    hub: bool = False


def parse(requested: str) -> RequestedName:
    """Take a request apart: `paged|`, `org/repo@rev:fn`, case, `-` and `_`.

    Every spelling of FlashMLA, hub kernels included, is `flashmla`, so that the structural
    refusal is asked before anything loads it.
    """
    paged = requested.strip().lower().startswith("paged|")
    bare = requested.strip()[len("paged|") :] if paged else requested.strip()
    hub = _HUB.match(bare)
    if hub:
        plain = "flashmla" if "flashmla" in _squash(hub["repo"]) else bare
        return RequestedName(requested, plain, paged, hub=True)
    return RequestedName(requested, _MEANT.get(_squash(bare), bare), paged)


def _squash(name: str) -> str:
    return re.sub(r"[-_.\s]", "", name.lower())


_MEANT = {_squash(name): name for name in (*ALL_BACKENDS, AUTO)}


def unknown(asked: object, origin: str, names: Iterable[str] = ALL_BACKENDS) -> UnknownBackendError:
    """The one error for a name that no backend has, wherever it came from.

    Args:
        asked: What came.
        origin: `argument`, `context`, `environment`, `config`.
        names: The names that would have been known.
    """
    names = sorted({*names, AUTO})
    text = f"unknown backend '{asked}' (from the {origin})"
    low = str(asked).strip().lower()
    nearest = difflib.get_close_matches(low, names, n=1, cutoff=0.5)
    nearest = nearest or [name for name in names if len(low) > 2 and name.startswith(low)]
    works = f"the known names are {', '.join(names)}"
    reason = (
        f"no backend has that name; did you mean '{nearest[0]}'?"
        if nearest
        else ("no backend has that name, and none is near to it")
    )
    return UnknownBackendError(compose(text, [reason], works=works))
