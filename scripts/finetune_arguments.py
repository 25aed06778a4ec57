"""Arguments of `finetune.py`: a YAML file gives defaults, the command line wins.

Through transformers' HfArgumentParser, so that every field of `TrainingArguments` is a key of the
YAML and a flag. Its own `parse_yaml_file` neither lets the command line win nor converts (YAML 1.1
reads `3e-4` as a text), hence `set_defaults`: argparse converts defaults that are texts.
"""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from transformers import HfArgumentParser, TrainingArguments

from hf_attn_backends.errors import LaunchError, compose


def _arg(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class FinetuneArguments:
    """What is trained, on what, under which attention."""

    attn_implementation: str | None = _arg(None, "attention backend, such as sdpa or triton_fa2")
    gate: Literal["require", "run"] = _arg(
        "require", "triton_fa2 without a valid gate: refuse, or run the gate first"
    )
    interpreter: bool = _arg(False, "run Triton's kernels in its interpreter (on a CPU)")
    sdpa_kernel: Literal["auto", "flash", "cudnn", "efficient", "math"] = _arg(
        "auto", "pin one of SDPA's kernels, for the noise floor of a comparison"
    )
    model_name_or_path: str | None = _arg(None, "real weights; without it, `model` is initialised")
    model: dict | str | None = field(
        default=None, metadata={"help": "MistralConfig arguments (JSON on the command line)"}
    )
    dtype: Literal["float32", "bfloat16", "float16"] = _arg("float32", "of the weights")
    tokenizer: str | None = _arg(
        None, "mistral-v1 or a folder; default: model_name_or_path, else mistral-v1"
    )
    corpus: str = _arg("python-docs", "python-docs, python-stdlib, or a .txt / .jsonl / folder")
    sequence_length: int = _arg(256, "tokens of one training sequence")

    def __post_init__(self) -> None:
        if isinstance(self.model, str):
            try:
                self.model = json.loads(self.model)
            except ValueError as error:
                raise LaunchError(f"model must be a JSON object: {error}") from error
        if self.model is not None and not isinstance(self.model, dict):
            raise LaunchError(f"model must be a mapping of MistralConfig arguments: {self.model!r}")
        if self.model and self.model_name_or_path:
            raise LaunchError(
                "model (a new one, random weights) and model_name_or_path (existing weights) "
                "exclude each other; give one"
            )
        if not self.model and not self.model_name_or_path:
            raise LaunchError(
                "model or model_name_or_path must be given; configs/finetune has examples"
            )
        if self.sequence_length < 2:
            raise LaunchError(f"sequence_length must be at least 2, got {self.sequence_length}")
        if self.sdpa_kernel != "auto" and self.attn_implementation != "sdpa":
            raise LaunchError(
                f"sdpa_kernel={self.sdpa_kernel} pins a kernel of attn_implementation=sdpa, "
                f"got attn_implementation={self.attn_implementation}"
            )
        self.tokenizer = self.tokenizer or self.model_name_or_path or "mistral-v1"


def parse(argv: Sequence[str]) -> tuple[FinetuneArguments, TrainingArguments]:
    """Read `--config FILE` and the flags.

    Raises:
        LaunchError: No such file, unknown keys or flags, values that exclude each other.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", type=Path)
    known, rest = first.parse_known_args(list(argv))
    parser = HfArgumentParser(
        (FinetuneArguments, TrainingArguments),  # pyright: ignore[reportArgumentType]
        prog="finetune.py",
        allow_abbrev=False,
        description="Fine-tune with a proven, recorded attention backend. --config FILE.yaml "
        "gives defaults; flags win over it.",
    )
    if known.config is not None:
        parser.set_defaults(**_defaults(known.config, parser))
    try:
        ours, training = parser.parse_args_into_dataclasses(rest, look_for_args_file=False)
    except ValueError as error:
        if isinstance(error, LaunchError):
            raise
        raise LaunchError(f"the command line: {error}") from error
    return ours, training


def _defaults(path: Path, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """The YAML file's keys and values, checked against the parser's."""
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise LaunchError(
            f"--config {path}: {error.strerror}; configs/finetune has some"
        ) from error
    except yaml.YAMLError as error:
        raise LaunchError(f"--config {path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise LaunchError(
            f"--config {path} must hold keys and values, got {type(content).__name__}"
        )
    actions = {action.dest: action for action in parser._actions if action.dest != "help"}
    problems = []
    for key, value in content.items():
        if key not in actions:
            near = difflib.get_close_matches(str(key), actions, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            problems.append(f"unknown key {key!r}{hint}")
            continue
        choices = actions[key].choices
        if choices is not None and value not in choices:
            problems.append(f"{key} must be one of {', '.join(map(str, choices))}, got {value!r}")
    if problems:
        raise LaunchError(compose(f"--config {path}", problems, fix="finetune.py --help lists all"))
    return content
