"""What NVIDIA's race detector reports about the sm_90 kernels is ordered, every time."""

from __future__ import annotations

import json
import shutil

import pytest
import race_check
import torch

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_every_reported_pair_is_ordered_by_a_barrier(tmp_path, phase):
    if shutil.which("compute-sanitizer") is None:
        pytest.skip("compute-sanitizer (CUDA toolkit) is not on the PATH")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels under test are for sm_90")
    cases = [f"hopper-{phase}-{kind}" for kind in race_check.KINDS]
    file = tmp_path / "found.json"
    assert race_check.main([*cases, "--json", str(file)]) == 0
    for row in json.loads(file.read_text())["cases"]:
        assert row["outcome"] == "ran", row
        assert all(group["ordered"] for group in row["found"]), row
