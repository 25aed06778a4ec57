"""A plug-in package that is really installed; a broken one is a row and not an error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "tiny-attn"
version = "1.2.3"
[project.entry-points."hf_attn_backends.backends"]
tiny = "tiny_attn:Tiny"
tiny_made = "tiny_attn:make"
tiny_broken = "tiny_attn.missing:Nothing"
tiny_wrong = "tiny_attn:NotABackend"
"""
MODULE = """\
from hf_attn_backends.backends import AttentionBackend


class Tiny(AttentionBackend):
    name = "tiny"

    def forward(self, query, key, value, call, **kwargs):
        return value * 0 + 7


class Made(Tiny):
    name = "tiny_made"


def make():
    return Made()


class NotABackend:
    name = "tiny_wrong"
"""
USE = """\
import json, torch
from hf_attn_backends import witness
from hf_attn_backends.backends import AttentionBackendFactory
from hf_attn_backends.dispatch import attention
from hf_attn_backends.selection import probe_backends
q = torch.zeros(1, 1, 2, 8)
out = [attention(q, q, q, backend=name).max().item() for name in ("tiny", "tiny_made")]
refused = ""
try:
    attention(q, q, q, backend="tiny_broken")
except RuntimeError as error:
    refused = str(error)
rows = {name: [r.available, r.reason] for name, r in probe_backends("cpu").items()}
print(json.dumps([out, refused, rows, AttentionBackendFactory.list_registered()]))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A tiny plug-in package, built and installed for real; its folder for PYTHONPATH."""
    source, target = tmp_path_factory.mktemp("tiny"), tmp_path_factory.mktemp("site")
    (source / "tiny_attn").mkdir()
    (source / "pyproject.toml").write_text(PYPROJECT)
    (source / "tiny_attn" / "__init__.py").write_text(MODULE)
    install = ["install", "--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", *install, "--target", str(target), str(source)],
        capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:  # no pip or no hatchling here: lay out what pip would have
        (target / "tiny_attn").mkdir(exist_ok=True)
        (target / "tiny_attn" / "__init__.py").write_text(MODULE)
        info = target / "tiny_attn-1.2.3.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-attn\nVersion: 1.2.3\n")
        points = PYPROJECT.split('[project.entry-points."hf_attn_backends.backends"]\n')[1]
        lines = ["[hf_attn_backends.backends]", *points.replace('"', "").splitlines()]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return target


def in_process_with(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(site)}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=env, timeout=120
    )


def test_an_installed_package_is_found_by_its_entry_points(installed):
    done = in_process_with(installed, "-c", USE)
    assert done.returncode == 0, done.stderr
    out, refused, rows, names = json.loads(done.stdout)
    assert out == [7.0, 7.0]
    assert rows["tiny"][0]
    assert rows["tiny_made"][0]
    assert not rows["tiny_broken"][0]
    assert "the plug-in tiny_broken (tiny_attn.missing:Nothing) is broken" in rows["tiny_broken"][1]
    assert "ModuleNotFoundError" in rows["tiny_broken"][1]
    assert "must be an AttentionBackend subclass or instance" in rows["tiny_wrong"][1]
    assert "'tiny_broken' cannot serve this call" in refused
    assert "is broken" in refused
    assert names[-4:] == ["tiny", "tiny_broken", "tiny_made", "tiny_wrong"]


def test_doctor_shows_a_broken_plug_in_as_a_row(installed):
    command = ("-m", "hf_attn_backends.cli", "doctor", "--device", "cpu", "--json")
    done = in_process_with(installed, *command, "tiny", "tiny_broken")
    assert done.returncode == 1, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)["backends"]}
    assert rows["tiny"]["available"]
    assert "is broken" in rows["tiny_broken"]["reason"]
    assert in_process_with(installed, *command, "tiny").returncode == 0
