"""`finetune.py` end to end, in this process: losses, the record, refusals."""

from __future__ import annotations

import json
from types import SimpleNamespace

import compare_runs
import finetune
import finetune_model
import pytest
import torch
import yaml
from finetune_model import pinned_sdpa
from run_files import load_run
from training_log import LossLog

from hf_attn_backends import gate, registry

MODEL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "sliding_window": None,
    "tie_word_embeddings": True,
}
TEXT = "Attention that carries its own proof. " * 40

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture
def launch(tmp_path, home, monkeypatch):
    """Run `finetune.py` with a tiny model; returns (exit code, output folder)."""
    pytest.importorskip("mistral_common", reason="the extra 'demo' is not installed")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)

    def run(name, *flags, **keys):
        content = {
            "attn_implementation": "sdpa",
            "model": MODEL,
            "corpus": str(tmp_path / "text.txt"),
            "sequence_length": 33,
            "output_dir": str(tmp_path / name),
            "use_cpu": True,
            "max_steps": 3,
            "per_device_train_batch_size": 2,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "constant",
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
            **keys,
        }
        content = {key: value for key, value in content.items() if value != "absent"}
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(content))
        return finetune.main(["--config", str(path), *flags]), tmp_path / name

    return run


def bless(home):
    """An artifact for the class that these runs need."""
    gate.write_equivalence_gate(
        tolerances={"made up": "by a test"},
        shapes_covered=[{"dtype": "float32", "head_dim": 16, "visibility": "causal"}],
        device="cpu",
    )


def test_triton_fa2_trains_like_sdpa_and_is_recorded(launch, home, kernel_device):
    if kernel_device != "cpu":
        pytest.skip("the CPU path needs Triton's interpreter, which is off beside a GPU")
    bless(home)
    code, sdpa = launch("sdpa")
    assert code == 0
    code, ours = launch("ours", attn_implementation="triton_fa2")
    assert code == 0
    one, other = load_run(sdpa), load_run(ours)
    assert one.steps == other.steps == (1, 2, 3)
    assert one.series["loss"][0] == pytest.approx(10.38, abs=0.1)  # ln(32000): random weights
    assert one.series["loss"][2] < one.series["loss"][0]
    assert other.series["loss"] == pytest.approx(one.series["loss"], abs=1e-4)
    assert other.series["grad_norm"] == pytest.approx(one.series["grad_norm"], rel=1e-3)
    assert compare_runs.main([str(sdpa), str(ours)]) == 0
    facts = other.facts
    assert facts["attention"]["requested"] == facts["attention"]["resolved"] == "triton_fa2"
    assert facts["corpus"]["characters"] == len(TEXT)
    assert facts["training"]["sequence_length"] == 33
    assert facts["speed"]["tokens"] == 3 * 2 * 33
    assert facts["speed"]["tokens_per_second_steady"] is None  # three steps only warm up
    assert all(step["seconds"] > 0 for step in facts["steps"])
    rows = registry.read()
    assert "triton_fa2" in json.dumps([row if isinstance(row, dict) else str(row) for row in rows])


def test_without_a_gate_it_is_refused_before_anything_is_made(launch, capsys, home):
    code, folder = launch("ours", attn_implementation="triton_fa2")
    assert code == 1
    said = capsys.readouterr().err
    assert "GateMissingError" in said
    assert "equivalence gate" in said
    assert "hf-attn gate --device cpu" in said
    assert not folder.exists()


def test_gate_run_measures_the_classes_of_the_run(launch, monkeypatch, home):
    asked = []

    def instead(command, **kwargs):
        asked.append(command[2:])
        return SimpleNamespace(returncode=1)

    monkeypatch.setattr(finetune_model, "subprocess", SimpleNamespace(run=instead))
    code, _ = launch("ours", "--gate", "run", attn_implementation="triton_fa2")
    assert code == 1
    flags = ["--device", "cpu", "--dtype", "float32", "--head-dim", "16"]
    assert asked == [["hf_attn_backends.cli", "gate", *flags]]
    asked.clear()
    assert launch("sdpa", "--gate", "run")[0] == 0
    assert asked == []  # sdpa needs no gate


def test_unknown_and_impossible_backends_are_refused(launch, capsys):
    assert launch("a", attn_implementation="spda")[0] == 1
    assert "unknown backend" in capsys.readouterr().err
    assert launch("b", attn_implementation="flashmla")[0] == 1
    assert "head_dim" in capsys.readouterr().err


def test_existing_weights_and_a_pinned_kernel(launch, tmp_path, capsys):
    from transformers import AutoModelForCausalLM, MistralConfig

    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(MistralConfig(vocab_size=32_000, **MODEL)).save_pretrained(
        tmp_path / "weights"
    )
    existing = {
        "model": "absent",
        "model_name_or_path": str(tmp_path / "weights"),
        "tokenizer": "mistral-v1",
    }
    code, math = launch("math", "--sdpa_kernel", "math", **existing)
    assert code == 0
    code, flash = launch("flash", "--sdpa_kernel", "flash", **existing)
    assert code == 0
    assert load_run(math).label == "math (sdpa:math)"
    assert load_run(flash).series["loss"] == pytest.approx(load_run(math).series["loss"], abs=1e-4)
    assert load_run(math).facts["model"]["name_or_path"] == str(tmp_path / "weights")


def test_a_vocabulary_that_is_too_small_is_refused(launch, tmp_path, capsys):
    from transformers import AutoModelForCausalLM, MistralConfig

    small = AutoModelForCausalLM.from_config(MistralConfig(vocab_size=100, **MODEL))
    small.save_pretrained(tmp_path / "weights")
    weights = str(tmp_path / "weights")
    assert launch("x", model="absent", model_name_or_path=weights, tokenizer="mistral-v1")[0] == 1
    assert "32000 ids, got 100" in capsys.readouterr().err


def test_pinning_allows_one_kernel_and_restores():
    before = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()
    with pinned_sdpa("math"):
        assert not torch.backends.cuda.flash_sdp_enabled()
        assert torch.backends.cuda.math_sdp_enabled()
    with pinned_sdpa("auto"):
        assert torch.backends.cuda.flash_sdp_enabled() == before[0]
    assert before == (
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
    )


def test_the_steady_step_is_the_median_after_the_warm_up():
    log = LossLog()
    for step, seconds in enumerate((9.0, 8.0, 7.0, 1.0, 3.0, 2.0), 1):
        log.steps[step] = {"loss": 1.0, "seconds": seconds}
    assert log.steady_seconds() == 2.0
