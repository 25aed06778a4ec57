"""What is known of transformers' model families, where a mask alone does not say it.

Names are `config.model_type` of the text (or vision) configuration that the mask functions get. A
family that is in none of these sets is served too, by a dense mask: always right, and slower. The
tests read the installed transformers to hold these sets to it.
"""

from __future__ import annotations

PLAIN = frozenset(
    (
        "apertus", "arcee", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "exaone4", "gemma",
        "gemma2", "glm", "glm4", "gpt2", "gpt_neox", "gpt_oss", "granite", "granitemoe", "helium",
        "llama", "llama4_text", "ministral", "ministral3", "mistral", "mistral4", "mixtral",
        "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "opt", "persimmon", "phi", "phi3", "phimoe",
        "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "stablelm", "starcoder2",
        "t5_gemma_module",
    )
)  # fmt: skip
"""Decoders whose masks are causal, window, chunk, padding and packing, and nothing over them."""

WHOLE_ROWS = PLAIN | frozenset(
    (
        "bart", "bert", "camembert", "clip_text_model", "distilbert", "electra", "gemma3_text",
        "modernbert", "roberta", "xlm-roberta",
    )
)  # fmt: skip
"""Families whose modelling code hands masks to the attention function untouched, so that they may
be intervals `[B, 1, M, 2]`; all others get the boolean `[B, 1, M, N]` that every one can read."""

PASSES_WINDOW = frozenset(
    (
        "cohere2", "exaone4", "gemma2", "gemma3_text", "gpt_oss", "ministral", "ministral3",
        "mistral", "mixtral", "olmo3", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3",
        "starcoder2", "t5_gemma_module",
    )
)  # fmt: skip
"""Families that give `sliding_window` to the attention function of exactly their sliding layers,
so that no mask at all is needed; qwen2_moe and phimoe do not."""
