"""The dimensions of a model that decide, before any machine is asked, what can serve it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hf_attn_backends.call import features_name


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDims:
    """What a backend has to know of a model; None where the configuration does not say.

    Attributes:
        head_dim: Width of a query and key head. With latent attention: of the expanded head.
        v_head_dim: Width of a value head.
        heads, kv_heads: Query and key/value heads.
        kv_lora_rank: Rank of the latent of multi-head latent attention; None without it.
        sliding_window: Keys a row sees, its own included; None without a window.
        softcap: `c` in `c * tanh(scores / c)`; None without it.
        model_type: transformers' name of the architecture.
        dtype: `bfloat16`, `float16`, `float32`, or None where it is not decided yet.
    """

    head_dim: int | None = None
    v_head_dim: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    kv_lora_rank: int | None = None
    sliding_window: int | None = None
    softcap: float | None = None
    model_type: str | None = None
    dtype: str | None = None

    @classmethod
    def of(cls, config: object) -> ModelDims:
        """Read the dimensions from a configuration, by its attributes (or keys) alone.

        Args:
            config: A transformers configuration, anything with the same attributes, or a mapping.
                A composite one (text and vision) is read through `get_text_config()`.
        """
        if not isinstance(config, Mapping):
            get_text_config = getattr(config, "get_text_config", None)
            if callable(get_text_config):
                config = get_text_config()

        def get(*names: str):
            for name in names:
                found = (
                    config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
                )
                if found is not None:
                    return found
            return None

        heads = get("num_attention_heads", "n_head", "num_heads")
        latent = get("kv_lora_rank")
        nope, rope = get("qk_nope_head_dim"), get("qk_rope_head_dim")
        head_dim = nope + rope if latent and nope and rope else get("head_dim")
        hidden = get("hidden_size", "n_embd", "d_model")
        if head_dim is None and heads and hidden:
            head_dim = hidden // heads
        dtype = get("dtype")
        window = get("sliding_window") if get("use_sliding_window") is not False else None
        return cls(
            head_dim=head_dim,
            v_head_dim=get("v_head_dim") or head_dim,
            heads=heads,
            kv_heads=get("num_key_value_heads", "n_head_kv", "num_kv_heads") or heads,
            kv_lora_rank=latent,
            sliding_window=window,
            softcap=get("attn_logit_softcapping"),
            model_type=get("model_type"),
            dtype=None if dtype is None else str(dtype).removeprefix("torch."),
        )

    @property
    def grouped(self) -> bool:
        """Whether several query heads share one key/value head."""
        return self.heads is not None and self.kv_heads is not None and self.kv_heads < self.heads

    @property
    def features(self) -> str:
        """What every attention call of the model has besides, as far as its configuration says."""
        apart = None not in (self.head_dim, self.v_head_dim) and self.v_head_dim != self.head_dim
        return features_name(softcap=self.softcap is not None, value_dim=apart)

    def describe(self) -> str:
        """`mistral: head_dim 128, 32 query heads over 8 key/value heads`."""
        heads = (
            "unknown heads"
            if self.heads is None
            else f"{self.heads} query heads over {self.kv_heads} key/value heads"
        )
        return f"{self.model_type or 'this model'}: head_dim {self.head_dim}, {heads}"
