"""An artifact that covers what the table expects and nothing else, so that the rest is refused.

The figures of these tests are the proof here; what the gate measures has tests of its own.
"""

from __future__ import annotations

from pathlib import Path

from family_configs import Size
from family_inputs import CASES
from family_table import FAMILIES

from hf_attn_backends import gate


def cover(size: Size, dtype: str, device: str) -> Path:
    """Write it where `$HF_ATTN_HOME` says."""
    names = {
        name
        for family in FAMILIES.values()
        for case in CASES
        for name in family.classes(case, dtype, size)
    }
    shapes = []
    for name in sorted(names):
        of, head_dim, rest = name.split("/")
        kind, _, features = rest.partition("+")
        shape = {"dtype": of, "head_dim": int(head_dim[1:]), "visibility": kind}
        shapes.append({**shape, "features": features} if features else shape)
    return gate.write_equivalence_gate(
        tolerances={"out": "see family_check"}, shapes_covered=shapes, device=device
    )
