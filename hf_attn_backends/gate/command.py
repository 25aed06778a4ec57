"""`hf-attn gate`: measure the kernel of this machine and write what was proven.

On a CPU the worker processes run under Triton's interpreter, which this command switches on for
them by itself.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from hf_attn_backends import environment
from hf_attn_backends.call import FEATURES, CallClass, features_name
from hf_attn_backends.errors import GateError, InvalidCallError
from hf_attn_backends.gate.artifact import DTYPES, device_kind, parse_class
from hf_attn_backends.gate.budgets import TENSORS
from hf_attn_backends.gate.grid import default_grid
from hf_attn_backends.gate.results import ClassResult
from hf_attn_backends.gate.run import GateResult, previous_classes, run_gate
from hf_attn_backends.kernels.visibility import KINDS

MEASURED_FEATURES = tuple(name for name in FEATURES if name != "bias")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `hf-attn gate`."""
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: cuda where there is one)")
    parser.add_argument(
        "--head-dim",
        type=_at_least(1),
        action="append",
        metavar="D",
        help="measure this head dim (repeatable); added to a valid artifact",
    )
    parser.add_argument(
        "--dtype",
        action="append",
        choices=DTYPES,
        help="with --head-dim: only this dtype (repeatable)",
    )
    parser.add_argument(
        "--visibility", action="append", choices=KINDS, help="only this kind of mask (repeatable)"
    )
    parser.add_argument(
        "--feature",
        action="append",
        type=features_of,
        metavar="F",
        help=f"measure the classes with this feature in place of those without: "
        f"{', '.join(MEASURED_FEATURES)}; several of one call joined by + (repeatable)",
    )
    parser.add_argument("--gate-dir", help="folder of the artifacts")
    parser.add_argument("--force", action="store_true", help="measure also what is proven already")
    parser.add_argument(
        "--jobs",
        type=_at_least(0),
        help="worker processes (default: by cores; 0: in this process)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")  # fmt: skip


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
        return value

    return number


def features_of(text: str) -> str:
    """Features as a class spells them, from words in any order joined by `+`."""
    words = text.split("+")
    for word in words:
        if word not in MEASURED_FEATURES:
            raise argparse.ArgumentTypeError(
                f"a feature must be one of {', '.join(MEASURED_FEATURES)}, got {word!r}"
            )
    return features_name(**dict.fromkeys(words, True))


def asked_classes(args: argparse.Namespace, device: str) -> list[CallClass]:
    """The classes that the options name; with none, the default grid and what was proven before.

    Raises:
        InvalidCallError: The options together name nothing.
    """
    grid = default_grid(device)
    features = args.feature or [""]
    if args.head_dim:
        dtypes = args.dtype or sorted({one.dtype for one in grid})
        return [
            CallClass(dtype, dim, kind, feature)
            for dtype in dtypes
            for dim in args.head_dim
            for kind in args.visibility or KINDS
            for feature in features
        ]
    if args.dtype is None and args.visibility is None and args.feature is None:
        return sorted({*grid, *map(parse_class, previous_classes(device, args.gate_dir))})
    if args.feature is not None:
        plain = [one for one in grid if not one.features]
        grid = [one._replace(features=feature) for one in plain for feature in features]
    chosen = [
        one
        for one in grid
        if one.dtype in (args.dtype or DTYPES) and one.visibility in (args.visibility or KINDS)
    ]
    if not chosen:
        raise InvalidCallError(
            f"no class of the default grid of {device} has dtype {args.dtype}: name a --head-dim"
        )
    return chosen


def run(args: argparse.Namespace) -> int:
    """Run the command; 0 if everything that was asked for is proven, else 1."""
    device = environment.default_device() if args.device is None else args.device
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise GateError(f"device must be cpu, cuda or cuda:N, got '{device}'")
    if device.partition(":")[0] == "cuda" and environment.default_device() != "cuda":
        print(f"hf-attn gate: torch sees no CUDA device, {device} cannot be measured",
              file=sys.stderr)  # fmt: skip
        return 1
    console = Console(width=None if sys.stdout.isatty() else 160)
    classes = asked_classes(args, device)
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"equivalence gate, {device_kind(device)}", total=len(classes))

        def note(done: int, total: int, found: ClassResult) -> None:
            bar.update(task, completed=done, description=f"{found.name} {found.status}")

        result = run_gate(
            device, classes=classes, gate_dir=args.gate_dir, force=args.force, jobs=args.jobs,
            progress=note,
        )  # fmt: skip
    if args.json:
        print(json.dumps(result.to_dict(), indent=1))
    else:
        show(result, len(classes), console)
    return 0 if result.passed else 1


def show(result: GateResult, asked: int, console: Console) -> None:
    """Print the table of errors against budgets, every failure, and the verdict."""
    if result.reused:
        console.print(
            f"A valid artifact already covers all {asked} classes: {result.path}\n"
            "Nothing was measured; --force measures again.",
            soft_wrap=True,
        )
        return
    table = Table(title=f"triton_fa2 on {result.device}: worst error of each tensor, and its "
                        "share of the budget")  # fmt: skip
    sinks = any("sinks" in name for name in result.classes)
    narrow = console.width < (155 if sinks else 115)
    tensors = TENSORS if sinks else TENSORS[:-1]
    for column in ("class", "variant", "cases", *tensors, "verdict"):
        table.add_column(column, no_wrap=True)
    for name, found in sorted(result.classes.items()):
        verdict = {"passed": "[green]passed", "failed": "[bold red]FAILED"}.get(
            found.status, "[yellow]refused"
        )
        for variant, measured in found.variants.items():
            cells = [_cell(measured.tensors.get(tensor), narrow) for tensor in tensors]
            table.add_row(name, variant, str(measured.cases), *cells, verdict)
        if not found.variants:
            table.add_row(name, "-", "0", *("-" for _ in tensors), verdict)
    console.print(table)
    for found in result.classes.values():
        for reason in found.reasons:
            console.print(f"[yellow]refused[/] {escape(found.name)}: {escape(reason)}")
        for failure in found.failures:
            console.print(f"[red]over budget[/] {escape(failure.text)}", soft_wrap=True)
    if result.passed:
        console.print(f"[green]passed[/] in {result.seconds:.1f} s; artifact {result.path}",
                      soft_wrap=True)  # fmt: skip
    else:
        console.print(f"[bold red]refused[/] in {result.seconds:.1f} s: {len(result.failures)} "
                      "failures; no artifact was written")  # fmt: skip


def _cell(found: dict | None, narrow: bool) -> str:
    if found is None:
        return "-"
    text = f"{found['ratio']:4.0%}" if narrow else f"{found['error']:.1e} {found['ratio']:4.0%}"
    return text if found["ratio"] <= 1.0 else f"[red]{text}[/]"
