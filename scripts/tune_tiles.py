#!/usr/bin/env python3
"""Time candidate tiles of the portable kernel beside SDPA.

python scripts/tune_tiles.py --shapes 4x4096 1x16384 --json tiles.json

For the table in kernels/triton/tiles.py: run it on a GPU whose architecture the table does not name
yet, or with a new Triton. Every candidate is compiled, captured in a CUDA graph and replayed in
turns with the others; medians of three rounds. Nothing is tuned at run time: what wins here is
written into the table by hand.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from triton.testing import do_bench

from hf_attn_backends import environment
from hf_attn_backends.bench import results
from hf_attn_backends.bench.timing import capture
from hf_attn_backends.kernels.triton.backward import launch_backward
from hf_attn_backends.kernels.triton.forward import launch_forward
from hf_attn_backends.kernels.triton.tiles import Tile, TileSet, tiles_for
from hf_attn_backends.kernels.visibility import CAUSAL

FORWARD = [(128, 128, 8, 2), (128, 64, 8, 3), (128, 64, 8, 2), (128, 64, 4, 3), (64, 64, 4, 3)]
DKDV = [(64, 128, 8, 3), (64, 128, 8, 2), (32, 128, 8, 3), (64, 64, 4, 2), (64, 64, 8, 3)]
DQ = [(128, 64, 8, 3), (128, 128, 8, 2), (128, 64, 8, 2), (64, 64, 4, 3), (64, 128, 4, 2)]
PRODUCTS = {"forward": 1.0, "dkdv": 2.0, "dq": 1.5}  # matrix products, in units of the forward's


def candidates(
    shape: tuple[int, int], head_dim: int, device: str = "cuda", heads: tuple[int, int] = (32, 8)
) -> dict[tuple[str, str], Callable[[], object]]:
    """Every arm of one shape: (phase, name) -> call.

    Args:
        shape: Batch and length.
        head_dim: `D`.
        device: A CUDA device; `cpu` under Triton's interpreter, where nothing is worth timing.
        heads: Of queries, and of keys and values.
    """
    batch, length = shape

    def draw(count: int) -> torch.Tensor:
        rows = torch.randn(batch, length, count, head_dim, device=device, dtype=torch.bfloat16)
        return rows.transpose(1, 2)

    query, key, value, grad = draw(heads[0]), draw(heads[1]), draw(heads[1]), draw(heads[0])
    scale = head_dim**-0.5
    out, lse = launch_forward(query, key, value, CAUSAL, scale)
    on_gpu = query.is_cuda
    table = tiles_for(torch.cuda.get_device_capability(device) if on_gpu else None, head_dim, 2)

    def sdpa(kernel: SDPBackend) -> Callable[[], object]:
        def call() -> object:
            with sdpa_kernel([kernel]):
                return scaled_dot_product_attention(
                    query, key, value, is_causal=True, enable_gqa=True
                )

        return call

    def backward(tiles: TileSet, *, dq: bool) -> Callable[[], object]:
        return lambda: launch_backward(
            grad, query, key, value, out, lse, CAUSAL, scale, tiles=tiles, need_dq=dq,
            need_dkdv=not dq,
        )  # fmt: skip

    arms = {("forward", k.name): sdpa(k) for k in (SDPBackend.FLASH_ATTENTION,)}
    for tile in FORWARD:
        arms["forward", str(tile)] = lambda tile=tile: launch_forward(
            query, key, value, CAUSAL, scale, tile=Tile(*tile)
        )
    for tile in DKDV:
        arms["dkdv", str(tile)] = backward(table._replace(dkdv=Tile(*tile)), dq=False)
    for tile in DQ:
        arms["dq", str(tile)] = backward(table._replace(dq=Tile(*tile)), dq=True)
    return arms


def median_ms(call: Callable[[], object]) -> float:
    """Median time of a call, milliseconds."""
    ms = do_bench(call, return_mode="median")
    if not isinstance(ms, float):
        raise TypeError(f"do_bench must give one number, got {ms!r}")
    return ms


def main(argv: Sequence[str]) -> int:
    """Measure every candidate, print a table, write the JSON."""
    parser = argparse.ArgumentParser(prog="tune_tiles.py", description="Tiles of the kernel.")
    parser.add_argument("--shapes", nargs="+", default=["4x4096", "1x16384"], help="batch x length")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("tiles are timed on a CUDA device, and torch sees none")
    rows = []
    for shape in args.shapes:
        batch, length = map(int, shape.split("x"))
        flops = 4 * batch * 32 * args.head_dim * length * (length + 1) / 2
        with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
            ready = {}
            for arm, call in candidates((batch, length), args.head_dim).items():
                try:
                    call()
                    ready[arm] = capture(call)
                except (RuntimeError, triton.runtime.errors.OutOfResources) as error:
                    print(f"{shape} {arm}: {type(error).__name__}: {error}")
            rounds = [{arm: median_ms(call) for arm, call in ready.items()} for _ in range(3)]
        for phase, name in ready:
            ms = statistics.median(r[phase, name] for r in rounds)
            tflops = flops * PRODUCTS[phase] / ms / 1e9
            rows.append({"shape": shape, "phase": phase, "arm": name, "ms": ms, "tflops": tflops})
            print(f"{shape:>8} {phase:8} {name:20} {ms:9.4f} ms {tflops:6.0f} TFLOP/s", flush=True)
    if args.json:
        facts = {
            "command": results.command_line("tune_tiles.py", argv),
            "date": results.now(),
            "device": environment.device_facts("cuda"),
            "versions": environment.versions(),
        }
        results.write({**facts, "rows": rows}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
