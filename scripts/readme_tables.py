#!/usr/bin/env python3
"""Fill README's tables from the files that measurements left, so that no number is typed.

python scripts/readme_tables.py [--check]

A table stands between `<!-- table: NAME -->` and `<!-- end: NAME -->`. One whose file is absent
reads `not run`, with the command that makes the file.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from readme_bench import line, memory, modes, peers, rule
from readme_decode import decode, host
from readme_families import families
from readme_peer_suite import peer_suite

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "hf_attn_backends" / "bench" / "results"
PEERS = RESULTS / "h200-peers.json"
FINETUNE = RESULTS / "h200-finetune-40.json"
DECODE = RESULTS / "h200-decode.json"
HOST = RESULTS / "h200-host.json"
TRAINING = "h200-training-*.json"  # one a backend, run side by side on two GPUs


def main(argv: Sequence[str]) -> int:
    """Write README, or with `--check` say whether it is what it would be; returns the exit code."""
    parser = argparse.ArgumentParser(prog="readme_tables.py", description="Fill README's tables.")
    parser.add_argument("--check", action="store_true", help="1 if README is out of date")
    args = parser.parse_args(argv)
    readme = ROOT / "README.md"
    old = readme.read_text()
    new = filled(old)
    if args.check:
        print("README's tables are up to date" if new == old else "README's tables are out of date")
        return int(new != old)
    readme.write_text(new)
    return 0


def filled(text: str) -> str:
    """README's text with every table made anew."""
    for name, make in TABLES.items():
        block = re.compile(rf"(<!-- table: {name} -->\n).*?(<!-- end: {name} -->)", re.DOTALL)
        if not block.search(text):
            raise ValueError(f"README has no table {name!r}")
        made = make()
        text = block.sub(lambda found, made=made: f"{found[1]}{made}\n{found[2]}", text)
    return text


def matrix() -> str:
    """The support matrix, out of the capability table."""
    from hf_attn_backends.doctor import support_matrix

    return support_matrix().strip()


def baseline() -> str:
    """The pinned times of SDPA."""
    from hf_attn_backends.bench.baselines import load_baseline

    found = load_baseline()
    lengths = list(found.median_ms)
    lines = [line(["ms", *(f"4x{length}" for length in lengths)]), rule(len(lengths) + 1)]
    for kernel in found.median_ms[lengths[0]]:
        values = (found.median_ms[length][kernel] for length in lengths)
        lines.append(line([kernel, *("NaN" if ms != ms else f"{ms:.3f}" for ms in values)]))
    lines.append("")
    lines.append(
        f"{found.device}, torch {found.torch}, driver {found.driver}, {found.date}, "
        f"commit {found.commit[:12]}; {found.timing}."
    )
    return "\n".join(lines)


def finetune() -> str:
    """What the 40-step runs differ by, beside the floor."""
    content = _read(FINETUNE)
    if content is None:
        return "not run (needs an H200; the commands are below)"
    head = ["runs, 40 steps", "loss max d", "loss mean d", "grad norm max d", "grad norm mean d"]
    lines = [line(head), rule(len(head))]
    floor, keys = content["floor"], ("max_abs", "mean_abs")
    rows = {f"widest of the {len(floor)} pairs of sdpa runs": floor}
    rows |= {" / ".join(row["runs"]): [row] for row in content["comparisons"]}
    for name, pairs in rows.items():
        figures = (
            f"{max(pair[series][key] for pair in pairs):.2e}"
            for series in ("loss", "grad_norm")
            for key in keys
        )
        lines.append(line([name, *figures]))
    lines.append("")
    lines += [f"Verdict: {row['verdict']}." for row in content["comparisons"]]
    return "\n".join(lines)


def training() -> str:
    """Tokens a second and peak memory of a training step."""
    contents = [json.loads(path.read_text()) for path in sorted(RESULTS.glob(TRAINING))]
    if not contents:
        return "not run (`scripts/training_speed.py` on an H200 makes it)"
    head = ["length x batch", "backend", "tokens/s", "peak memory, GiB"]
    lines = [line(head), rule(len(head))]
    rows = [row for content in contents for row in content["rows"]]
    for row in sorted(rows, key=lambda row: (row["length"], row["backend"])):
        speed, peak = row["tokens_per_second"], row["peak_memory_mib"]
        cells = [f"{row['length']} x {row['batch']}", row["backend"]]
        cells.append("NaN: " + row["reason"] if speed is None else f"{speed:,.0f}")
        cells.append("NaN" if peak is None else f"{peak / 1024:.1f}")
        lines.append(line(cells))
    versions, device = contents[0]["versions"], contents[0]["device"]
    lines.append("")
    lines.append(f"{device['name']}, torch {versions['torch']}, triton {versions['triton']}.")
    return "\n".join(lines)


TABLES: dict[str, Callable[[], str]] = {
    "matrix": matrix,
    "families": families,
    "peer-suite": lambda: peer_suite(RESULTS),
    "baseline": baseline,
    "peers": lambda: peers(_read(PEERS)),
    "modes": lambda: modes(_read(PEERS)),
    "memory": lambda: memory(_read(PEERS)),
    "decode": lambda: decode(_read(DECODE)),
    "host": lambda: host(_read(HOST)),
    "finetune": finetune,
    "training": training,
}


def _read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.exists() else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
