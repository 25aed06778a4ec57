"""The Mistral tokenizer, offline: SentencePiece on the model that `mistral-common` carries.

`LlamaTokenizer` and its fast twin read the same file differently (whitespace runs, no BOS, or a
three-token vocabulary), so neither is used, and the ids of a known text are checked at load.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from hf_attn_backends.errors import LaunchError, compose

NAME = "mistral-v1"
VOCABULARY = 32_000
PROBE = "Attention that carries its own proof: f(x) = x**2\n\tdéjà vu, 北京."
PROBE_IDS = [
    *(5288, 2148, 369, 21277, 871, 1216, 7167, 28747, 285, 28732, 28744, 28731, 327, 1318, 348),
    *(28750, 13, 12, 28715, 28797, 23796, 20620, 28725, 28705, 29799, 29936, 28723),
]


@dataclass(frozen=True, slots=True)
class MistralTokenizer:
    """Mistral-7B-v0.1's tokenizer.

    Attributes:
        processor: The SentencePiece processor.
        name, vocabulary, sha256: What the record keeps of it.
    """

    processor: Any
    name: str
    vocabulary: int
    sha256: str

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """BOS, ids, EOS of each text; on several threads."""
        return self.processor.encode(list(texts), add_bos=True, add_eos=True, num_threads=-1)


def load_mistral_tokenizer() -> MistralTokenizer:
    """Load and check it.

    Raises:
        LaunchError: The `demo` extra is not installed, or the file is not the known tokenizer.
    """
    try:
        import sentencepiece

        model = (resources.files("mistral_common") / "data" / "tokenizer.model.v1").read_bytes()
    except ImportError as error:
        raise LaunchError(
            compose(
                f"tokenizer {NAME!r} was asked for",
                [f"the extra 'demo' is not installed ({error})"],
                works="tokenizer: a folder with a tokenizer, through AutoTokenizer",
                fix="pip install 'hf-attn-backends[demo]'  (in a checkout: pip install '.[demo]')",
            )
        ) from error
    except OSError as error:
        raise LaunchError(
            f"tokenizer {NAME!r} was asked for, and the installed mistral-common does not carry "
            f"it: {error}; mistral-common 1.13 does"
        ) from error
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    check_known_ids(processor.vocab_size(), processor.encode(PROBE))
    return MistralTokenizer(
        processor, NAME, processor.vocab_size(), hashlib.sha256(model).hexdigest()
    )


def check_known_ids(vocabulary: int, ids: list[int]) -> None:
    """Raise LaunchError unless vocabulary size and the ids of `PROBE` are the known ones."""
    if vocabulary != VOCABULARY:
        raise LaunchError(f"{NAME} must have {VOCABULARY} pieces, got {vocabulary}")
    if ids != PROBE_IDS:
        raise LaunchError(f"{NAME} must read its probe text as {PROBE_IDS}, got {ids}")


@dataclass(frozen=True, slots=True)
class FolderTokenizer:
    """A tokenizer from a folder, through transformers' AutoTokenizer."""

    inner: Any
    name: str
    vocabulary: int
    sha256: str

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text between the tokenizer's own begin and end tokens, where it has them."""
        begin = [i for i in [self.inner.bos_token_id] if i is not None]
        end = [i for i in [self.inner.eos_token_id] if i is not None]
        found = self.inner(list(texts), add_special_tokens=False)["input_ids"]
        return [[*begin, *ids, *end] for ids in found]


Tokenizer = MistralTokenizer | FolderTokenizer


def load_tokenizer(name: str) -> Tokenizer:
    """`mistral-v1`, or a folder that AutoTokenizer reads."""
    if name == NAME:
        return load_mistral_tokenizer()
    from transformers import AutoTokenizer

    try:
        inner = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise LaunchError(
            compose(
                f"tokenizer {name!r} was asked for",
                [" ".join(str(error).split())[:300]],
                works=f"{NAME}, or a folder with a tokenizer",
            )
        ) from error
    vocabulary = sorted(inner.get_vocab().items())
    digest = hashlib.sha256(repr(vocabulary).encode()).hexdigest()
    return FolderTokenizer(inner, name, len(inner), digest)
