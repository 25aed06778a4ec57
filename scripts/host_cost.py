#!/usr/bin/env python3
"""Host microseconds of one attention call on a GPU: adapter, operator, backward, SDPA beside them.

python scripts/host_cost.py --json host.json

Calls are made one after the other without waiting for the GPU, on shapes so small that the GPU
keeps up; a figure is the median of some rounds, which are interleaved, so that a neighbour's load
meets every figure. Needs the gate's artifact (`hf-attn gate`). Run it on an otherwise idle host:
the load and the CPU's model are in the file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from host_calls import CACHE, LENGTH, Call, forward_calls, stand_in_calls, training_calls

from hf_attn_backends import environment
from hf_attn_backends.backends import triton_fa2
from hf_attn_backends.bench.results import command_line, now
from hf_attn_backends.hf.adapter import attention_function

CALLS, ROUNDS = 100, 9


def cpu_model(cpuinfo: str) -> str:
    """The model's name in the text of `/proc/cpuinfo`."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return "unknown: /proc/cpuinfo names no model"


def host_facts() -> dict[str, object]:
    """The CPU, how many of it, and the load average of 1, 5 and 15 minutes."""
    source = Path("/proc/cpuinfo")
    text = source.read_text() if source.exists() else ""
    return {
        "cpu": cpu_model(text),
        "cpus": os.cpu_count() or 0,
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def measure(
    calls: Mapping[str, Call], wait: Call, *, repeat: int = CALLS, rounds: int = ROUNDS
) -> dict[str, float]:
    """Median over rounds of the mean host microseconds of a call, by name.

    A round makes `repeat` calls of each in turn; `wait`, for the device, is not timed, and neither
    is one round before the others.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            wait()
            begin = time.perf_counter()
            for _ in range(repeat):
                call()
            times[name].append((time.perf_counter() - begin) / repeat * 1e6)
    wait()
    return {name: statistics.median(taken[1:]) for name, taken in times.items()}


def derived(found: Mapping[str, float]) -> dict[str, float]:
    """Adapter, coverage check and witness, out of calls whose operator is a stand-in.

    The stand-in's own cost is taken off, and the witness, which the operator calls, is added.
    """
    beside = found["witness"] - found["stand-in"]
    return {
        f"adapter, coverage and witness, {kind}": found[f"adapter over a stand-in, {kind}"] + beside
        for kind in ("causal", "dense mask")
    }


def main(argv: Sequence[str]) -> int:
    """Measure, print, write the JSON."""
    parser = argparse.ArgumentParser(prog="host_cost.py", description="Host cost of a call.")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("launches are timed on a CUDA device, and torch sees none")
    before = host_facts()
    attend, module = attention_function("triton_fa2"), torch.nn.Module()
    module.is_causal = True  # pyright: ignore[reportArgumentType]
    wait = torch.cuda.synchronize
    found = measure(training_calls(attend, module), wait)
    with torch.no_grad():
        found.update(measure(forward_calls(attend, module), wait))
        operator = triton_fa2._attend
        try:
            found.update(measure(stand_in_calls(attend, module), wait))
        finally:
            triton_fa2._attend = operator
    content = {
        "command": command_line("scripts/host_cost.py", argv),
        "date": now(),
        "device": environment.device_facts("cuda"),
        "versions": environment.versions(),
        "code": environment.code_state(),
        "host": {**before, "load_average_after": host_facts()["load_average"]},
        "shape": f"1x{LENGTH} causal, decode 1x{CACHE}, 32/8 heads, head_dim 128, bfloat16",
        "microseconds": {**found, **derived(found)},
    }
    for name, us in content["microseconds"].items():
        print(f"{name:44} {us:7.1f} us")
    print(f"on {before['cpus']} x {before['cpu']}, load average {before['load_average']}")
    if args.json:
        args.json.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
