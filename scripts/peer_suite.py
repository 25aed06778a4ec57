#!/usr/bin/env python3
"""Run transformers' own model tests with triton_fa2 in the place of SDPA and of flash-attn.

python scripts/peer_suite.py --transformers CHECKOUT [--families mistral llama …] [-k EXPRESSION]

Each family's tests run with triton_fa2 under the names that they ask for (`peer_suite_plugin.py`),
and those that did not pass so run again as they are, for a control: what fails there too is not
ours. A test in which no kernel of ours was launched counts as not exercised. Exit code 1 if a
failure is ours.

CHECKOUT is a checkout of transformers at the installed version; nothing of it is copied here. Its
tests need `parameterized` and, for Bart, `timeout-decorator` besides this repository's test group.
Without a GPU the kernels run under Triton's interpreter. The gate's coverage counts as always:
`--extend-gate` measures what the tests call and no artifact covers yet, and runs those tests again.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import peer_suite_report
from peer_suite_verdicts import OURS_TO_FIX, judge_all, read_logs, unproven, without_us
from rich.console import Console

from hf_attn_backends import environment

FAMILIES = (
    "mistral", "ministral", "ministral3", "mixtral", "llama", "llama4", "qwen2", "qwen3",
    "qwen3_moe", "gemma2", "gemma3", "phi3", "olmo2", "granite", "smollm3", "starcoder2",
    "gpt_oss", "deepseek_v2", "deepseek_v3", "modernbert", "t5gemma", "bart",
)  # fmt: skip

# Names of tests in which attention decides. SDPA's own kernels on or off make no difference to
# ours, so one of the two is left out; so are tests that start processes of their own.
TESTS = (
    "((eager_matches_sdpa and not sdpa_inference) or (sdpa_inference and kernels) or fa2 or "
    "flash_attn_2 or flash_attention_2 or padding or batching or generat or beam or assisted or "
    "prompt_lookup or static_cache or past_key_values or custom_4d or sliding_window or "
    "sdpa_can or attn_implementation or set_attention or gradient_checkpointing or "
    "test_training or inputs_embeds or outputs_equivalence or logits_to_keep or torch_compile) "
    "and not fsdp and not tensor_parallel and not pipeline and not export and not multi_gpu "
    "and not fp32_ln and not offload and not flash_attn_2_can_dispatch"
)
# Under the interpreter a layer takes about a second: one test of each kind. Nothing compiled, as
# inductor cannot see into the interpreter.
INTERPRETED = (
    "((sdpa_inference and fp32 and kernels) or padding_matches_padding_free or left_padding or "
    "flash_attn_2_inference or flash_attn_2_from_config or flash_attention_2_continue or "
    "test_beam_search_generate or test_greedy_generate or test_assisted_decoding_matches or "
    "prompt_lookup_decoding_matches or generate_with_static_cache or continue_from_past or "
    "custom_4d or set_attention or sdpa_can_dispatch or use_reentrant_false) "
    "and not dict and not compil"
)


def main(argv: Sequence[str]) -> int:
    """Run both roles, print the tables, write the JSON; 1 if a failure is ours."""
    parser = argparse.ArgumentParser(
        prog="peer_suite.py", description="Run transformers' own tests."
    )
    parser.add_argument("--transformers", type=Path, required=True, metavar="CHECKOUT")
    parser.add_argument("--families", nargs="+", default=FAMILIES, metavar="FAMILY",
                        help="folders of tests/models")  # fmt: skip
    parser.add_argument("-k", dest="tests", metavar="EXPRESSION", help="pytest's, over the default")
    parser.add_argument("--timeout", type=int, default=120, help="seconds a test may take")
    parser.add_argument("--workers", type=int, default=0, help="processes, by pytest-xdist")
    parser.add_argument("--extend-gate", action="store_true", help="prove what the tests call")
    parser.add_argument("--logs", type=Path, metavar="FOLDER",
                        help="keep the logs of both runs here, beside earlier ones")  # fmt: skip
    parser.add_argument(
        "--roles",
        nargs="*",
        choices=("control", "ours"),
        default=("ours", "control"),
        help="what to run now; none judges --logs",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result")
    args = parser.parse_args(argv)
    args.gpu = environment.default_device() == "cuda"
    args.tests = args.tests or (TESTS if args.gpu else INTERPRETED)
    files = _files(args.transformers, args.families, parser)
    with tempfile.TemporaryDirectory() as scratch:
        logs = args.logs or Path(scratch)
        logs.mkdir(parents=True, exist_ok=True)
        if "ours" in args.roles:
            run(args, "ours", files, logs)
            if args.extend_gate:
                prove_and_run_again(args, logs)
        ours = read_logs(logs, "ours")
        if "control" in args.roles:
            run(args, "control", without_us(ours, files), logs)
        verdicts = judge_all(ours, read_logs(logs, "control"))
    families = tuple(args.families)
    console = Console(width=None if sys.stdout.isatty() else 160)
    peer_suite_report.show(verdicts, families, console)
    if args.json:
        made_with = peer_suite_report.facts(args.transformers, args.tests, args.timeout)
        result = peer_suite_report.summary(verdicts, families, made_with)
        args.json.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    if ours and not any(one.verdict == "passed" for one in verdicts):
        print("peer_suite.py: triton_fa2 ran in no test that passed", file=sys.stderr)
        return 1
    return int(any(one.verdict in OURS_TO_FIX for one in verdicts))


def run(args: argparse.Namespace, role: str, what: Sequence[str], logs: Path) -> None:
    """Run tests of the checkout once.

    Args:
        args: The options.
        role: `control` or `ours`.
        what: Files or node ids, relative to the checkout.
        logs: Gets one file for each process, with what became of each test.
    """
    here = str(Path(__file__).resolve().parent)
    variables = {
        **os.environ,
        "PEER_SUITE_ROLE": role,
        "PYTHONPATH": os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")])),
        "HF_HUB_OFFLINE": "1",
        "RUN_SLOW": "1",  # transformers calls most comparisons of implementations slow
        **({} if args.gpu else {"TRITON_INTERPRET": "1"}),
    }
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "peer_suite_plugin", "-p", "no:cacheprovider",
        "--timeout", str(args.timeout), "-k", args.tests, "--tb=no", "-W", "ignore",
        "-o", "log_cli=false",
        *(["-n", str(args.workers), "--dist", "worksteal"] if args.workers else []),
    ]  # fmt: skip
    parts = [list(what)] if args.workers and what else _by_file(what)
    for part in parts:
        number = len(list(logs.glob(f"{role}-*.jsonl")))
        variables["PEER_SUITE_LOG"] = str(logs.resolve() / f"{role}-{number:04d}.jsonl")
        print(f"{role}: {part[0]}{f' and {len(part) - 1} more' if part[1:] else ''}", flush=True)
        subprocess.run([*command, *part], cwd=args.transformers, env=variables, check=False)


def _by_file(tests: Sequence[str]) -> list[list[str]]:
    """Tests by their file: a process that dies takes only its own family along."""
    parts: dict[str, list[str]] = {}
    for test in tests:
        parts.setdefault(test.partition("::")[0], []).append(test)
    return list(parts.values())


def prove_and_run_again(args: argparse.Namespace, logs: Path) -> None:
    """Extend the gate by what was refused for want of it, as long as that helps a test on."""
    proven: set[str] = set()
    while True:
        tests, commands = unproven(read_logs(logs, "ours"))
        if not commands - proven:
            return
        for command in sorted(commands - proven):
            print(f"hf-attn {command}", flush=True)
            subprocess.run([sys.executable, "-m", "hf_attn_backends.cli", *shlex.split(command)],
                           check=False)  # fmt: skip
        proven |= commands
        run(args, "ours", tests, logs)


def _files(checkout: Path, families: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """The files of tests of each family, relative to the checkout."""
    found = []
    for family in families:
        of_family = sorted((checkout / "tests" / "models" / family).glob("test_modeling_*.py"))
        if not of_family:
            parser.error(f"{checkout} has no tests/models/{family}/test_modeling_*.py: name a "
                         "checkout of transformers, and families that it has")  # fmt: skip
        found += [str(path.relative_to(checkout)) for path in of_family]
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
