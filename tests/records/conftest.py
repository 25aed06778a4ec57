from __future__ import annotations

from pathlib import Path

import pytest

from hf_attn_backends.record import RunRecord


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of the test's own, so that no test writes to the user's registry."""
    folder = tmp_path / "home"
    monkeypatch.setenv("HF_ATTN_HOME", str(folder))
    return folder


@pytest.fixture
def make_record():
    """A complete launch record, with any key replaced."""

    def make(**changes: object) -> RunRecord:
        values = {
            "run_id": "run-1",
            "attempt": 1,
            "event": "launch",
            "seq": 0,
            "attention_requested": "sdpa",
            "attention_origin": "argument",
            "attention_backend": "sdpa",
            "attention_reason": "asked for by name",
            "attention_candidates": [{"name": "sdpa", "available": True, "reason": "in torch"}],
            "attention_verified": {"layers": 2, "names": {"sdpa": 2}, "ok": True},
            "attention_executed": "unknown: no step has run yet",
            "attention_verdict": "not_observed",
            "gate": None,
            "model": {"model_type": "mistral", "sliding_window": None},
            "device": {"type": "cpu"},
            "versions": {"torch": "2.13.0"},
            "code": {"repository": "not a repo"},
            "dist": {"world_size": 1},
            "flags": {"compile": False},
        }
        return RunRecord(**(values | changes))

    return make


@pytest.fixture
def make_model():
    """A Mistral of two layers: 4 query heads over 2, head_dim 16."""
    import torch
    from transformers import MistralConfig, MistralForCausalLM

    import hf_attn_backends  # noqa: F401  registers the names

    def make(implementation: str | None = "sdpa", **changes: object) -> MistralForCausalLM:
        torch.manual_seed(0)
        values = {
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
        }
        config = MistralConfig(**(values | changes))
        return MistralForCausalLM._from_config(config, attn_implementation=implementation)

    return make


@pytest.fixture
def make_trainer(tmp_path: Path):
    """A Trainer on the CPU over random tokens, 2 steps by default."""
    import torch
    from transformers import Trainer, TrainingArguments

    def make(model, callbacks: list, *, length: int = 9, cls=Trainer, **changes: object):
        generator = torch.Generator().manual_seed(0)
        rows = [torch.randint(0, 64, (length,), generator=generator) for _ in range(16)]
        data = [{"input_ids": row, "labels": row} for row in rows]
        values = {
            "output_dir": str(tmp_path / "out"),
            "max_steps": 2,
            "per_device_train_batch_size": 1,
            "per_device_eval_batch_size": 2,
            "use_cpu": True,
            "report_to": [],
            "disable_tqdm": True,
            "save_strategy": "no",
            "logging_steps": 1000,
            "dataloader_pin_memory": False,
        }
        args = TrainingArguments(**(values | changes))
        return cls(model, args, train_dataset=data, eval_dataset=data[:6], callbacks=callbacks)

    return make


@pytest.fixture
def write_gate(home: Path):
    """Writes an artifact that vouches for head_dim 16 on a device."""
    from hf_attn_backends.gate import write_equivalence_gate

    def write(device: str, *dtypes: str) -> Path:
        kinds = ["full", "causal", "window", "intervals", "dense"]
        covered = [{"dtype": each, "head_dim": 16, "visibility": kinds} for each in dtypes]
        return write_equivalence_gate(
            tolerances={"from": "a test"}, shapes_covered=covered, device=device
        )

    return write


@pytest.fixture
def gate(write_gate, kernel_device: str) -> Path:
    """The CPU's artifact, for tests that run the kernel in the interpreter."""
    if kernel_device != "cpu":
        pytest.skip("the interpreter is off: this process compiles its kernels for a GPU")
    return write_gate("cpu", "float32")


@pytest.fixture
def events():
    """(event, verdict) of every row of a registry."""
    from hf_attn_backends import registry

    def read(path: Path | None = None) -> list[tuple[str, str]]:
        return [(row.event, row.attention_verdict) for row in registry.read(path)[0]]

    return read
