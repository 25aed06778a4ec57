"""The decode kernels for GPUs that are not there: they fit, use the tensor cores, do not spill."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

# Shared memory that one CTA may use, bytes (CUDA C programming guide, "Technical specifications").
SHARED = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 120: 99 << 10}


def compile_for(*numbers):
    script = pathlib.Path(__file__).with_name("decode_aot_compile.py")
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(script), *map(str, numbers)],
        env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("capability", "head_dim", "packed", "page"),
    [(80, 128, 4, 0), (86, 128, 4, 16), (90, 128, 4, 0), (90, 128, 32, 0), (120, 256, 4, 0)],
)
def test_fits_and_uses_the_tensor_cores(capability, head_dim, packed, page):
    found = compile_for(capability, head_dim, packed, page)
    for name, kernel in found.items():
        assert kernel["shared"] <= SHARED[capability], name
        assert kernel["spills"] <= 8, (name, kernel)
    assert found["decode"]["mma"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 86, 90, 120])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("packed", [4, 32, 64])
@pytest.mark.parametrize("page", [0, 16])
def test_every_tile_fits(capability, head_dim, packed, page):
    for name, kernel in compile_for(capability, head_dim, packed, page).items():
        assert kernel["shared"] <= SHARED[capability], (name, kernel)
