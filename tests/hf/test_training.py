"""Saving, reloading elsewhere, and a Trainer that resumes."""

from __future__ import annotations

import subprocess
import sys

import torch

ELSEWHERE = """
import sys
from transformers import AutoModelForCausalLM
print("LOADED", AutoModelForCausalLM.from_pretrained(sys.argv[1]).config._attn_implementation)
try:
    AutoModelForCausalLM.from_pretrained(sys.argv[1], attn_implementation="triton_fa2")
except ValueError as error:
    print("REFUSED", "triton_fa2" in str(error))
assert "hf_attn_backends" not in sys.modules
"""


def test_a_saved_folder_loads_without_the_package_and_says_so(models, calls, tmp_path):
    _, tried = models.pair(num_hidden_layers=1)
    ids = models.ids(2, 7)
    with torch.no_grad():
        want = tried(input_ids=ids).logits
        tried.save_pretrained(tmp_path)
        again = type(tried).from_pretrained(tmp_path, attn_implementation="triton_fa2").eval()
        assert torch.equal(again(input_ids=ids).logits, want)
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, str(tmp_path)], capture_output=True, text=True
    )
    said = [line for line in done.stdout.splitlines() if line.startswith(("LOADED", "REFUSED"))]
    assert said == ["LOADED sdpa", "REFUSED True"], done.stderr[-800:]


def test_a_resumed_trainer_ends_where_a_straight_one_does(models, calls, tmp_path):
    from transformers import Trainer, TrainingArguments

    data = [{"input_ids": models.ids(1, 5 + i % 4, seed=i)[0].tolist()} for i in range(8)]

    def collate(rows):
        total = max(len(row["input_ids"]) for row in rows)
        pad = [total - len(row["input_ids"]) for row in rows]
        ids = torch.tensor([r["input_ids"] + [0] * n for r, n in zip(rows, pad, strict=True)])
        mask = torch.tensor(
            [[1] * len(r["input_ids"]) + [0] * n for r, n in zip(rows, pad, strict=True)]
        )
        return {"input_ids": ids, "attention_mask": mask,
                "labels": ids.masked_fill(mask == 0, -100)}  # fmt: skip

    def trainer(attn, folder, steps):
        model = models.build(models.config(num_hidden_layers=1), attn)
        arguments = TrainingArguments(
            output_dir=str(folder), max_steps=steps, per_device_train_batch_size=2,
            learning_rate=0.05, save_strategy="steps", save_steps=2, report_to=[],
            disable_tqdm=True, seed=3, use_cpu=True, optim="sgd", lr_scheduler_type="constant",
            max_grad_norm=0.0,
        )  # fmt: skip
        return Trainer(model=model, args=arguments, train_dataset=data, data_collator=collate)

    straight = trainer("triton_fa2", tmp_path / "a", 4)
    straight.train()
    trainer("triton_fa2", tmp_path / "b", 2).train()
    resumed = trainer("triton_fa2", tmp_path / "b", 4)
    resumed.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-2"))
    reference = trainer("eager", tmp_path / "c", 4)
    reference.train()
    start = models.build(models.config(num_hidden_layers=1), "eager").state_dict()
    moved = 0.0
    for name, parameter in straight.model.named_parameters():
        moved = max(moved, float((parameter.detach() - start[name]).abs().max()))
        assert torch.equal(parameter, dict(resumed.model.named_parameters())[name]), name
        models.near(parameter, dict(reference.model.named_parameters())[name], limit=1e-4)
    assert moved > 1e-2
    assert resumed.model.config._attn_implementation == "triton_fa2"
    assert resumed.state.global_step == 4
