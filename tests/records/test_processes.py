"""Runs of several processes over gloo, and a run that is killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from hf_attn_backends import cli, registry
from hf_attn_backends.attempts import attempts

PRELUDE = """
import json, os, sys, time
import torch
torch.set_num_threads(1)
from pathlib import Path
from transformers import MistralConfig, MistralForCausalLM
from transformers import Trainer, TrainerCallback, TrainingArguments
import hf_attn_backends
from hf_attn_backends import AttentionBackendCallback
from hf_attn_backends.gate import write_equivalence_gate

RANK = int(os.environ.get("RANK", 0))
ROOT = Path(sys.argv[1])

def model(name):
    config = MistralConfig(vocab_size=64, hidden_size=32, intermediate_size=32,
                           num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                           head_dim=16)
    return MistralForCausalLM._from_config(config, attn_implementation=name)

def train(scenario, made, *others, steps=2, **callback):
    rows = [{"input_ids": torch.arange(7) + i, "labels": torch.arange(7) + i} for i in range(8)]
    args = TrainingArguments(output_dir=str(ROOT / scenario), max_steps=steps, use_cpu=True,
                             per_device_train_batch_size=1, report_to=[], disable_tqdm=True,
                             save_strategy="no", dataloader_pin_memory=False)
    # A registry for each scenario, so that each can be read alone.
    watch = AttentionBackendCallback(registry=str(ROOT / f"{scenario}.jsonl"), **callback)
    Trainer(made, args, train_dataset=rows, callbacks=[watch, *others]).train()
"""

TWO = """
def outcome(scenario, made, *others):
    print(f"== {scenario}", file=sys.stderr, flush=True)
    try:
        train(scenario, made, *others)
        said = "trained"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    torch.distributed.barrier()
    return said

class Switch(TrainerCallback):
    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if RANK == 1:
            model.config._attn_implementation_internal = "eager"

kinds = ["full", "causal", "window", "intervals", "dense"]
os.environ["HF_ATTN_HOME"] = str(ROOT / f"home-{RANK}")
write_equivalence_gate(tolerances={}, shapes_covered=[
    {"dtype": "float32", "head_dim": 16, "visibility": kinds}])
said = {}
said["kernel"] = outcome("kernel", model("triton_fa2"))
said["sdpa"] = outcome("sdpa", model("sdpa"))
said["differ"] = outcome("differ", model("sdpa" if RANK == 0 else "eager"))
broken = model("sdpa")
if RANK == 1:
    broken.config._attn_implementation_internal = "eager"
said["broken"] = outcome("broken", broken)
said["switched"] = outcome("switched", model("sdpa"), Switch())
(ROOT / "unwritable.jsonl").mkdir(exist_ok=True)
said["unwritable"] = outcome("unwritable", model("sdpa"))
(ROOT / f"said-{RANK}.json").write_text(json.dumps(said))

class Die(TrainerCallback):
    def on_step_end(self, *args, **kwargs):
        raise ZeroDivisionError("a bug of the user's")

train("dies", model("sdpa"), Die())
"""


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1", **more}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Every scenario in one pair of processes; (folder, standard errors)."""
    root = tmp_path_factory.mktemp("ranks")
    script = root / "train.py"
    script.write_text(textwrap.dedent(PRELUDE + TWO))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(root)],
            env=environment(
                RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
                MASTER_ADDR="127.0.0.1", MASTER_PORT=port, ACCELERATE_USE_CPU="true",
            ),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        errors = [process.communicate(timeout=240)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    # Each ends with the exception of its last scenario.
    assert all("ZeroDivisionError" in error for error in errors), "\n".join(errors)[-6000:]
    return root, errors


def said(root: Path, scenario: str) -> list[str]:
    return [json.loads((root / f"said-{rank}.json").read_text())[scenario] for rank in range(2)]


@pytest.mark.parametrize("scenario", ["kernel", "sdpa"])
def test_two_ranks_give_one_banner_and_one_record(two_ranks, scenario: str) -> None:
    root, errors = two_ranks
    assert said(root, scenario) == ["trained", "trained"]
    parts = [error.partition(f"== {scenario}\n")[2].partition("\n== ")[0] for error in errors]
    assert [part.count("attention_backend=") for part in parts] == [1, 0]
    assert [part.count("attention_verdict=matched") for part in parts] == [1, 0]
    records, _ = registry.read(root / f"{scenario}.jsonl")
    assert [row.event for row in records] == ["launch", "first_step", "end"]
    end = records[-1]
    assert (end.dist["world_size"], end.dist["agree"]) == (2, True)
    assert len(end.dist["digests"]) == 2
    by_rank = end.attention_executed["by_rank"]
    assert end.attention_executed["ranks_counted"] == "2 of 2"
    steps = 2 if scenario == "kernel" else 1  # the profiler watches one micro-batch
    for rows in by_rank:
        assert {(row["phase"], row["launches"]) for row in rows} == {
            ("forward", 2 * steps), ("backward", 2 * steps),
        }  # fmt: skip
    if scenario == "kernel":
        assert "each rank counts its own" in end.attention_executed["reading"]


def test_ranks_that_were_decided_differently_stop_before_the_first_step(two_ranks) -> None:
    root, _ = two_ranks
    for text in said(root, "differ"):
        assert text.startswith("ExecutionMismatchError: the ranks do not run the same attention")
        assert "attention_backend differs: rank 0: sdpa; rank 1: eager" in text
    assert not (root / "differ.jsonl").exists()


def test_a_rank_that_fails_alone_stops_the_others(two_ranks) -> None:
    root, _ = two_ranks
    zero, one = said(root, "broken")
    assert one.startswith("ExecutionMismatchError: the live model is not what was decided")
    assert zero.startswith("ExecutionMismatchError: rank 1 stopped the run: the live model is not")


def test_a_mismatch_on_one_rank_stops_both_at_the_first_step(two_ranks) -> None:
    root, _ = two_ranks
    for text in said(root, "switched"):
        assert "decided to run 'sdpa', and the first step did not: rank 1: no launch of" in text
    records, _ = registry.read(root / "switched.jsonl")
    assert [row.attention_verdict for row in records] == ["not_observed", "mismatch"]


def test_a_registry_that_rank_0_cannot_write_stops_both(two_ranks) -> None:
    root, _ = two_ranks
    zero, one = said(root, "unwritable")
    assert zero.startswith("RecordError: the run record cannot be written")
    assert one.startswith("RecordError: rank 0 stopped the run: the run record cannot be written")


def test_an_exception_that_ends_the_process_is_on_record(two_ranks) -> None:
    root, _ = two_ranks
    last = registry.read(root / "dies.jsonl")[0][-1]
    assert (last.event, last.attention_verdict) == ("interrupted", "matched")
    executed = last.attention_executed
    assert "the process ended before the run did (ZeroDivisionError)" in executed["reason"]
    assert executed["ranks_counted"] == "1 of 2"


KILLED = """
class Wait(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        print("stepped", flush=True)
        time.sleep(600)

train("killed", model("sdpa"), Wait(), steps=5)
"""


def test_a_killed_run_leaves_a_readable_registry_with_an_unfinished_run(
    tmp_path: Path, capsys
) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(PRELUDE + KILLED))
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)],
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    path = tmp_path / "killed.jsonl"
    try:
        lines = iter(process.stdout.readline, "")
        assert any("stepped" in line for line in lines)
        (running,) = attempts(registry.read(path)[0])
        assert running.status == "running"
        os.kill(process.pid, signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    records, notes = registry.read(path)
    assert notes == []
    assert [(row.event, row.attention_verdict) for row in records] == [
        ("launch", "not_observed"), ("first_step", "matched"),
    ]  # fmt: skip
    (dead,) = attempts(records)
    assert dead.status == "crashed"
    assert cli.main(["runs", "--verify", "--registry", str(path)]) == 0
    assert cli.main(["runs", "--registry", str(path)]) == 0
    assert "crashed" in capsys.readouterr().out
