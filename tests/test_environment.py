"""Facts of the machine: filled in, honest where unknown, and free of CUDA contexts."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from hf_attn_backends import driver, environment


@pytest.mark.parametrize(
    ("variables", "want"),
    [
        ({"HF_ATTN_HOME": "/a/b"}, "/a/b"),
        ({"HF_HOME": "/hf"}, "/hf/hf_attn_backends"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/huggingface/hf_attn_backends"),
        ({"HOME": "/me"}, "/me/.cache/huggingface/hf_attn_backends"),
    ],
)
def test_home(monkeypatch, variables, want):
    for name in ("HF_ATTN_HOME", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(environment.home()) == want


def test_versions_name_everything_and_guess_nothing(monkeypatch):
    found = environment.versions()
    for name in ("python", "torch", "cuda", "triton", "transformers", "accelerate"):
        assert found[name], name
    assert found["torch"] == torch.__version__
    assert found["hf_attn_backends"][0].isdigit()
    monkeypatch.setattr(environment, "package_version", lambda name: None)
    assert environment.versions()["triton"] == "unknown: not installed"
    assert "flash_attn" not in environment.versions()


def test_cpu_facts():
    facts = environment.device_facts("cpu")
    assert facts["type"] == "cpu"
    assert all(value not in ("", None) for value in facts.values())
    assert environment.device_facts(torch.device("cpu")) == facts


def test_cuda_facts_say_why_they_are_unknown(monkeypatch):
    monkeypatch.setattr(driver, "gpus", lambda: "unknown: no CUDA driver")
    monkeypatch.setattr(driver, "version", lambda: "unknown: no NVIDIA driver")
    facts = environment.device_facts("cuda")
    assert facts["name"] == facts["capability"] == "unknown: no CUDA driver"
    assert facts["count"] == 0
    assert environment.fingerprint("cuda")["driver"] == "unknown: no NVIDIA driver"


def test_cuda_facts_of_each_index(monkeypatch):
    gpus = (driver.Gpu("NVIDIA A", (8, 0)), driver.Gpu("NVIDIA B", (9, 0)))
    monkeypatch.setattr(driver, "gpus", lambda: gpus)
    monkeypatch.setattr(driver, "version", lambda: "580.1")
    assert environment.device_facts("cuda:1") == {
        "type": "cuda", "name": "NVIDIA B", "capability": "9.0", "count": 2, "driver": "580.1",
    }  # fmt: skip
    assert environment.device_facts("cuda:0")["capability"] == "8.0"
    assert "2 CUDA device(s) visible" in str(environment.device_facts("cuda:2")["name"])


def test_fingerprint_counts_what_changes_code_and_nothing_else(monkeypatch):
    for name in (*environment.CODEGEN_VARIABLES, "TRITON_INTERPRET", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    cpu, cuda = environment.fingerprint("cpu"), environment.fingerprint("cuda")
    assert {"torch", "triton", "python", "numpy", "platform"} <= set(cpu)
    assert {"torch", "triton", "cuda", "driver", "gpu", "capability"} <= set(cuda)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    assert environment.fingerprint("cuda") == cuda
    monkeypatch.setenv("DISABLE_PTXAS_OPT", "1")
    assert environment.fingerprint("cuda")["DISABLE_PTXAS_OPT"] == "1"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert environment.fingerprint("cuda")["interpreter"] == "on"
    # Selection on the CPU happens with and without the interpreter; its gate needs it anyway.
    assert environment.fingerprint("cpu") == cpu


def git(folder, *words):
    subprocess.run(
        ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@t", *words],
        check=True, capture_output=True,
    )  # fmt: skip


def test_code_state(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert environment.code_state()["repository"] == "not a repo"
    (tmp_path / "train.py").write_text("a = 1\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "train.py")
    git(tmp_path, "commit", "-q", "-m", "first")
    state = environment.code_state()
    assert len(str(state["commit"])) == 40
    assert state["dirty"] is False
    (tmp_path / "train.py").write_text("a = 2\n")
    assert environment.code_state()["dirty"] is True
    assert isinstance(state["package"], dict)


def test_code_state_without_git(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert environment.code_state()["repository"] == "unknown: git is not installed"


def test_no_cuda_context_for_a_question():
    """Also where a GPU is: facts of `cuda` come from the driver, without starting CUDA."""
    code = (
        "import torch\n"
        "from hf_attn_backends import environment as e\n"
        "for device in ('cpu', 'cuda'):\n"
        "    e.device_facts(device), e.fingerprint(device), e.versions(), e.default_device()\n"
        "print(torch.cuda.is_initialized())"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


@pytest.mark.gpu
def test_the_driver_agrees_with_torch():
    for index in range(torch.cuda.device_count()):
        facts = environment.device_facts(f"cuda:{index}")
        assert facts["name"] == torch.cuda.get_device_name(index)
        assert facts["capability"] == "{}.{}".format(*torch.cuda.get_device_capability(index))
    assert str(facts["driver"])[0].isdigit()
