"""Measure many classes in worker processes: each compiles and runs its own.

Compilation is what takes the time on a GPU, and interpretation on a CPU; both are bound to one
core, so classes are spread over processes. A worker is a plain subprocess that takes class names
on its standard input and gives results on its standard output, a line each: it starts from a
clean interpreter of Python, with Triton's interpreter switched on by the environment where the
device is the CPU, whatever this process has imported already.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from hf_attn_backends.call import CallClass
from hf_attn_backends.gate.results import ClassResult

CLASS_TIMEOUT_S = 600
_ROOT = Path(__file__).resolve().parents[2]


def worker_count(device_type: str, classes: int) -> int:
    """How many processes: the cores, but at least two classes each to be worth a start-up."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(cores or 1, 16, (classes + 1) // 2))


def worker_environment(device_type: str) -> dict[str, str]:
    """The environment of a worker: one thread each, the interpreter on the CPU alone."""
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    variables = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    variables.pop("TRITON_INTERPRET", None)
    if device_type == "cpu":
        variables["TRITON_INTERPRET"] = "1"
    return variables


class _Worker:
    """One process; `measure` blocks until it answers, and reports its death as a failure."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._process: subprocess.Popen[str] | None = None
        self._errors = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "hf_attn_backends.gate.worker", self._device],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            env=worker_environment(self._device.partition(":")[0]),
        )  # fmt: skip

    def measure(self, call_class: CallClass) -> ClassResult:
        if self._process is None:
            self._process = self._start()
        process = self._process
        assert process.stdin is not None and process.stdout is not None  # noqa: PT018
        watchdog = threading.Timer(CLASS_TIMEOUT_S, process.kill)
        watchdog.start()
        try:
            process.stdin.write(json.dumps(list(call_class)) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        finally:
            watchdog.cancel()
        if answer:
            return ClassResult.from_dict(json.loads(answer))
        return self._died(call_class, process.wait())

    def _died(self, call_class: CallClass, code: int) -> ClassResult:
        self._process = None
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        result = ClassResult(name=str(call_class))
        what = f"took its process down (exit code {code}): {lines[-1] if lines else 'no output'}"
        result.add_failure("call", "raised", "any", "auto", what)
        return result

    def close(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait()
        self._errors.close()


def measure_in_workers(
    classes: Sequence[CallClass],
    device: str,
    jobs: int,
    done: Callable[[ClassResult], None],
) -> list[ClassResult]:
    """Measure classes in `jobs` processes; `done` is called with each result, in any order."""
    todo: queue.SimpleQueue[CallClass] = queue.SimpleQueue()
    for call_class in sorted(classes, key=_cost, reverse=True):  # the slow ones first
        todo.put(call_class)
    results: list[ClassResult] = []
    lock = threading.Lock()

    def serve() -> None:
        worker = _Worker(device)
        try:
            while True:
                try:
                    call_class = todo.get_nowait()
                except queue.Empty:
                    return
                result = worker.measure(call_class)
                with lock:
                    results.append(result)
                    done(result)
        finally:
            worker.close()

    threads = [threading.Thread(target=serve, daemon=True) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def _cost(call_class: CallClass) -> tuple[int, int]:
    return call_class.head_dim, call_class.dtype == "float32"
