"""The gate's artifact: one JSON file for each device kind, written once, never edited.

It is bound to the sources that were measured, to the environment they were measured in, to the
kind of device, and to itself: `sha256` is the digest of the rest of the file in canonical JSON.
What it says about a class of calls is the worst error of each tensor beside its budget. `verify`
reads it back and trusts nothing of it unchecked.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_attn_backends import environment
from hf_attn_backends.call import FEATURES, CallClass
from hf_attn_backends.errors import GateInvalidError, compose
from hf_attn_backends.kernels.visibility import KINDS

SCHEMA = 1
KIND = "hf_attn_backends equivalence gate"
DTYPES = ("bfloat16", "float16", "float32")  # what the kernels compute in


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """A verified artifact.

    Attributes:
        path: The file.
        sha256: Digest of its content.
        kernel_source_sha256: The sources that were measured.
        environment: `environment.fingerprint` at that time.
        device: Device kind, `cpu` or such as `cuda-sm90`.
        created: RFC 3339, UTC.
        classes: What was proven: class name -> dtype, head_dim, visibility, features, and the
            errors and budgets of each kernel variant under `variants`.
        tolerances: How budgets were derived, as given to the writer.
        shapes_covered: The shapes that were tried, as given to the writer.
    """

    path: Path
    sha256: str
    kernel_source_sha256: str
    environment: Mapping[str, str]
    device: str
    created: str
    classes: Mapping[str, Mapping[str, Any]]
    tolerances: Any
    shapes_covered: Any

    @property
    def coverage(self) -> frozenset[str]:
        """Names of the classes that were proven."""
        return frozenset(self.classes)

    def covers(self, call_class: CallClass | str) -> bool:
        """Whether calls of this class were proven."""
        return str(call_class) in self.classes

    def head_dims(self, dtype: str | None = None, features: str = "") -> set[int]:
        """Head dims of the proven classes with these features, of one dtype or of all."""
        return {
            entry["head_dim"]
            for name, entry in self.classes.items()
            if dtype in (None, entry["dtype"]) and name.partition("+")[2] == features
        }

    def max_ratios(self) -> dict[str, float]:
        """The worst error of each tensor over every class, as a share of its budget."""
        worst: dict[str, float] = {}
        for entry in self.classes.values():
            for variant in entry.get("variants", {}).values():
                for tensor, found in variant.get("tensors", {}).items():
                    worst[tensor] = max(worst.get(tensor, 0.0), found["ratio"])
        return worst

    def summary(self) -> dict[str, Any]:
        """What a banner and a run's record say of the gate."""
        dims: dict[str, set[int]] = {}
        for entry in self.classes.values():
            dims.setdefault(entry["dtype"], set()).add(entry["head_dim"])
        return {
            "status": "ok",
            "artifact_sha256": self.sha256,
            "kernel_source_sha256": self.kernel_source_sha256,
            "env_fingerprint": dict(self.environment),
            "device": self.device,
            "created": self.created,
            "classes": len(self.classes),
            "head_dims": {dtype: sorted(found) for dtype, found in sorted(dims.items())},
            "max_error_over_budget": self.max_ratios(),
            "path": str(self.path),
        }


def device_kind(device: object = None) -> str:
    """`cpu`, or `cuda-sm90`: what an artifact speaks for. Starts no CUDA context."""
    name = str(device if device is not None else environment.default_device())
    kind = name.partition(":")[0]
    if kind != "cuda":
        return kind
    capability = str(environment.device_facts(name)["capability"])
    return "cuda" if capability.startswith("unknown") else f"cuda-sm{capability.replace('.', '')}"


def artifact_path(device: object = None, gate_dir: str | os.PathLike[str] | None = None) -> Path:
    """Where the artifact of a device lies: one file for each device kind."""
    folder = Path(gate_dir) if gate_dir is not None else environment.home() / "gate"
    return folder / f"{device_kind(device)}.json"


def canonical_digest(document: Mapping[str, Any]) -> str:
    """sha256 over the document without its own `sha256`, in canonical JSON."""
    rest = {key: value for key, value in document.items() if key != "sha256"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def parse_class(text: str) -> CallClass:
    """The call class of its name, such as `bfloat16/d128/causal+softcap`.

    Raises:
        GateInvalidError: The text names no class that a call can have.
    """
    try:
        dtype, dim, rest = text.split("/")
        visibility, _, features = rest.partition("+")
        found = CallClass(dtype, int(dim.removeprefix("d")), visibility, features)
    except ValueError:
        raise GateInvalidError(
            f"a call class must be written like bfloat16/d128/causal, got {text!r}"
        ) from None
    return checked(found)


def checked(call_class: CallClass) -> CallClass:
    """The class itself, if a call can have it.

    Raises:
        GateInvalidError: Its dtype, head_dim, visibility or features do not exist.
    """
    dtype, head_dim, visibility, features = call_class
    words = features.split("+") if features else []
    rules = (
        (dtype in DTYPES, f"its dtype must be one of {', '.join(DTYPES)}, got {dtype!r}"),
        (head_dim >= 1, f"its head_dim must be at least 1, got {head_dim}"),
        (
            visibility in KINDS,
            f"its visibility must be one of {', '.join(KINDS)}, got {visibility!r}",
        ),
        (
            words == [name for name in FEATURES if name in words],
            f"its features must be out of {', '.join(FEATURES)}, in this order, got {features!r}",
        ),
    )
    if reasons := [reason for holds, reason in rules if not holds]:
        raise GateInvalidError(compose(f"{call_class} is no call class", reasons))
    return call_class
