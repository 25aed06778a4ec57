"""Compiled for GPUs that are not there: it compiles, fits, uses the tensor cores, hardly spills."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

# Shared memory that one CTA may use, bytes (CUDA C programming guide, "Technical specifications").
SHARED = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 120: 99 << 10}
# Instructions that move a spilled register, in the whole kernel; more than this would be in a loop
# that matters. The dkdv kernel of sm_90 is fastest with a tile that spills a little (tiles.py).
SPILLS = {("forward", 90): 0, ("dq", 90): 0, ("dkdv", 90): 60}


def compile_for(capability, head_dim, kind, *flags):
    script = pathlib.Path(__file__).with_name("aot_compile.py")
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(script), str(capability), str(head_dim), kind, *flags],
        env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("capability", "head_dim", "kind"),
    [
        (80, 128, "causal"),
        (86, 128, "causal"),
        (89, 128, "window"),
        (90, 128, "causal"),
        (90, 64, "causal"),
        (120, 128, "causal"),
    ],
)
def test_fits_and_uses_the_tensor_cores(capability, head_dim, kind):
    for name, found in compile_for(capability, head_dim, kind).items():
        assert found["shared"] <= SHARED[capability], name
        assert found["wgmma" if capability == 90 else "mma"] > 0, name
        assert found["spills"] <= SPILLS.get((name, capability), 40), (name, found)


@pytest.mark.parametrize(
    ("capability", "head_dim", "flags"),
    [
        (90, 128, ("softcap", "sinks", "dropout")),
        (80, 256, ("softcap",)),
        (90, 192, ("value_dim=128",)),
    ],
)
def test_features_compile_and_fit(capability, head_dim, flags):
    """Their arithmetic costs registers; the tensor cores still do the products."""
    for name, found in compile_for(capability, head_dim, "causal", *flags).items():
        assert found["shared"] <= SHARED[capability], name
        assert found["wgmma"] + found["mma"] > 0, name
        assert found["spills"] <= 160, (name, found)


def test_rows_that_lie_far_apart_compile():
    """A tile that spans more than 2^31 elements takes 64-bit offsets, in every kernel."""
    assert set(compile_for(90, 64, "causal", "wide")) == {"forward", "dkdv", "dq"}


@pytest.mark.parametrize(
    ("capability", "head_dim", "kind"),
    [
        (80, 256, "dense"),
        (86, 64, "intervals"),
        (86, 256, "dense"),
        (90, 256, "intervals"),
        (90, 128, "dense"),
        (120, 64, "dense"),
    ],
)
def test_the_largest_tiles_fit(capability, head_dim, kind):
    for name, found in compile_for(capability, head_dim, kind).items():
        assert found["shared"] <= SHARED[capability], (name, found)
