"""Compile the sm_90 backward without a GPU, to read what ptxas made of it.

`python -m hf_attn_backends.kernels.hopper.backward_aot causal 128 bf16` prints a JSON line of facts
for each class given (three words each). Triton must not be in interpreter mode in that process.
"""

from __future__ import annotations

import itertools
import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl

from hf_attn_backends.kernels.hopper import sass
from hf_attn_backends.kernels.hopper.backward_first import OPTIONS
from hf_attn_backends.kernels.hopper.backward_kernels import attention_backward
from hf_attn_backends.kernels.hopper.backward_plans import KEYS, tile_rows
from hf_attn_backends.kernels.hopper.gluon_compat import GluonASTSource
from hf_attn_backends.kernels.hopper.limits import KINDS


def compile_backward(kind: str, head_dim: int, element: str) -> triton.compiler.CompiledKernel:
    """Compile one call class for sm_90.

    Args:
        kind: One of `limits.KINDS`.
        head_dim: 64 or 128.
        element: `bf16` or `fp16`.
    """

    def descriptor(kind: str, block: list[int], layout: gl.NVMMASharedLayout) -> str:
        return f"tensordesc<{kind}{block},{layout!r}>"

    tile = gl.NVMMASharedLayout(128, 16, 4)
    rows = descriptor(element, [1, 1, tile_rows(head_dim), head_dim], tile)
    keys = descriptor(element, [1, 1, KEYS, head_dim], tile)
    stats = [4 if kind == "intervals" else 2, tile_rows(head_dim)]
    sums = gl.NVMMASharedLayout(128, 32, 2)
    types = {
        **dict.fromkeys(("q_desc", "do_desc"), rows),
        **dict.fromkeys(("k_desc", "v_desc", "dk_desc", "dv_desc"), keys),
        "stats_desc": descriptor("fp32", stats, gl.NVMMASharedLayout(0, 32, 2)),
        "dq_desc": descriptor("fp32", [128, 32], sums),
        **dict.fromkeys(("hull_ptr", "tiles_ptr"), "*i32"),
        **dict.fromkeys(("scale_log2", "scale"), "fp32"),
        "KIND": "constexpr",
    }
    names = attention_backward.arg_names
    source = GluonASTSource(
        attention_backward,
        {name: types.get(name, "i32") for name in names},
        {(names.index("KIND"),): KINDS.index(kind)},
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(OPTIONS))


def facts(kind: str, head_dim: int, element: str) -> dict[str, object]:
    """What can be asserted about a class: shared memory, registers, spills, and the waits.

    `waits` is the order of `WARPGROUP.DEPBAR` over both consumers: groups left in flight. ptxas
    inserts further ones, of 0, where it serialises products.
    """
    compiled = compile_backward(kind, head_dim, element)
    code = sass.disassemble(compiled.asm["cubin"])
    waits = [i for i, one in enumerate(code) if one.name.startswith("WARPGROUP.DEPBAR")]
    exps = [i for i, one in enumerate(code) if one.name.startswith("MUFU.EX2")]
    between = [sum(here < exp < there for exp in exps) for here, there in itertools.pairwise(waits)]
    return {
        "class": f"{element}/d{head_dim}/{kind}",
        "shared": compiled.metadata.shared,
        "threads": 32 * compiled.metadata.num_warps,
        "registers": sass.register_requests(code),
        "waits": [int(code[i].text.split("0x")[-1], 16) for i in waits],
        "exp": len(exps),
        "exp_after_wait": between,
        "hgmma": sum(one.name.startswith("HGMMA") for one in code),
        "wide_stores": sum(one.name.startswith("STS.128") for one in code),
        "spills": sum(one.name[:3] in ("STL", "LDL") for one in code),
        "reductions": sum(one.name.startswith(("UTMAREDG", "UTMARED")) for one in code),
    }


if __name__ == "__main__":
    words = sys.argv[1:]
    for first in range(0, len(words), 3):
        name, dim, dtype = words[first : first + 3]
        sys.stdout.write(json.dumps(facts(name, int(dim), dtype)) + "\n")
