"""Compile the decode kernels for a GPU that is not there and print what ptxas made of them.

    python tests/kernels/decode_aot_compile.py CAPABILITY HEAD_DIM PACKED_ROWS PAGE

Run in a process of its own, without TRITON_INTERPRET. Prints one JSON object as `aot_compile.py`.
"""

import json
import sys

import aot_compile

from hf_attn_backends.kernels.triton import decode_kernels
from hf_attn_backends.kernels.triton.decode import pipeline_stages
from hf_attn_backends.kernels.triton.decode_tiles import decode_tile
from hf_attn_backends.kernels.triton.launch import block_d

TYPES = {
    "part_ptr": "*fp32", "part_peak_ptr": "*fp32", "part_denom_ptr": "*fp32",
    "lengths_ptr": "*i32", "table_ptr": "*i32",
}  # fmt: skip


def main(capability, head_dim, packed, page):
    """Compile the two kernels for bfloat16, causal, with lengths."""
    plain = aot_compile.signature
    aot_compile.signature = lambda kernel, constants: {
        name: TYPES.get(name, kind)
        for name, kind in plain(kernel, {"WIDE": False, **constants}).items()
    }
    tile = decode_tile(divmod(capability, 10), head_dim, 2, packed)
    pdl = capability >= 90
    shared = {"HEAD_DIM": head_dim, "BD": block_d(head_dim), "PDL": pdl}
    decode = {
        "KV_HEADS": 8, "GROUP": 4, "TILES_M": 1, "BM": tile.block_m, "BN": tile.block_n,
        "WARPS_APART": tile.warps_apart, "KIND": "causal", "LENGTHS": True, "PAGE": page,
        "SPLIT": True, "WIDE": False, "PRECISION": "tf32",
        "STAGES": pipeline_stages(tile, page), "QUERY_IN_LOOP": tile.query_in_loop,
    }  # fmt: skip
    combine = {"SPLITS": 64, "CHUNK": 4096 // block_d(head_dim)}
    kernels = {
        "decode": (decode_kernels._attn_decode_kernel, decode, tile.warps),
        "combine": (decode_kernels._attn_decode_combine_kernel, combine, 4),
    }
    found = {
        name: aot_compile.compiled(kernel, capability, {**shared, **constants}, warps)
        for name, (kernel, constants, warps) in kernels.items()
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:5]))
