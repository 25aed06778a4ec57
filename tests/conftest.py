"""Shared set-up of every test: the interpreter, markers, seeds, an isolated home.

The variables are set while pytest reads this file, before any test module imports triton.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile

_HOME = tempfile.mkdtemp(prefix="hf-attn-tests-")
os.environ["HF_ATTN_HOME"] = _HOME
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
for _name in ("HF_ATTN_BACKEND",):  # a developer's own preference must not steer the tests
    os.environ.pop(_name, None)

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
if not _GPUS:
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_runtest_setup(item: pytest.Item) -> None:
    needs = 2 if item.get_closest_marker("multigpu") else 1 if item.get_closest_marker("gpu") else 0
    if needs and os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip(f"needs {needs} CUDA device(s) and compiled kernels; the interpreter is on")
    if needs > _GPUS:
        pytest.skip(f"needs {needs} CUDA device(s), this machine has {_GPUS}")


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(_HOME, ignore_errors=True)


@pytest.fixture(autouse=True)
def _seeds():
    """Every test draws the same numbers, alone or in a suite."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A fresh `$HF_ATTN_HOME` for tests that write gates or records."""
    monkeypatch.setenv("HF_ATTN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def kernel_device() -> str:
    """Where the Triton kernels run in this process: `cuda`, or `cpu` through the interpreter."""
    return "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
