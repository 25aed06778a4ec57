"""The names that are registered with transformers; a file of its own, which imports nothing."""

from __future__ import annotations

NAMES = ("triton_fa2", "triton_decode", "auto")
