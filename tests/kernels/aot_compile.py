"""Compile the portable kernels for a GPU that is not there and print what ptxas made of them.

    python tests/kernels/aot_compile.py CAPABILITY HEAD_DIM KIND [wide | FEATURE | value_dim=E ...]

Run in a process of its own, without TRITON_INTERPRET. Prints one JSON object: for each kernel its
registers, bytes of stack, shared memory, and its SASS counts of spills and matrix instructions.
"""

import glob
import json
import os
import re
import subprocess
import sys
import tempfile

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hf_attn_backends.kernels.triton import backward_kernels, forward_kernels
from hf_attn_backends.kernels.triton.launch import block_d, launch_options
from hf_attn_backends.kernels.triton.tiles import tiles_for

DESCRIPTORS = {
    "_attn_bwd_dkdv_kernel": {"q_ptr": ("BM", "BD"), "grad_ptr": ("BM", "BV")},
    "_attn_bwd_dq_kernel": {"k_ptr": ("BN", "BD"), "v_ptr": ("BN", "BV")},
}
FLOATS = ("scale", "softcap", "dropout_p")


ROWS = re.compile(r"stride_(?!i|m)")


def tool(name):
    """A program of the triton wheel."""
    return glob.glob(os.path.join(os.path.dirname(triton.__file__), "**", name), recursive=True)[0]


def signature(kernel, constants):
    """Types of the arguments of a bfloat16 call."""
    described = DESCRIPTORS.get(kernel.__name__, {}) if constants.get("TMA") else {}
    types = {}
    for name in kernel.arg_names:
        if name in constants:
            types[name] = "constexpr"
        elif name in described:
            rows, columns = (constants[size] for size in described[name])
            types[name] = f"tensordesc<bf16[1, 1, {rows}, {columns}]>"
        elif name == "seed_ptr":
            types[name] = "*i64" if constants.get("DROPOUT") else "*fp32"
        elif name in ("lse_ptr", "delta_ptr"):
            types[name] = "*fp32"
        elif name == "intervals_ptr":
            types[name] = "*i32"
        elif name == "mask_ptr":
            types[name] = "*u8"
        elif name.endswith("_ptr"):
            types[name] = "*bf16"
        else:
            wide = constants["WIDE"] and ROWS.match(name)
            types[name] = "fp32" if name in FLOATS else "i64" if wide else "i32"
    return types


def aligned(kernel, types):
    """Pointers and strides of rows are multiples of 16, as torch allocates them."""
    return {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if types[name].startswith("*") or ROWS.match(name)
    }


def compiled(kernel, capability, constants, warps):
    """Resources and SASS counts of one kernel."""
    types = signature(kernel, constants)
    source = ASTSource(
        kernel,
        types,
        {(kernel.arg_names.index(name),): value for name, value in constants.items()},
        aligned(kernel, types),
    )
    binary = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options=launch_options(warps)
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage, sass = (
            subprocess.run(
                [tool("cuobjdump"), flag, file.name], capture_output=True, text=True, check=True
            ).stdout
            for flag in ("--dump-resource-usage", "--dump-sass")
        )
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    return {
        "registers": int(registers),
        "stack": int(stack),
        "shared": binary.metadata.shared,
        "spills": len(re.findall(r"\b(?:STL|LDL)\b", sass)),
        "spill_share": spill_share(sass),
        "mma": len(re.findall(r"\bHMMA", sass)),
        "wgmma": len(re.findall(r"\bHGMMA", sass)),
    }


def spill_share(sass):
    """Clocks of the spills over clocks of the matrix products, both counted once as they stand.

    A spill moves 128 bytes for each warp, a clock of the L1 cache; a wgmma is one instruction of
    four warps. A multiprocessor takes 1024 bf16 products a clock (A100 white paper), 2048 with
    wgmma (H100 white paper); smaller GPUs take fewer, which makes their share smaller still.
    """
    spills = len(re.findall(r"\b(?:STL|LDL)\b", sass))
    products = 16 * 8 * 16 * len(re.findall(r"\bHMMA\.16816", sass))
    groups = [int(m) * int(n) * int(k) for m, n, k in re.findall(r"HGMMA\.(\d+)x(\d+)x(\d+)", sass)]
    clocks = products / 1024 + sum(groups) / 2048
    return spills * (4 if groups else 1) / clocks if clocks else float(spills > 0)


def main(capability, head_dim, kind, *features):
    """Compile the three kernels of one class."""
    wide = "wide" in features
    other = [int(flag.partition("=")[2]) for flag in features if flag.startswith("value_dim=")]
    value_dim = other[0] if other else head_dim
    costly = "softcap" in features or "dropout" in features
    tiles = tiles_for(divmod(capability, 10), head_dim, 2, kind, costly)
    common = {
        "HEAD_DIM": head_dim, "BD": block_d(head_dim), "KIND": kind, "WIDE": wide,
        "VALUE_DIM": value_dim, "BV": block_d(value_dim), "PRECISION": "tf32",
        "SOFTCAP": "softcap" in features, "DROPOUT": "dropout" in features,
    }  # fmt: skip
    tma = capability >= 90 and not wide
    extra = {
        "forward": (
            forward_kernels._attn_fwd_kernel,
            {"HEAD_MAJOR": kind == "full", "SINKS": "sinks" in features},
        ),
        "dkdv": (backward_kernels._attn_bwd_dkdv_kernel, {"SCAN": 1024, "TMA": tma}),
        "dq": (backward_kernels._attn_bwd_dq_kernel, {"TMA": tma}),
    }
    found = {}
    for name, (kernel, more) in extra.items():
        tile = getattr(tiles, name)
        sizes = {"BM": tile.block_m, "BN": tile.block_n, "STAGES": tile.stages}
        found[name] = compiled(kernel, capability, {**common, **sizes, **more}, tile.warps)
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
