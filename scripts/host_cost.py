#!/usr/bin/env python3
"""Host microseconds of one attention call on a GPU: operator, adapter, backward, SDPA beside them.

python scripts/host_cost.py --json host.json

Calls are made one after the other without waiting for the GPU, on a shape so small that the GPU
keeps up. Needs the gate's artifact (`hf-attn gate`). Run it on an otherwise idle host.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

from hf_attn_backends.hf.adapter import attention_function
from hf_attn_backends.kernels.ops import triton_attention
from hf_attn_backends.kernels.visibility import CAUSAL

SCALE = 128**-0.5
CALLS, WARM_UP = 300, 30


def microseconds(call: Callable[[], object]) -> float:
    """Mean host time of a call."""
    for _ in range(WARM_UP):
        call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(CALLS):
        call()
    took = time.perf_counter() - begin
    torch.cuda.synchronize()
    return took / CALLS * 1e6


def draw(heads: int, length: int, grad: bool = False) -> torch.Tensor:
    """A bfloat16 tensor `[1, heads, length, 128]` over rows-first memory."""
    rows = torch.randn(1, length, heads, 128, device="cuda", dtype=torch.bfloat16)
    return rows.transpose(1, 2).requires_grad_(grad)


def main(argv: Sequence[str]) -> int:
    """Measure, print, write the JSON."""
    parser = argparse.ArgumentParser(prog="host_cost.py", description="Host cost of a call.")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("launches are timed on a CUDA device, and torch sees none")
    attend, module = attention_function("triton_fa2"), torch.nn.Linear(1, 1)
    found = {}
    with torch.no_grad():
        q, k, v = draw(32, 128), draw(8, 128), draw(8, 128)
        for variant in ("hopper", "auto", "triton"):
            found[f"operator, {variant}"] = microseconds(
                lambda variant=variant: triton_attention(q, k, v, CAUSAL, variant=variant)
            )
        found["adapter to launch, auto"] = microseconds(
            lambda: attend(module, q, k, v, None, scaling=SCALE)
        )
        found["sdpa"] = microseconds(
            lambda: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        )
        one, cache = draw(32, 1), draw(8, 4096)
        found["adapter, decode 1x4096"] = microseconds(
            lambda: attend(module, one, cache, cache, None, scaling=SCALE)
        )
    leaves = [draw(32, 128, True), draw(8, 128, True), draw(8, 128, True)]
    out = attend(module, *leaves, None, scaling=SCALE)[0]
    grad = torch.randn_like(out)
    found["backward, auto"] = microseconds(
        lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)
    )
    for name, us in found.items():
        print(f"{name:26} {us:7.1f} us")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
