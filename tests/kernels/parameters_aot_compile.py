"""Compile kernels for a GPU that is not there and print the parameters that they take.

    python tests/kernels/parameters_aot_compile.py

Run in a process of its own, without TRITON_INTERPRET. Prints one JSON object: the letters of
`kernels.block.parameter_codes` by kernel.
"""

import json

import aot_compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_source

from hf_attn_backends.kernels.block import parameter_codes
from hf_attn_backends.kernels.triton import backward_kernels, decode_kernels, forward_kernels

POINTERS = {
    "part_ptr": "*fp32", "part_peak_ptr": "*fp32", "part_denom_ptr": "*fp32",
    "lengths_ptr": "*i32", "table_ptr": "*i32",
}  # fmt: skip
TILE = {"HEAD_DIM": 64, "BD": 64, "BM": 64, "BN": 64, "WIDE": False, "PRECISION": "tf32"}
PLAIN = {
    **TILE, "VALUE_DIM": 64, "BV": 64, "STAGES": 1, "SOFTCAP": False, "DROPOUT": False,
}  # fmt: skip
FORWARD = {**PLAIN, "SINKS": False, "HEAD_MAJOR": False}
DECODE = {
    **TILE, "KV_HEADS": 2, "GROUP": 4, "TILES_M": 1, "BM": 16, "WARPS_APART": 1, "KIND": "causal",
    "LENGTHS": False, "PAGE": 0, "SPLIT": True, "STAGES": 2, "PDL": True, "QUERY_IN_LOOP": False,
}  # fmt: skip
COMBINE = {"HEAD_DIM": 64, "BD": 64, "SPLITS": 16, "CHUNK": 16, "PDL": True}
KERNELS = {
    "forward": (forward_kernels._attn_fwd_kernel, {**FORWARD, "KIND": "causal"}),
    "forward, dense": (
        forward_kernels._attn_fwd_kernel, {**FORWARD, "KIND": "dense", "stride_mn": 1}
    ),
    "delta": (
        backward_kernels._attn_bwd_delta_kernel,
        {"HEAD_DIM": 64, "BD": 64, "BM": 64, "WIDE": False},
    ),
    "dkdv": (
        backward_kernels._attn_bwd_dkdv_kernel,
        {**PLAIN, "KIND": "causal", "TMA": False, "SCAN": 1024},
    ),
    "dq": (backward_kernels._attn_bwd_dq_kernel, {**PLAIN, "KIND": "causal", "TMA": False}),
    "decode": (decode_kernels._attn_decode_kernel, DECODE),
    "combine": (decode_kernels._attn_decode_combine_kernel, COMBINE),
}  # fmt: skip


def codes(kernel, constants):
    """The parameters of one kernel, for sm_90."""
    types = aot_compile.signature(kernel, {"WIDE": False, **constants})
    types.update({name: POINTERS[name] for name in types if name in POINTERS})
    source = ASTSource(kernel, types, constexprs=constants)
    options = {"num_warps": 4, **({"launch_pdl": True} if constants.get("PDL") else {})}
    made = compile_source(source, target=GPUTarget("cuda", 90, 32), options=options)
    return parameter_codes(made.asm["ptx"])


if __name__ == "__main__":
    print(json.dumps({name: codes(*what) for name, what in KERNELS.items()}))
