"""The families that `triton_fa2` is held to: a tiny configuration of each, and what must serve it.

One table for the tests, for the matrix that README shows, for the CPU and for a GPU. What a row
expects is read off the modelling code: one entry an attention call of a forward pass, in order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import family_configs as tiny
from family_configs import VOCABULARY, Size, sliding, small, windowed


@dataclass(frozen=True, slots=True)
class Family:
    """One row.

    Attributes:
        title: As README names it.
        model_type: transformers' name of the configuration.
        config: Gives the configuration's fields for a size.
        whole: Call class suffix (kind, features) of every attention call without padding.
        padded: Likewise, with one padded row in the batch.
        auto: The auto class that builds the model.
        kind: Which inputs it takes: `decoder`, `encoder`, `translator` or `image`.
        width: The query's head dim in multiples of the size's.
    """

    title: str
    model_type: str
    config: Callable[[Size], dict[str, Any]]
    whole: tuple[str, ...]
    padded: tuple[str, ...]
    auto: str = "AutoModelForCausalLM"
    kind: str = "decoder"
    width: int = 1

    @property
    def yardstick(self) -> str:
        """Whose error is the measure: SDPA's, which knows neither softcap nor sinks, or eager's."""
        unknown = any("softcap" in suffix or "sinks" in suffix for suffix in self.whole)
        return "eager" if unknown else "sdpa"

    def classes(self, case: str, dtype: str, size: Size) -> dict[str, int]:
        """How often each call class must run in one forward pass."""
        expected: dict[str, int] = {}
        for suffix in self.whole if case == "whole" else self.padded:
            name = f"{dtype}/d{self.width * size.head_dim}/{suffix}"
            expected[name] = expected.get(name, 0) + 1
        return expected


@dataclass(frozen=True, slots=True)
class Refusal:
    """A family that must be refused, when it is loaded or when it is called, with the reason.

    Attributes:
        title: As README names it.
        model_type: transformers' name of the configuration.
        auto: The auto class that builds the model.
        reason: A part of the refusal's text.
        config: The configuration's fields.
    """

    title: str
    model_type: str
    auto: str
    reason: str
    config: dict[str, Any] = field(default_factory=dict)


_WINDOWS = ("window", "causal")
_CAUSAL = ("causal", "causal")
_ROWS = ("intervals", "intervals")


def _with(feature: str, kinds: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{kind}+{feature}" for kind in kinds)


FAMILIES = {
    "mistral": Family("Mistral", "mistral", windowed, ("window", "window"), _ROWS),
    "ministral": Family("Ministral", "ministral", sliding, _WINDOWS, _ROWS),
    "ministral3": Family("Ministral 3", "ministral3", windowed, ("window", "window"), _ROWS),
    "mixtral": Family(
        "Mixtral", "mixtral", lambda size: windowed(size, **tiny.EXPERTS), ("window", "window"),
        _ROWS,
    ),
    "llama": Family("Llama 3", "llama", small, _CAUSAL, _ROWS),
    "llama4": Family("Llama 4 text", "llama4_text", tiny.llama4, ("intervals", "causal"), _ROWS),
    "qwen2": Family(
        "Qwen2", "qwen2", lambda size: sliding(size, use_sliding_window=True), _WINDOWS, _ROWS
    ),
    "qwen3": Family(
        "Qwen3", "qwen3", lambda size: sliding(size, use_sliding_window=True), _WINDOWS, _ROWS
    ),
    "qwen3_moe": Family(
        "Qwen3-MoE", "qwen3_moe", lambda size: small(size, **tiny.EXPERTS), _CAUSAL, _ROWS
    ),
    "gemma2": Family(
        "Gemma 2", "gemma2", tiny.gemma2, _with("softcap", _WINDOWS), _with("softcap", _ROWS)
    ),
    "gemma3": Family(
        "Gemma 3 text", "gemma3_text", lambda size: sliding(size, query_pre_attn_scalar=24),
        _WINDOWS, _ROWS,
    ),
    "gemma3_vision": Family(
        "Gemma 3 vision-language", "gemma3", tiny.gemma3_vision, ("full", *_ROWS), ("full", *_ROWS),
        auto="AutoModelForImageTextToText", kind="image",
    ),
    "phi3": Family("Phi-3", "phi3", windowed, ("window", "window"), _ROWS),
    "olmo2": Family("OLMo 2", "olmo2", small, _CAUSAL, _ROWS),
    "granite": Family(
        "Granite", "granite", lambda size: small(size, attention_multiplier=0.4), _CAUSAL, _ROWS
    ),
    "smollm3": Family(
        "SmolLM3", "smollm3", lambda size: sliding(size, use_sliding_window=True), _WINDOWS, _ROWS
    ),
    "starcoder2": Family(
        "StarCoder2", "starcoder2",
        lambda size: windowed(size, residual_dropout=0.0, embedding_dropout=0.0),
        ("window", "window"), _ROWS,
    ),
    "gpt_oss": Family(
        "gpt-oss", "gpt_oss", lambda size: sliding(size, **tiny.EXPERTS),
        _with("sinks", _WINDOWS), _with("sinks", _ROWS),
    ),
    "deepseek_v2": Family(
        "DeepSeek V2", "deepseek_v2", tiny.latent, _with("value_dim", _CAUSAL),
        _with("value_dim", _ROWS), width=2,
    ),
    "deepseek_v3": Family(
        "DeepSeek V3", "deepseek_v3", tiny.latent, _with("value_dim", _CAUSAL),
        _with("value_dim", _ROWS), width=2,
    ),
    "modernbert": Family(
        "ModernBERT", "modernbert", tiny.modernbert, ("full", "intervals"), _ROWS,
        auto="AutoModelForMaskedLM", kind="encoder",
    ),
    "t5gemma": Family(
        "T5Gemma", "t5gemma", tiny.t5gemma,
        _with("softcap", ("intervals", "full", "window", "full", "causal", "full")),
        _with("softcap", (*_ROWS, "window", "intervals", "causal", "intervals")),
        auto="AutoModelForSeq2SeqLM", kind="translator",
    ),
    "bart": Family(
        "BART", "bart", tiny.bart, ("full", "causal", "full"),
        ("intervals", "causal", "intervals"),
        auto="AutoModelForSeq2SeqLM", kind="translator",
    ),
}  # fmt: skip

REFUSALS = {
    "bloom": Refusal("BLOOM", "bloom", "AutoModelForCausalLM", "in its own code", {"n_layer": 1}),
    "falcon": Refusal(
        "Falcon", "falcon", "AutoModelForCausalLM", "in its own code", {"num_hidden_layers": 1}
    ),
    "umt5": Refusal(
        "UMT5", "umt5", "AutoModelForSeq2SeqLM", "position_bias",
        {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 1,
         "num_heads": 2, "pad_token_id": 0, "decoder_start_token_id": 0},
    ),
}  # fmt: skip
