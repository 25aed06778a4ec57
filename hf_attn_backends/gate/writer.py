"""Writing the gate's artifact: whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hf_attn_backends import environment, gate
from hf_attn_backends.call import CallClass
from hf_attn_backends.errors import GateError, GateInvalidError, compose
from hf_attn_backends.gate.artifact import (
    KIND,
    SCHEMA,
    artifact_path,
    canonical_digest,
    checked,
    device_kind,
    parse_class,
)


def _classes(
    shapes: Sequence[Any], coverage: Iterable[Any] | None, results: Mapping[str, Any] | None
) -> dict[str, dict[str, Any]]:
    """Class name -> entry, from the coverage, else the results, else the shapes that say it."""
    stated: list[CallClass] = []
    if coverage is None and results is not None:
        coverage = results
    for item in shapes if coverage is None else coverage:
        if isinstance(item, CallClass):
            stated.append(checked(item))
        elif isinstance(item, Mapping):
            if {"dtype", "head_dim", "visibility"} <= set(item):
                kinds = item["visibility"]
                stated += [
                    # Through the name, which is checked in every part.
                    parse_class(
                        f"{str(item['dtype']).removeprefix('torch.')}/d{item['head_dim']}/{kind}"
                        + (f"+{item['features']}" if item.get("features") else "")
                    )
                    for kind in ([kinds] if isinstance(kinds, str) else kinds)
                ]
        elif coverage is not None:
            stated.append(parse_class(str(item)))
    return {
        str(one): {**(results or {}).get(str(one), {}), **one._asdict()} for one in sorted(stated)
    }


def write_equivalence_gate(
    *,
    tolerances: Mapping[str, Any],
    shapes_covered: Sequence[Any],
    gate_dir: str | os.PathLike[str] | None = None,
    device: object = "cpu",
    results: Mapping[str, Any] | None = None,
    coverage: Iterable[Any] | None = None,
) -> Path:
    """Write the artifact of a device, bound to the sources and the environment of this moment.

    Args:
        tolerances: How the error budgets were derived; any JSON.
        shapes_covered: The shapes that were tried; tuples, lists or mappings. Mappings with
            `dtype`, `head_dim` and `visibility` state coverage where `coverage` does not.
        gate_dir: Folder of the artifacts; default `environment.home() / "gate"`.
        device: The device that was measured.
        results: Class name -> measured errors and budgets.
        coverage: The proven classes: `CallClass`, names, or mappings. Default: those of
            `results`, else of `shapes_covered`. Empty: the head dim is not stated, and no call
            is covered.

    Returns:
        The file, complete on disk: written beside its place, fsynced and renamed.

    Raises:
        GateInvalidError: Something given is not strict JSON (NaN and infinities are not), or
            states a class of calls that does not exist.
        GateError: The folder cannot be written.
    """
    document: dict[str, Any] = {
        "kind": KIND,
        "schema": SCHEMA,
        "created": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "device": device_kind(device),
        "kernel_source_sha256": gate.kernel_source_hash(),
        "environment": environment.fingerprint(device),
        "versions": environment.versions(),
        "tolerances": tolerances,
        "shapes_covered": list(shapes_covered),
        "classes": _classes(list(shapes_covered), coverage, results),
    }
    try:
        # Through JSON and back, so that the digest is of what a reader will see.
        document = json.loads(json.dumps(document, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise GateInvalidError(
            compose("the equivalence gate's artifact cannot be written", [f"not JSON: {error}"])
        ) from error
    document["sha256"] = canonical_digest(document)
    path = artifact_path(device, gate_dir)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(document, indent=1, allow_nan=False) + "\n")
    _announce()
    return path


def withdraw(path: Path) -> None:
    """Remove an artifact that vouches for something which has been measured to be wrong.

    Raises:
        GateError: It cannot be removed.
    """
    with writing(path):
        path.unlink(missing_ok=True)
    _announce()


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the file system refuses into the gate's own error."""
    try:
        yield
    except (OSError, NotImplementedError) as error:  # filelock: no locks on this file system
        raise GateError(
            compose(
                f"the equivalence gate's artifact {path} cannot be written",
                [f"{type(error).__name__}: {error}"],
                works="a folder on a local disk that supports file locks",
                fix="export HF_ATTN_HOME=<a writable local folder>",
            )
        ) from error


def _announce() -> None:
    """Make this process's call-time verdicts be asked for anew.

    They are kept by the backends, which this module must not import; where they were never
    imported, there is nothing to forget.
    """
    proof = sys.modules.get("hf_attn_backends.backends.proof")
    if proof is not None:
        proof.forget()


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` by `text`: a reader sees the old file or the new one, also after a crash."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
