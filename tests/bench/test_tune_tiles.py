"""The tile sweep: every candidate is the same attention, whatever its tiles."""

from __future__ import annotations

import pytest
import torch
import tune_tiles


@pytest.fixture(scope="module")
def arms():
    torch.manual_seed(0)
    return tune_tiles.candidates((1, 130), 16, device="cpu", heads=(2, 1))


def test_there_is_every_candidate_of_every_kernel(arms):
    tiles = {
        "forward": ["FLASH_ATTENTION", *map(str, tune_tiles.FORWARD)],
        "dkdv": list(map(str, tune_tiles.DKDV)),
        "dq": list(map(str, tune_tiles.DQ)),
    }
    assert list(arms) == [(phase, name) for phase, names in tiles.items() for name in names]


@pytest.mark.parametrize("phase", ["forward", "dkdv", "dq"])
def test_tiles_do_not_change_the_result(arms, phase):
    if torch.cuda.is_available():
        pytest.skip("compiled for the GPU here: the kernels do not run on the CPU")
    given = []
    for (which, name), call in arms.items():
        if which != phase:
            continue
        result = call()
        results = (result,) if isinstance(result, torch.Tensor) else result
        given.append((name, [t.float() for t in results if isinstance(t, torch.Tensor)]))
    first = given[1][1] if phase == "forward" else given[0][1]
    for name, tensors in given:
        for one, other in zip(tensors, first, strict=False):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2, msg=name)


def test_a_machine_without_a_gpu_is_told_so(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(SystemExit):
        tune_tiles.main(["--shapes", "1x64"])
    assert "torch sees none" in capsys.readouterr().err
