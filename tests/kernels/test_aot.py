"""Compiled for GPUs that are not there: it compiles, fits, uses the tensor cores, hardly spills."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

# Shared memory that one CTA may use, bytes (CUDA C programming guide, "Technical specifications").
SHARED = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 120: 99 << 10}
# Clocks of spilled registers over clocks of the matrix products (aot_compile.spill_share): what the
# spills would cost if all of them stood in the loop and nothing hid them. The dkdv kernel of sm_90
# was measured fastest with a tile that has 0.10 (tiles.py); with a tile twice as large it has 0.6
# or 1.2. Features hold more registers in the loop: the same kernel has 0.39 with all of them.
MOST = 1 / 8
MOST_WITH_FEATURES = 1 / 2


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
        assert found["spill_share"] <= MOST, (name, found)
        if capability == 90 and name != "dkdv":
            assert found["spills"] == 0, (name, found)


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
        assert found["spill_share"] <= MOST_WITH_FEATURES, (name, found)


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
