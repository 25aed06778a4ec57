"""Compile the sm_90 forward without a GPU, to read what ptxas made of it.

`python -m hf_attn_backends.kernels.hopper.forward_aot causal 128 bf16` prints a JSON line of facts
for each class given (three words each). Triton must not be in interpreter mode in that process.
"""

from __future__ import annotations

import json
import re
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl

from hf_attn_backends.kernels.hopper import sass
from hf_attn_backends.kernels.hopper.forward import DEFAULT, KEYS, Tuning
from hf_attn_backends.kernels.hopper.forward_kernels import attention_forward
from hf_attn_backends.kernels.hopper.gluon_compat import GluonASTSource
from hf_attn_backends.kernels.hopper.limits import KINDS

_ELEMENTS = {"bf16": gl.bfloat16, "fp16": gl.float16}


def compile_forward(
    kind: str, head_dim: int, element: str, tuning: Tuning = DEFAULT
) -> triton.compiler.CompiledKernel:
    """Compile one call class for sm_90.

    Args:
        kind: One of `limits.KINDS`.
        head_dim: 64 or 128.
        element: `bf16` or `fp16`.
        tuning: For ablations.
    """

    def descriptor(rows: int) -> str:
        block = [1, 1, rows, head_dim]
        layout = gl.NVMMASharedLayout.get_default_for(block, _ELEMENTS[element])
        return f"tensordesc<{element}[1,1,{rows},{head_dim}],{layout!r}>"

    constants = {
        "KIND": KINDS.index(kind),
        "BN": KEYS,
        "D": head_dim,
        "TURNS": tuning.turns,
        "LAZY": head_dim >= tuning.lazy_from,
    }
    types = {
        "q_desc": descriptor(64),
        "k_desc": descriptor(KEYS),
        "v_desc": descriptor(KEYS),
        "o_desc": descriptor(64),
        "lse_ptr": "*fp32",
        "intervals_ptr": "*i32" if kind == "intervals" else "*fp32",
        "qk_scale": "fp32",
        **{f"by_{name}": "i64" for name in ("section", "width", "last", "heads", "group")},
    }
    names = attention_forward.arg_names
    source = GluonASTSource(
        attention_forward,
        {name: "constexpr" if name in constants else types.get(name, "i32") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in ("lse_ptr", "intervals_ptr")},
    )
    return triton.compile(
        source,
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": 4, "enable_fp_fusion": True},
    )


def fixed_bounds(ir: str) -> int:
    """How many key loops end at a bound that is computed once, before the loop over tiles.

    Triton 3.6 takes a loop-carried number whose only use is the bound of an inner loop for dead.
    """
    fixed, inside = 0, ""
    for line in ir.splitlines():
        loop = re.search(r"scf\.for %\w+ = %\w+ to (%\w+) step %\w+ iter_args\((.*?)\) ->", line)
        if loop and "tensor<" in line.split("->", 1)[1]:  # the consumers' loops, not the producer's
            if inside:
                fixed += f"{loop[1]} = " not in inside
                inside = ""
            else:
                inside = loop[2]
        elif inside:
            inside += line
    return fixed


def facts(kind: str, head_dim: int, element: str, tuning: Tuning = DEFAULT) -> dict[str, object]:
    """What can be asserted about a class: shared memory, registers, and each key loop.

    A key loop is an innermost loop with the wgmma and the exponentials of one block of keys.
    """
    compiled = compile_forward(kind, head_dim, element, tuning)
    code = sass.disassemble(compiled.asm["cubin"])
    found = [
        {
            "hgmma": loop.count("HGMMA"),
            "exp": loop.count("MUFU.EX2"),
            "exp_between_waits": loop.between_waits("MUFU.EX2"),
            "spills": loop.spills,
            "syncs": loop.count("BAR.SYNC"),
            "length": len(loop.body),
        }
        for loop in sass.innermost(code, "HGMMA")
    ]
    products, exponentials = head_dim // 16 + KEYS // 16, KEYS // 2 + 2
    steady = [loop for loop in found if loop["hgmma"] == products and loop["exp"] == exponentials]
    return {
        "class": f"{element}/d{head_dim}/{kind}",
        "shared": compiled.metadata.shared,
        "threads": 32 * compiled.metadata.num_warps,
        "registers": sass.register_requests(code),
        "loops": steady,
        "spills": sum(i.name[:3] in ("STL", "LDL") for i in code),
        "uneven_products": sass.uneven_products(code),
        "fixed_bounds": fixed_bounds(compiled.asm["ttgir"]),
    }


if __name__ == "__main__":
    words = sys.argv[1:]
    for first in range(0, len(words), 3):
        name, dim, dtype = words[first : first + 3]
        sys.stdout.write(json.dumps(facts(name, int(dim), dtype)) + "\n")
