"""Run the gate: measure the classes that are asked for, and write what was proven.

Many ranks of one host may ask at the same time: one measures under a file lock, the others wait
and find its artifact.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict

from filelock import FileLock

from hf_attn_backends import environment, gate
from hf_attn_backends.call import CallClass
from hf_attn_backends.errors import GateFailedError, GateInvalidError, compose
from hf_attn_backends.gate.artifact import Artifact, artifact_path, device_kind, parse_class
from hf_attn_backends.gate.attend import Attend
from hf_attn_backends.gate.budgets import TOLERANCES
from hf_attn_backends.gate.cases import cases_for
from hf_attn_backends.gate.grid import default_grid
from hf_attn_backends.gate.measure import measure_class
from hf_attn_backends.gate.results import ClassResult, GateResult
from hf_attn_backends.gate.verify import find, load
from hf_attn_backends.gate.workers import measure_in_workers, worker_count
from hf_attn_backends.gate.writer import withdraw, write_equivalence_gate, writing

Progress = Callable[[int, int, ClassResult], None]


def previous_classes(
    device: object, gate_dir: str | os.PathLike[str] | None = None
) -> frozenset[str]:
    """What the artifact of a device covered, also where it has gone stale; empty without one.

    A plain `hf-attn gate` after an update restores all of it, extensions included.
    """
    try:
        return frozenset(load(artifact_path(device, gate_dir), "")["classes"])
    except GateInvalidError:
        return frozenset()


def run_gate(
    device: object = None,
    *,
    classes: Iterable[CallClass | str] | None = None,
    attend: Attend | None = None,
    progress: Progress | None = None,
    gate_dir: str | os.PathLike[str] | None = None,
    write: bool = True,
    force: bool = False,
    jobs: int | None = None,
) -> GateResult:
    """Measure classes of calls, and on success write them into the device's artifact.

    Args:
        device: Default `environment.default_device()`.
        classes: What to measure; default `default_grid`. Classes that a still valid artifact has
            proven besides are kept in it; those of an artifact that has gone stale are not.
        attend: A function to measure in place of the package's operator, in this process; what it
            shows is never written.
        progress: Called after each class with (done, total, result).
        gate_dir: Folder of the artifacts; default `environment.home() / "gate"`.
        write: Whether to write the artifact (and to withdraw the old one on a failure).
        force: Measure also what a valid artifact already covers.
        jobs: Worker processes; default by cores and classes; 0 measures in this process.

    Returns:
        The result; see `passed`, `failures` and `check()`. A failing class writes nothing, and
        an artifact that vouched for it is withdrawn.

    Raises:
        GateFailedError: The sources changed meanwhile, a GPU is asked of the interpreter, or `jobs`
            is negative.
        GateError: The folder cannot be written.
    """
    began = time.perf_counter()
    device = str(environment.default_device() if device is None else device)
    if jobs is not None and jobs < 0:
        what = f"{device} cannot be measured by {jobs} processes"
        raise GateFailedError(compose(what, ["jobs must be at least 0"], fix="leave jobs out"))
    asked = default_grid(device) if classes is None else [
        parse_class(item) if isinstance(item, str) else item for item in classes
    ]  # fmt: skip
    if device.startswith("cuda") and attend is None and os.environ.get("TRITON_INTERPRET") == "1":
        reasons = [
            "TRITON_INTERPRET=1 is set: kernels are interpreted, and never launched on a GPU"
        ]
        raise GateFailedError(
            compose(f"{device} cannot be measured", reasons, fix="unset TRITON_INTERPRET")
        )
    result = GateResult(device=device_kind(device))
    write = write and attend is None
    # Asked once without the lock: a home that is shared read-only has none to give.
    if write and not force and _reuse(result, find(device, gate_dir), asked):
        result.seconds = time.perf_counter() - began
        return result
    with _only_one(device, gate_dir) if write else contextlib.nullcontext():
        valid = find(device, gate_dir) if write else None
        if force or not _reuse(result, valid, asked):
            source = gate.kernel_source_hash()
            for found in _measure(asked, device, attend, progress, jobs):
                result.classes[found.name] = found
            if write:
                if gate.kernel_source_hash() != source:
                    raise GateFailedError("the kernel's source changed while the gate measured it")
                _conclude(result, valid, device, gate_dir)
    result.seconds = time.perf_counter() - began
    return result


def _reuse(result: GateResult, valid: Artifact | None, asked: Sequence[CallClass]) -> bool:
    """Whether a valid artifact covers everything; then it is the result's."""
    if valid is None or not all(valid.covers(one) for one in asked):
        return False
    result.reused, result.path = True, valid.path
    return True


def _measure(
    asked: Sequence[CallClass],
    device: str,
    attend: Attend | None,
    progress: Progress | None,
    jobs: int | None,
) -> list[ClassResult]:
    done = 0

    def note(found: ClassResult) -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, len(asked), found)

    if attend is None and jobs != 0:
        jobs = jobs or worker_count(device.partition(":")[0], len(asked))
        return measure_in_workers(asked, device, jobs, note)
    results = []
    for one in asked:
        results.append(measure_class(one, device, attend=attend))
        note(results[-1])
    return results


def _conclude(
    result: GateResult, valid: Artifact | None, device: str, gate_dir: str | os.PathLike[str] | None
) -> None:
    """Write the artifact, or withdraw the one that vouched for what failed."""
    if not result.passed:
        failed = {name for name, found in result.classes.items() if found.status == "failed"}
        if valid is not None and failed & valid.coverage:
            withdraw(valid.path)
        return
    entries = {
        name: {"variants": found.to_dict()["variants"]}
        for name, found in result.classes.items()
        if found.status == "passed"
    }
    kept = {} if valid is None else {
        name: {"variants": entry.get("variants", {})} for name, entry in valid.classes.items()
    }  # fmt: skip
    device_type = "cuda" if device.startswith("cuda") else "cpu"
    kinds = sorted({parse_class(name).visibility for name in {**kept, **entries}})
    result.path = write_equivalence_gate(
        tolerances=TOLERANCES,
        shapes_covered=[
            {"kind": kind, "cases": [asdict(case) for case in cases_for(kind, device_type)]}
            for kind in kinds
        ],
        results={**kept, **entries},
        gate_dir=gate_dir,
        device=device,
    )


@contextlib.contextmanager
def _only_one(device: str, gate_dir: str | os.PathLike[str] | None) -> Iterator[None]:
    path = artifact_path(device, gate_dir)
    lock = FileLock(path.with_name(f".{path.stem}.lock"))
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
