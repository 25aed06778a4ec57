"""Third parties: subclass, instance, entry point; a broken plug-in is a row and not an error."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_attn_backends import witness
from hf_attn_backends.backends import (
    AttentionBackend,
    AttentionBackendFactory,
    Capability,
    SdpaBackend,
)
from hf_attn_backends.backends.factory import forget_registered
from hf_attn_backends.dispatch import attention, attn_backend, get_backend
from hf_attn_backends.errors import CallRefusedError, RegistrationError, UnknownBackendError


@pytest.fixture(autouse=True)
def _fresh():
    witness.reset()
    yield
    forget_registered()
    witness.reset()


@pytest.fixture
def qkv():
    return [torch.randn(1, 1, 3, 8) for _ in range(3)]


class Mean(AttentionBackend):
    """Every row is the mean of the values: told from attention at once."""

    name = "mean"

    def refusals(self, call):
        return [] if call.visibility == "full" else ["mean sees every key"]

    def forward(self, query, key, value, call, **kwargs):
        return value.mean(2, keepdim=True).expand(-1, -1, query.shape[2], -1)


def test_a_subclass_by_decorator_serves_and_is_counted(qkv, monkeypatch):
    AttentionBackendFactory.register("mean")(Mean)
    assert "mean" in AttentionBackendFactory.list_registered()
    assert isinstance(AttentionBackendFactory.create("mean"), Mean)
    want = qkv[2].mean(2, keepdim=True).expand(-1, -1, 3, -1)
    assert torch.equal(attention(*qkv, backend="mean"), want)
    with attn_backend("mean"):
        assert torch.equal(attention(*qkv), want)
    monkeypatch.setenv("HF_ATTN_BACKEND", "mean")
    assert torch.equal(attention(*qkv), want)
    counted = {(n.backend, n.variant): c for n, c in witness.snapshot().items()}
    assert counted == {("mean", "plugin"): 3}


def test_its_refusals_are_heard(qkv, monkeypatch):
    AttentionBackendFactory.register("mean", Mean)
    with pytest.raises(CallRefusedError, match="'mean' cannot serve this call: mean sees every"):
        attention(*qkv, backend="mean", is_causal=True)
    monkeypatch.setenv("HF_ATTN_BACKEND", "mean")
    attention(*qkv, is_causal=True)
    assert witness.substitutions() == {("mean", "sdpa", "float32/d8/causal"): 1}


def test_a_bare_instance_needs_no_registration(qkv):
    instance = Mean()
    with attn_backend(instance):
        assert get_backend() is instance
        attention(*qkv)
    attention(*qkv, backend=instance)
    assert sum(witness.snapshot().values()) == 2
    with pytest.raises(UnknownBackendError):
        attention(*qkv, backend="mean")


def test_an_instance_can_be_registered_and_stays_itself(qkv):
    instance = Mean()
    AttentionBackendFactory.register("mean", instance)
    assert AttentionBackendFactory.create("mean") is instance
    with attn_backend("mean"):
        assert get_backend() is instance


def test_its_backward_is_counted(qkv):
    leaves = [t.requires_grad_() for t in qkv]
    attention(*leaves, backend=Mean).sum().backward()
    assert [(n.phase, c) for n, c in witness.snapshot().items()] == [
        ("forward", 1), ("backward", 1),
    ]  # fmt: skip


def test_a_capability_row_and_availability_of_its_own(qkv):
    class Narrow(Mean):
        name = "narrow"
        capability = Capability(dtypes=("float16",))
        refusals = AttentionBackend.refusals

    with pytest.raises(CallRefusedError, match="narrow computes in float16"):
        attention(*qkv, backend=Narrow)

    class Off(Mean):
        name = "off"

        def available(self):
            return False

    with pytest.raises(CallRefusedError, match="off says that it is not available"):
        attention(*qkv, backend=Off())


def test_what_cannot_be_registered_says_why():
    class Nameless(Mean):
        name = ""

    class Half(AttentionBackend):
        name = "half"

    cases = [
        ("sdpa", SdpaBackend, "belongs to the package's own"),
        ("other", Mean, "`name` must be 'other', got 'mean'"),
        ("nameless", Nameless, "must be 'nameless', got ''"),
        ("half", Half, "must implement forward"),
        ("int", int, "must be an AttentionBackend subclass"),
    ]
    for name, source, text in cases:
        with pytest.raises(RegistrationError, match=text):
            AttentionBackendFactory.register(name, source)
    AttentionBackendFactory.register("mean", Mean)
    AttentionBackendFactory.register("mean", Mean)  # again is no conflict
    with pytest.raises(RegistrationError, match="taken by"):
        AttentionBackendFactory.register("mean", type("Mean2", (Mean,), {}))


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
    import os

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
