#!/usr/bin/env python3
"""Training speed of whole models: tokens a second and peak memory, by length and backend.

python scripts/training_speed.py --config configs/finetune/h200_mistral_8layers.yaml \
    --backends sdpa triton_fa2 --lengths 2048 8192 32768 --json speed.json

Every arm is a run of `finetune.py` in a process of its own, with at least `--tokens` tokens a step;
the speed is that of the median step after the first three. An arm that fails is null, with the
last line that it said.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("finetune.py")


def main(argv: Sequence[str]) -> int:
    """Run every arm, print a table, write the JSON; 1 if an arm failed."""
    parser = argparse.ArgumentParser(prog="training_speed.py", description="Training speed.")
    parser.add_argument("--config", type=Path, required=True, help="of finetune.py")
    parser.add_argument("--backends", nargs="+", default=["sdpa", "triton_fa2"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[2048, 8192, 32768])
    parser.add_argument("--tokens", type=int, default=16384, help="of one step, at least (16384)")
    parser.add_argument("--steps", type=int, default=10, help="of one arm (10)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    rows = [
        arm(args.config, backend, length, max(1, args.tokens // length), args.steps)
        for length in args.lengths
        for backend in args.backends
    ]
    content = {
        "command": " ".join(["training_speed.py", *argv]),
        "rows": [{k: v for k, v in row.items() if k != "facts"} for row in rows],
        **next((row["facts"] for row in rows if row["facts"]), {}),
    }
    if args.json:
        args.json.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    return int(any(row["tokens_per_second"] is None for row in rows))


def arm(config: Path, backend: str, length: int, batch: int, steps: int) -> dict[str, Any]:
    """One run; its speed and memory, or null and the reason."""
    row: dict[str, Any] = {"backend": backend, "length": length, "batch": batch}
    row |= {"tokens_per_second": None, "peak_memory_mib": None, "reason": "", "facts": {}}
    with tempfile.TemporaryDirectory() as folder:
        flags = {
            "config": config,
            "attn_implementation": backend,
            "sequence_length": length,
            "per_device_train_batch_size": batch,
            "max_steps": steps,
            "output_dir": folder,
        }
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        done = subprocess.run(
            [sys.executable, str(SCRIPT), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        log = Path(folder) / "losses.json"
        if done.returncode or not log.exists():
            said = [line for line in done.stdout.splitlines() if line.strip()]
            row["reason"] = said[-1][:300] if said else f"exit code {done.returncode}"
        else:
            facts = json.loads(log.read_text())
            row["tokens_per_second"] = facts["speed"]["tokens_per_second_steady"]
            row["peak_memory_mib"] = facts["speed"].get("peak_memory_mib")
            row["resolved"] = facts["attention"]["resolved"]
            row["facts"] = {key: facts[key] for key in ("versions", "device", "model")}
    print(
        f"{length:>7} x {batch}  {backend:<20} {row['tokens_per_second']} tokens/s, "
        f"peak {row['peak_memory_mib']} MiB {row['reason']}",
        flush=True,
    )
    return row


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
