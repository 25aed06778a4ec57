"""`hf-attn doctor`: each backend of this machine, every reason against it, and the fix.

Exit code 1 when a backend that was named would be refused.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

from hf_attn_backends.backends.base import BackendReport
from hf_attn_backends.backends.capabilities import CAPABILITIES, Capability
from hf_attn_backends.backends.decision import context_of, reports
from hf_attn_backends.backends.dims import ModelDims
from hf_attn_backends.backends.names import AUTO, OUR_KERNELS, parse, unknown
from hf_attn_backends.errors import LaunchError, compose

_AUTO = "auto is no backend: every call is dispatched to one of these that can serve it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Lay out the command line."""
    parser.add_argument("names", nargs="*", metavar="NAME", help="backends to ask about; all")
    parser.add_argument(
        "--model", metavar="DIR", help="folder of a model: its dimensions count too"
    )
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ...; CUDA where there is one")
    parser.add_argument("--gate-dir", metavar="DIR", help="folder of the gate's artifacts")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--matrix", action="store_true", help="print the support matrix in Markdown and stop"
    )


def run(args: argparse.Namespace) -> int:
    """Print the table; 1 when a named backend would be refused, else 0."""
    if args.matrix:
        print(support_matrix())
        return 0
    config = None if args.model is None else _model_config(args.model)
    _need_device(args.device)
    context = context_of(args.device, args.gate_dir, config)
    rows = {**reports(context), AUTO: BackendReport(AUTO, True, _AUTO)}
    named = [_known(name, rows) for name in args.names]
    shown = [rows[name] for name in named or rows if named or name != AUTO]
    if args.json:
        print(json.dumps(_document(context.device, context.dims, shown), indent=2))
    else:
        _print_table(context.device, context.dims, shown)
    return int(any(not rows[name].available for name in named))


def support_matrix(capabilities: dict[str, Capability] | None = None) -> str:
    """The capability table in Markdown, for README; what is not in it is refused."""
    table = CAPABILITIES if capabilities is None else capabilities
    head = (
        "backend", "devices", "dtypes", "head_dim", "masks", "softcap", "sinks",
        "additive mask", "dropout", "backward", "other limits",
    )  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    lines += ["| " + " | ".join(_row(name, row)) + " |" for name, row in table.items()]
    return "\n".join(lines)


def _row(name: str, row: Capability) -> list[str]:
    masks = "all" if len(row.visibilities) == 5 else ", ".join(row.visibilities)
    return [
        f"`{name}`",
        ", ".join(f"{device}{_span(row) if device == 'cuda' else ''}" for device in row.devices),
        ", ".join(dtype.replace("bfloat", "bf").replace("float", "fp") for dtype in row.dtypes),
        row.head_dims_text(),
        masks,
        *("yes" if can else "refused" for can in (row.softcap, row.sinks, row.bias, row.dropout)),
        ", ".join(row.backward) or "refused",
        "; ".join(_limits(name, row)) or "none",
    ]


def _span(row: Capability) -> str:
    least, most = row.min_capability, row.max_capability
    if least is None:
        return ""
    floor = f"{least[0]}.{least[1]}"
    return f" {floor}" if least == most else f" >= {floor}"


def _limits(name: str, row: Capability) -> list[str]:
    limits = []
    if not row.value_head_dim:
        limits.append("value head_dim = head_dim")
    if row.cache_only:
        limits.append("only with a KV cache")
    if not row.unequal_lengths:
        limits.append("q_len = k_len")
    limits += [f"not {one} with {other}" for one, other in row.exclusive]
    if name in OUR_KERNELS:
        limits.append("only classes that the gate covers; CPU in Triton's interpreter")
    if name == "flashmla":
        limits.append("latent attention only, so refused for every model here")
    if row.package not in (None, "triton"):
        limits.append(f"needs `{row.package}`")
    return limits


def _known(name: str, rows: dict[str, BackendReport]) -> str:
    plain = parse(name).plain
    if plain not in rows:
        raise unknown(name, "argument", rows)
    return plain


def _need_device(name: str | None) -> None:
    import torch

    try:
        torch.device("cpu" if name is None else name)
    except RuntimeError as error:
        raise LaunchError(
            f"device must be one that torch knows, such as cpu or cuda:0, got {name!r}"
        ) from error


def _model_config(folder: str) -> object:
    from transformers import AutoConfig

    if not Path(folder).is_dir():
        raise LaunchError(
            compose(
                f"--model {folder}", [f"there is no folder {folder}"],
                works="a folder with a config.json",
            )
        )  # fmt: skip
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        reason = f"no configuration can be read there: {str(error).splitlines()[0]}"
        raise LaunchError(
            compose(f"--model {folder}", [reason], works="a folder with a config.json")
        ) from error


def _document(
    device: str, dims: ModelDims | None, shown: Iterable[BackendReport]
) -> dict[str, object]:
    return {
        "device": device,
        "model": None if dims is None else dims.describe(),
        "backends": [report.as_dict() for report in shown],
    }


def _print_table(device: str, dims: ModelDims | None, shown: Iterable[BackendReport]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    model = "" if dims is None else f", {dims.describe()}"
    table = Table(title=f"attention backends on {device}{model}", box=box.SIMPLE_HEAD)
    table.add_column("backend", no_wrap=True)
    table.add_column("here", no_wrap=True)
    table.add_column("why, and what to do", overflow="fold")
    for report in shown:
        here = Text("yes", style="green") if report.available else Text("no", style="red")
        lines = [*report.refusals] or [report.reason]
        if report.fix:
            lines.append(f"to fix it: {report.fix}")
        table.add_row(report.name, here, Text("\n".join(lines)))
    # A pipe or a log has no width of its own, and 80 columns would break every path.
    console = Console()
    (console if console.is_terminal else Console(width=160)).print(table)
