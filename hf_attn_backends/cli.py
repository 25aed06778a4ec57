"""`hf-attn`: doctor, gate, bench, runs.

Each command lives in the room it speaks for; this module only lays out the command line. Handlers
are imported when they are asked for, so that `hf-attn gate` can prepare the environment of
Triton's interpreter before anything imports triton.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from hf_attn_backends.errors import AttentionBackendError

_COMMANDS = {
    "doctor": ("hf_attn_backends.doctor", "each backend of this machine, every reason, the fix"),
    "gate": ("hf_attn_backends.gate.command", "measure the kernel against SDPA and the oracle"),
    "bench": ("hf_attn_backends.bench.command", "time the backends, check the baseline"),
    "runs": ("hf_attn_backends.runs", "list recorded runs, verify the registry"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the process's exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="hf-attn", description="Attention backends for transformers."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    asked = next((word for word in arguments if not word.startswith("-")), None)
    for name, (module, text) in _COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=text)
        if name == asked:
            handler = importlib.import_module(module)
            handler.add_arguments(sub)
            sub.set_defaults(run=handler.run)
    args = parser.parse_args(arguments)
    try:
        return args.run(args)
    except AttentionBackendError as error:
        print(f"hf-attn {args.command}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
