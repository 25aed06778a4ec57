#!/usr/bin/env python3
"""Fine-tune a Mistral model with a proven, recorded attention backend.

python scripts/finetune.py --config configs/finetune/cpu_tiny.yaml
python scripts/finetune.py --config configs/finetune/cpu_interpreter.yaml --max_steps 2
accelerate launch --config_file configs/accelerate/ddp.yaml \
    scripts/finetune.py --config configs/finetune/h200_mistral_8layers.yaml

Offline by default: text from the running Python, the tokenizer from the mistral-common wheel.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import interpreter_first

from hf_attn_backends.errors import AttentionBackendError


def main(argv: Sequence[str]) -> int:
    """Train; returns the exit code."""
    interpreter_first.prepare(argv)
    try:
        finetune(argv)
    except AttentionBackendError as error:
        print(f"finetune: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def finetune(argv: Sequence[str]) -> None:
    """Everything between the arguments and the record."""
    # Below `prepare`: these import transformers, torch and, some day, triton.
    import torch
    from finetune_arguments import parse
    from finetune_model import build_model, pinned_sdpa, read_config, settle_backend
    from mistral_tokenizer import load_tokenizer
    from text_corpus import Blocks, load_corpus
    from training_log import LossLog, write_log
    from transformers import Trainer, set_seed

    from hf_attn_backends import AttentionBackendCallback

    arguments, training = parse(argv)
    set_seed(training.seed)
    tokenizer = load_tokenizer(str(arguments.tokenizer))
    config = read_config(arguments, tokenizer.vocabulary)
    settle_backend(arguments, config, training)
    corpus = load_corpus(arguments.corpus)
    blocks = Blocks(tokenizer.encode(corpus.documents), arguments.sequence_length)
    model = build_model(arguments, config, training)
    log = LossLog()
    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=blocks,
        callbacks=[AttentionBackendCallback(), log],
    )
    begin = time.perf_counter()
    with pinned_sdpa(arguments.sdpa_kernel):
        result = trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    seconds = time.perf_counter() - begin
    if not trainer.is_world_process_zero():
        return
    tokens = result.global_step * training.train_batch_size * training.world_size
    tokens *= training.gradient_accumulation_steps * arguments.sequence_length
    steady = log.steady_seconds() * result.global_step / tokens  # seconds a token
    speed: dict[str, Any] = {
        "train_seconds": round(seconds, 3),
        "tokens": tokens,
        "tokens_per_second": round(tokens / seconds, 1),
        "tokens_per_second_steady": None if math.isnan(steady) else round(1 / steady, 1),
    }
    if training.device.type == "cuda":
        speed["peak_memory_mib"] = round(torch.cuda.max_memory_allocated() / 2**20, 1)
    facts = run_facts(arguments, training, model, tokenizer, corpus.facts(), blocks)
    path = write_log(Path(str(training.output_dir)), log, {**facts, "speed": speed})
    losses = [step["loss"] for _, step in sorted(log.steps.items())]
    print(
        f"{result.global_step} steps, {tokens:,} tokens in {seconds:.1f} s "
        f"({tokens / seconds:,.0f} a second); loss {losses[0]:.4f} -> {losses[-1]:.4f}\n"
        f"losses and gradient norms: {path}"
    )


def run_facts(
    arguments: Any, training: Any, model: Any, tokenizer: Any, corpus: dict[str, Any], blocks: Any
) -> dict[str, Any]:
    """What the losses depend on; `compare_runs.py` compares these before it compares losses."""
    from hf_attn_backends import environment
    from hf_attn_backends.hf.decisions import decision_of

    decision = decision_of(model)
    return {
        "attention": {
            "requested": arguments.attn_implementation,
            "resolved": model.config._attn_implementation,
            "sdpa_kernel": arguments.sdpa_kernel,
            "reasons": list(decision.reasons) if decision else ["unknown: no decision was made"],
        },
        "corpus": {**corpus, "tokens": blocks.tokens, "blocks": len(blocks)},
        "tokenizer": {"name": tokenizer.name, "sha256": tokenizer.sha256},
        "model": {
            "name_or_path": arguments.model_name_or_path,
            "parameters": sum(p.numel() for p in model.parameters()),
            "config": {k: v for k, v in model.config.to_diff_dict().items() if _is_plain(v)},
            "dtype": arguments.dtype,
        },
        "training": {
            "seed": training.seed,
            "sequence_length": arguments.sequence_length,
            "batch": training.per_device_train_batch_size,
            "accumulation": training.gradient_accumulation_steps,
            "world_size": training.world_size,
            "learning_rate": training.learning_rate,
            "bf16": training.bf16,
            "gradient_checkpointing": training.gradient_checkpointing,
        },
        "versions": environment.versions(),
        "device": environment.device_facts(training.device.type),
    }


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, str | int | float | bool)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
