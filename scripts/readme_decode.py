"""README's tables of decode steps and of the host's cost, out of their result files."""

from __future__ import annotations

from typing import Any

from readme_bench import line, rule


def decode(content: dict[str, Any] | None) -> str:
    """Microseconds of a decode step, arms by shapes; why what has none has none."""
    if content is None:
        return "not run (`hf-attn bench --decode --json FILE` on an H200 makes it)"
    rows = content["rows"]
    shapes = list(dict.fromkeys((row["batch"], row["keys"]) for row in rows))
    lines = [
        line(["us (TB/s), batch x keys", *(f"{batch}x{keys}" for batch, keys in shapes)]),
        rule(len(shapes) + 1),
    ]
    reasons: dict[str, None] = {}
    for arm in dict.fromkeys(row["arm"] for row in rows):
        of_arm = {(row["batch"], row["keys"]): row for row in rows if row["arm"] == arm}
        lines.append(line([arm, *(_cell(of_arm.get(shape)) for shape in shapes)]))
        for row in of_arm.values():
            if row["us"] is None:
                reasons[f"{arm}: {row['reason']}."] = None
    heads, kv_heads, head_dim = content["heads"]
    versions = content["versions"]
    lines += [
        "",
        f"{heads}/{kv_heads} heads, head_dim {head_dim}, {content['dtype']}; "
        f"{content['device']['name']}, torch {versions['torch']}, triton {versions['triton']}, "
        f"{content['date']}: `{content['command']}`",
        *reasons,
    ]
    return "\n".join(lines)


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "not run"
    return "NaN" if row["us"] is None else f"{row['us']:.1f} ({row['tb_per_s']:.2f})"


def host(content: dict[str, Any] | None) -> str:
    """Host microseconds of a call, and the host."""
    if content is None:
        return "not run (`scripts/host_cost.py --json FILE` on an idle host with a GPU makes it)"
    lines = [line(["host, us a call", "us"]), rule(2)]
    lines += [line([name, f"{us:.1f}"]) for name, us in content["microseconds"].items()]
    found, versions = content["host"], content["versions"]
    lines += [
        "",
        f"{content['shape']}; {found['cpus']} x {found['cpu']}, load average before "
        f"{found['load_average'][0]} and after {found['load_average_after'][0]}, "
        f"{content['device']['name']}, torch {versions['torch']}, {content['date']}.",
    ]
    return "\n".join(lines)
