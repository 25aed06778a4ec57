"""This folder on the import path, and an artifact for what its table expects."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))


@pytest.fixture(scope="session")
def covered_home(tmp_path_factory):
    """Gives the home whose artifact covers one size, dtype and device; each is written once."""
    from family_coverage import cover

    homes: dict[tuple, Path] = {}

    def home(size, dtype, device, monkeypatch):
        key = (size, dtype, device)
        if key not in homes:
            homes[key] = tmp_path_factory.mktemp("families")
            monkeypatch.setenv("HF_ATTN_HOME", str(homes[key]))
            cover(size, dtype, device)
        monkeypatch.setenv("HF_ATTN_HOME", str(homes[key]))

    return home
