"""The model of a fine-tune: a Mistral from scratch, or existing weights."""

from __future__ import annotations

import contextlib
import copy
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import torch
from finetune_arguments import FinetuneArguments
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoConfig, AutoModelForCausalLM, MistralConfig, TrainingArguments

from hf_attn_backends import select_attn_implementation
from hf_attn_backends.backends.dims import ModelDims
from hf_attn_backends.errors import GateFailedError, LaunchError, compose

_SDPA_KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def read_config(arguments: FinetuneArguments, vocabulary: int) -> Any:
    """The model's configuration; a new model gets the tokenizer's vocabulary.

    Raises:
        LaunchError: Unknown MistralConfig keys, or weights whose vocabulary is too small.
    """
    if arguments.model_name_or_path:
        config = AutoConfig.from_pretrained(arguments.model_name_or_path)
        have = config.get_text_config().vocab_size
        if have < vocabulary:
            raise LaunchError(
                f"the model's vocabulary must hold the tokenizer's {vocabulary} ids, got {have}; "
                "give the model's own tokenizer with --tokenizer"
            )
        return config
    assert isinstance(arguments.model, dict)  # FinetuneArguments checked it
    plain = MistralConfig()
    unknown = sorted(key for key in arguments.model if not hasattr(plain, key))
    if unknown:
        raise LaunchError(f"model must hold MistralConfig arguments, got {', '.join(unknown)}")
    return MistralConfig(**{"vocab_size": vocabulary, **arguments.model})


def settle_backend(arguments: FinetuneArguments, config: Any, training: TrainingArguments) -> str:
    """Ask the selector before anything expensive is done; with `--gate run`, gate first.

    Returns:
        The backend that the model will be loaded with.

    Raises:
        SelectionError: The request is refused, with every reason.
    """
    device = training.device.type
    asked = copy.deepcopy(config)
    asked.dtype = getattr(torch, attention_dtype(arguments, training))
    if arguments.gate == "run" and (arguments.attn_implementation or "").startswith("triton"):
        head_dim = ModelDims.of(asked).head_dim
        with training.main_process_first(desc="equivalence gate"):
            if training.local_process_index == 0:
                run_gate(device, attention_dtype(arguments, training), head_dim)
    return select_attn_implementation(
        arguments.attn_implementation, device=device, model_config=asked
    )


def attention_dtype(arguments: FinetuneArguments, training: TrainingArguments) -> str:
    """The dtype that attention computes in: autocast's, else the weights'."""
    return "bfloat16" if training.bf16 else "float16" if training.fp16 else arguments.dtype


def run_gate(device: str, dtype: str, head_dim: int | None) -> None:
    """Run `hf-attn gate` for the classes of this run, in a process of its own.

    Its table goes to this process's output; where an artifact covers them already, it says so and
    measures nothing.

    Raises:
        GateFailedError: The gate did not pass.
    """
    command = [sys.executable, "-m", "hf_attn_backends.cli", "gate", "--device", device]
    command += ["--dtype", dtype, *(["--head-dim", str(head_dim)] if head_dim else [])]
    if subprocess.run(command).returncode:
        raise GateFailedError(
            compose(
                "--gate run",
                ["the equivalence gate did not pass; its output is above"],
                works="attn_implementation: sdpa",
            )
        )


def build_model(arguments: FinetuneArguments, config: Any, training: TrainingArguments) -> Any:
    """Load, or initialise on the training device, with the requested backend.

    The request goes in as it was made: the selector inside transformers decides, and the decision
    stays with the model.
    """
    dtype = getattr(torch, arguments.dtype)
    request = arguments.attn_implementation
    if arguments.model_name_or_path:
        model = AutoModelForCausalLM.from_pretrained(
            arguments.model_name_or_path, dtype=dtype, attn_implementation=request
        )
    else:
        torch.manual_seed(training.seed)
        with training.device:  # two billion parameters are drawn in a second on a GPU
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=request
            )
    model.config.use_cache = False
    return model


@contextlib.contextmanager
def pinned_sdpa(name: str) -> Iterator[None]:
    """Allow one kernel of SDPA alone, or, for `auto`, leave the choice to torch."""
    if name == "auto":
        yield
        return
    with sdpa_kernel([_SDPA_KERNELS[name]]):
        yield
