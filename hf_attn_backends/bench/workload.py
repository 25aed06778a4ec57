"""What is timed: one shape of self-attention, its inputs and its arithmetic.

Shapes: `B` batch, `H` query heads, `G` key/value heads, `S` length (query and key alike), `D` head
dim. Tensors are made as `[B, S, H, D]` memory, the layout in which a transformer's projections
leave them, and handed out as `[B, H, S, D]` views.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hf_attn_backends.errors import BenchmarkError

PHASES = ("forward", "backward")
SHAPES_GPU = ("4x512", "4x1024", "4x2048", "4x4096", "2x8192", "1x16384")
SHAPES_CPU = ("1x256", "1x512")


class Inputs(NamedTuple):
    """`query [B, H, S, D]`, `key` and `value [B, G, S, D]`, `grad_out [B, H, S, D]`."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad_out: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One shape.

    Attributes:
        batch, seq_len, heads, kv_heads, head_dim: `B, S, H, G, D`.
        dtype: Of query, key and value.
        causal: Causal, or every key seen by every row.
        device: `cpu`, `cuda` or `cuda:N`.
    """

    batch: int = 4
    seq_len: int = 512
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    causal: bool = True
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("batch", "seq_len", "heads", "kv_heads", "head_dim"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise BenchmarkError(f"{name} must be an integer of at least 1, got {value!r}")
        if self.heads % self.kv_heads:
            raise BenchmarkError(
                f"heads must be a whole multiple of kv_heads, got {self.heads} over {self.kv_heads}"
            )

    @property
    def label(self) -> str:
        """`4x512`: batch x length."""
        return f"{self.batch}x{self.seq_len}"

    @property
    def score_bytes(self) -> int:
        """Memory of one score matrix `[B, H, S, S]` in the workload's dtype."""
        return self.batch * self.heads * self.seq_len**2 * self.dtype.itemsize

    def flops(self, phase: str) -> float:
        """Useful arithmetic: two products a visible pair forward, five backward (x 2.5).

        A causal row sees half of the keys on average, so causal counts `S^2 / 2` pairs.
        """
        pairs = self.seq_len**2 / 2 if self.causal else self.seq_len**2
        forward = 4.0 * self.batch * self.heads * self.head_dim * pairs
        return {"forward": forward, "backward": 2.5 * forward}[phase]

    def tflops(self, phase: str, ms: float) -> float:
        """TFLOP/s at `ms` milliseconds; NaN for NaN."""
        return self.flops(phase) / ms / 1e9

    def inputs(self, seed: int = 0) -> Inputs:
        """Seeded normal tensors on the workload's device; no gradient is asked for yet."""
        generator = torch.Generator(self.device).manual_seed(seed)

        def normal(heads: int) -> Tensor:
            shape = (self.batch, self.seq_len, heads, self.head_dim)
            made = torch.randn(shape, generator=generator, device=self.device, dtype=torch.float32)
            return made.to(self.dtype).transpose(1, 2)

        return Inputs(
            normal(self.heads), normal(self.kv_heads), normal(self.kv_heads), normal(self.heads)
        )


def parse_shape(text: str) -> tuple[int, int]:
    """`4x512` -> (4, 512).

    Raises:
        BenchmarkError: It is not `BATCHxLENGTH`.
    """
    batch, cross, length = text.strip().lower().partition("x")
    if not cross or not batch.isdigit() or not length.isdigit():
        raise BenchmarkError(f"a shape must be BATCHxLENGTH such as 4x512, got {text!r}")
    return int(batch), int(length)
