"""README's table of model families, out of the files that `family_matrix.py` wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from readme_bench import line, rule

RESULTS = Path(__file__).resolve().parents[1] / "hf_attn_backends" / "bench" / "results"
FILES = ("families-cpu-5.24.json", "families-cpu-5.17.json", "h200-families.json")


def families() -> str:
    """One line a family: the kinds of attention calls, and in each run the error and the budget."""
    contents = [
        json.loads((RESULTS / name).read_text()) for name in FILES if (RESULTS / name).exists()
    ]
    if not contents:
        return "not run (`python scripts/family_matrix.py --json FILE` makes it)"
    return "\n".join(table(contents))


def table(contents: list[dict[str, Any]]) -> list[str]:
    """The lines, of files whose rows are joined by the family's name."""
    heads = ["family", "`model_type`", "attention calls", *map(_head, contents)]
    lines = [line(heads), rule(len(heads))]
    found = [{row["family"]: row for row in content["rows"]} for content in contents]
    for name in dict.fromkeys(name for rows in found for name in rows):
        rows = [one.get(name) for one in found]
        first = next(row for row in rows if row is not None)
        kinds = next((_kinds(row) for row in rows if row and row.get("cases")), "")
        cells = [first["title"], f"`{first['model_type']}`", kinds]
        lines.append(line([*cells, *map(_cell, rows)]))
    refused = {
        row["title"]: row["reason"]
        for content in contents
        for row in content["rows"]
        if row["status"] == "refused"
    }
    lines.append("")
    lines += [f"* {title}: {reason}." for title, reason in refused.items()]
    lines.append("")
    lines += [_run(content) for content in contents]
    return lines


def _head(content: dict[str, Any]) -> str:
    device = content["device"]
    where = "CPU" if device["type"] == "cpu" else device["name"].removeprefix("NVIDIA ")
    short = {"float32": "fp32", "bfloat16": "bf16"}[content["dtype"]]
    return f"{short}, {where}, transformers {content['versions']['transformers']}"


def _kinds(row: dict[str, Any]) -> str:
    """Visibility and features of every call class, without dtype and head dim."""
    names = (name for found in row["cases"].values() for name in found["classes"])
    return ", ".join(dict.fromkeys(name.split("/")[2] for name in names))


def _cell(row: dict[str, Any] | None) -> str:
    """The worse of the cases: the error of the logits beside the yardstick's, and the budget."""
    if row is None:
        return "not run"
    if row["status"] != "served":
        return row["status"]
    worst = max(row["cases"].values(), key=lambda found: found["error"])
    share = max(found["share"] for found in row["cases"].values())
    return (
        f"{worst['error']:.1e} ({worst['yardstick']} {worst['yardstick_error']:.1e}), {share:.0%}"
    )


def _run(content: dict[str, Any]) -> str:
    versions, device, size = content["versions"], content["device"], content["size"]
    return (
        f"* {_head(content)}: torch {versions['torch']}, triton {versions['triton']}, "
        f"{device['name']}, {content['date']}, kernel sources "
        f"{content['kernel_source_sha256'][:12]}; head_dim "
        f"{size['head_dim']}, {size['length']} tokens, window {size['window']}, chunk "
        f"{size['chunk']}: `{content['command']}`"
    )
