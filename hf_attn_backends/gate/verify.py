"""Reading an artifact back: every reason why it does not vouch for this device, now.

No verdict is kept: each call reads the file, the sources and the environment anew, so that a gate
that was just written, or withdrawn, counts from the next question on.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_attn_backends import environment, gate
from hf_attn_backends.call import CallClass
from hf_attn_backends.errors import (
    GateError,
    GateInvalidError,
    GateMissingError,
    GateStaleError,
    compose,
)
from hf_attn_backends.gate.artifact import (
    KIND,
    SCHEMA,
    Artifact,
    artifact_path,
    canonical_digest,
    device_kind,
)

_FIELDS: dict[str, type | tuple[type, ...]] = {
    "created": str,
    "device": str,
    "kernel_source_sha256": str,
    "environment": dict,
    "classes": dict,
    "tolerances": object,
    "shapes_covered": list,
    "sha256": str,
}


def gate_command(device: object = None, gate_dir: str | os.PathLike[str] | None = None) -> str:
    """The command that measures this device and writes its artifact."""
    kind = device_kind(device).partition("-")[0]
    return f"hf-attn gate --device {kind}{_where(gate_dir)}"


def _where(gate_dir: str | os.PathLike[str] | None) -> str:
    return "" if gate_dir is None else f" --gate-dir {shlex.quote(os.fspath(gate_dir))}"


def extend_command(
    what: CallClass | str | int,
    dtype: str | None = None,
    *,
    features: str = "",
    device: object = None,
    gate_dir: str | os.PathLike[str] | None = None,
) -> str:
    """The command that adds a call class, or every mask kind of a head dim, to the artifact.

    Args:
        what: A call class (or its name), or a head dim.
        dtype: With a head dim: `bfloat16`, `float16` or `float32`; None: every default dtype.
        features: With a head dim: what its calls have besides, such as `softcap`.
        device: Where the calls run; None leaves it to the command's default.
        gate_dir: Folder of the artifact, where it is not the default one.
    """
    where = "" if device is None else f" --device {device_kind(device).partition('-')[0]}"
    kind = ""
    if not isinstance(what, int):
        call_class = gate.parse_class(what) if isinstance(what, str) else what
        what, dtype, kind, features = (
            call_class.head_dim, call_class.dtype, call_class.visibility, call_class.features
        )  # fmt: skip
    command = f"hf-attn gate{where} --head-dim {what}"
    if dtype is not None:
        command += f" --dtype {str(dtype).removeprefix('torch.')}"
    command += f" --visibility {kind}" if kind else ""
    return command + (f" --feature {features}" if features else "") + _where(gate_dir)


def load(path: Path, fix: str) -> dict[str, Any]:
    """Read an artifact that is whole and unedited; says nothing of its sources and environment.

    Raises:
        GateInvalidError: Unreadable, truncated, of another schema, or edited.
    """
    asked = f"the equivalence gate's artifact {path} cannot be trusted"

    def invalid(reason: str) -> GateInvalidError:
        return GateInvalidError(compose(asked, [reason], fix=f"{fix} --force"))

    def constant(token: str) -> None:
        raise ValueError(f"the token {token} is not JSON")

    try:
        document = json.loads(path.read_text(encoding="utf-8"), parse_constant=constant)
    except OSError as error:
        raise invalid(f"it cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise invalid(f"it is truncated or not JSON: {error}") from error
    if not isinstance(document, dict) or document.get("kind") != KIND:
        raise invalid("it is JSON, but not a gate artifact")
    schema = document.get("schema")
    if type(schema) is not int or schema < 1:
        raise invalid(f"its schema version must be a whole number, got {schema!r}")
    if schema > SCHEMA:
        raise invalid(
            f"it was written by a newer version: schema {schema}, this version reads {SCHEMA}"
        )
    for name, kind in _FIELDS.items():
        if not isinstance(document.get(name), kind):
            raise invalid(f"its field {name!r} is missing or of the wrong type")
    digest = canonical_digest(document)
    if digest != document["sha256"]:
        raise invalid(
            f"it was edited after it was written: its content has sha256 {digest}, "
            f"it claims {document['sha256']}"
        )
    for name, entry in document["classes"].items():
        if why := _malformed(name, entry):
            raise invalid(why)
    return document


def _malformed(name: str, entry: object) -> str | None:
    """What is wrong with an artifact's entry of a class; None if nothing is."""
    try:
        call_class = gate.parse_class(name)
    except GateInvalidError as error:
        return str(error)
    if not isinstance(entry, Mapping):
        return f"what it says of {name} is no mapping"
    stated = tuple(entry.get(key, "") for key in call_class._fields)
    return None if stated == call_class else f"what it says of {name} is of another class"


def _changes(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """One sentence for each part of the environment that differs."""
    return [
        f"environment changed: {part} was {then.get(part, 'unset')!r} when the gate measured, "
        f"and is {now.get(part, 'unset')!r} now"
        for part in sorted({*then, *now})
        if then.get(part) != now.get(part)
    ]


def require(device: object = None, gate_dir: str | os.PathLike[str] | None = None) -> Artifact:
    """Verify the artifact of a device and return it; nothing is remembered between calls.

    Args:
        device: The device that is to run the kernel; default `environment.default_device()`.
        gate_dir: Folder of the artifacts; default `environment.home() / "gate"`.

    Raises:
        GateMissingError: The gate has not been run for this kind of device.
        GateInvalidError: The file is truncated, edited, of a future schema or of another device.
        GateStaleError: The kernel's sources or the environment are not those that were measured.
    """
    device = environment.default_device() if device is None else device
    kind, path = device_kind(device), artifact_path(device, gate_dir)
    fix = gate_command(device, gate_dir)
    asked = f"the equivalence gate does not vouch for triton_fa2 on {kind}"
    if not path.exists():
        reasons = [f"no equivalence gate was run for {kind}: there is no {path}"]
        others = sorted(other.stem for other in path.parent.glob("*.json") if other != path)
        if others:
            reasons.append(f"the artifact of another device kind ({', '.join(others)}) proves "
                           f"nothing about {kind}")  # fmt: skip
        raise GateMissingError(compose(asked, reasons, fix=fix))
    document = load(path, fix)
    if document["device"] != kind:
        reason = f"the artifact {path} was measured on {document['device']}, this device is {kind}"
        raise GateInvalidError(compose(asked, [reason], fix=f"{fix} --force"))
    reasons = []
    if (source := gate.kernel_source_hash()) != document["kernel_source_sha256"]:
        reasons.append(
            f"kernel source changed since the gate measured it: sha256 then "
            f"{document['kernel_source_sha256']}, now {source}"
        )
    reasons += _changes(document["environment"], environment.fingerprint(device))
    if reasons:
        raise GateStaleError(compose(asked, reasons, fix=fix))
    return Artifact(
        path=path,
        **{name: document[name] for name in _FIELDS},
    )


def find(device: object, gate_dir: str | os.PathLike[str] | None = None) -> Artifact | None:
    """The artifact of a device if it is valid now, else None; for those who are to write one."""
    try:
        return require(device, gate_dir)
    except GateError:
        return None
