"""Times of attention backends: `NaN` and a reason for what cannot run, never 0.

`benchmark_backends` measures, `load_sdpa_baseline` reads what was pinned, `verdict` compares;
`hf-attn bench` does it all and times the peers side by side.
"""

from __future__ import annotations

from hf_attn_backends.bench.backends import (
    benchmark_backends,
    benchmark_backends_with_reasons,
)
from hf_attn_backends.bench.baselines import Baseline, load_baseline, load_sdpa_baseline
from hf_attn_backends.bench.verdicts import Verdict, verdict, verdicts

__all__ = [
    "Baseline",
    "Verdict",
    "benchmark_backends",
    "benchmark_backends_with_reasons",
    "load_baseline",
    "load_sdpa_baseline",
    "verdict",
    "verdicts",
]
