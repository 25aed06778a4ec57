"""Facts about the machine and the software: what a gate is bound to and a run is recorded with.

Nothing here creates a CUDA context (`driver.py` asks the driver instead). What cannot be found out
is the string `unknown: <why>`, never an empty one and never a guess.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path

from hf_attn_backends import driver

# Environment variables that change the code which the kernels become, or the arithmetic of the
# yardstick. Cache, dump and tracing variables are left out: they do not.
CODEGEN_VARIABLES = (
    "ALLOW_LHS_TMEM_LAYOUT_CONVERSION",
    "DISABLE_LLVM_OPT",
    "DISABLE_MMA_V3",
    "DISABLE_MMA_V5",
    "DISABLE_PTXAS_OPT",
    "LLVM_PASS_PLUGIN_PATH",
    "NVIDIA_TF32_OVERRIDE",
    "PTXAS_OPTIONS",
    "TRITON_DEBUG",
    "TRITON_DEFAULT_FP_FUSION",
    "TRITON_ENABLE_ASAN",
    "TRITON_F32_DEFAULT",
    "TRITON_FORCE_DISABLE_FP_FUSION",
    "TRITON_INSTRUMENTATION_MODE",
    "TRITON_KERNEL_OVERRIDE",
    "TRITON_LIBDEVICE_PATH",
    "TRITON_MOCK_PTX_VERSION",
    "TRITON_OVERRIDE_ARCH",
    "TRITON_PLUGIN_PATHS",
    "TRITON_PTXAS_BLACKWELL_PATH",
    "TRITON_PTXAS_PATH",
)

_PACKAGES = ("torch", "triton", "transformers", "accelerate", "hf_attn_backends")
_OPTIONAL_PACKAGES = ("flash_attn", "kernels", "peft")


def home() -> Path:
    """Where gates and records live: `$HF_ATTN_HOME`, else below the Hugging Face cache."""
    if own := os.environ.get("HF_ATTN_HOME"):
        return Path(own).expanduser()
    if hugging_face := os.environ.get("HF_HOME"):
        return Path(hugging_face).expanduser() / "hf_attn_backends"
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "huggingface" / "hf_attn_backends"


def default_device() -> str:
    """`cuda` where torch sees a CUDA device, else `cpu`."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def package_version(name: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(name.replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str]:
    """Versions of everything that a run depends on, by lower-case name."""
    import torch

    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        found[name] = package_version(name) or "unknown: not installed"
    found["torch"] = str(torch.__version__)
    found["cuda"] = torch.version.cuda or "unknown: torch is built without CUDA"
    for name in _OPTIONAL_PACKAGES:
        if (version := package_version(name)) is not None:
            found[name] = version
    return found


def _split(device: object) -> tuple[str, int]:
    """(`cuda`, 1) of `cuda:1`; without an index the current device, 0 before CUDA has started."""
    kind, _, index = str(device).partition(":")
    if index:
        return kind, int(index)
    if kind == "cuda":
        import torch

        if torch.cuda.is_initialized():
            return kind, torch.cuda.current_device()
    return kind, 0


def device_facts(device: object) -> dict[str, object]:
    """`type`, `name`, `capability`, `count`, `driver` of a device; every value is filled in."""
    kind, index = _split(device)
    if kind != "cuda":
        name = platform.processor() or platform.machine() or "unknown: platform does not say"
        return {
            "type": kind, "name": name, "capability": "none", "count": 1, "driver": "none",
        }  # fmt: skip
    gpus = driver.gpus()
    if isinstance(gpus, str) or index >= len(gpus):
        why = gpus if isinstance(gpus, str) else f"unknown: {len(gpus)} CUDA device(s) visible"
        count = 0 if isinstance(gpus, str) else len(gpus)
        return {
            "type": kind,
            "name": why,
            "capability": why,
            "count": count,
            "driver": driver.version(),
        }
    major, minor = gpus[index].capability
    return {
        "type": kind,
        "name": gpus[index].name,
        "capability": f"{major}.{minor}",
        "count": len(gpus),
        "driver": driver.version(),
    }


def fingerprint(device: object) -> dict[str, str]:
    """Everything around the kernel's source that can change its numbers on `device`, flat.

    On the CPU the kernels run in Triton's interpreter, which computes with NumPy, so NumPy counts
    there. On a GPU the interpreter counts as a changed environment: it is other arithmetic.
    """
    import torch

    kind, _ = _split(device)
    parts = {
        "python": platform.python_version(),
        "platform": f"{sys.platform} {platform.machine()}",
        "torch": str(torch.__version__),
        "triton": package_version("triton") or "unknown: not installed",
    }
    if kind == "cuda":
        facts = device_facts(device)
        parts["cuda"] = torch.version.cuda or "unknown: torch is built without CUDA"
        parts["driver"] = str(facts["driver"])
        parts["gpu"] = str(facts["name"])
        parts["capability"] = str(facts["capability"])
        parts["interpreter"] = "on" if os.environ.get("TRITON_INTERPRET") == "1" else "off"
        for name in CODEGEN_VARIABLES:
            if name in os.environ:
                parts[name] = os.environ[name]
    else:
        parts["numpy"] = package_version("numpy") or "unknown: not installed"
    return parts


def _git(folder: Path) -> dict[str, object]:
    """`commit` and `dirty` of the repository that holds `folder`."""
    ask = ["git", "-C", str(folder)]
    try:
        head = subprocess.run(
            [*ask, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10
        )
        if head.returncode != 0:
            return {"repository": "not a repo"}
        status = subprocess.run(
            [*ask, "status", "--porcelain", "--untracked-files=no"],
            capture_output=True, text=True, timeout=30,
        )  # fmt: skip
    except FileNotFoundError:
        return {"repository": "unknown: git is not installed"}
    except subprocess.TimeoutExpired:
        return {"repository": "unknown: git did not answer"}
    return {"commit": head.stdout.strip(), "dirty": bool(status.stdout.strip())}


def code_state() -> dict[str, object]:
    """The code that runs: the working directory's repository, and this package's own.

    Returns:
        `commit` and `dirty` (or `repository`: why not) of the working directory, and under
        `package` the same of the folder that this package was imported from; an installed wheel
        lies in no repository, and its version says what it is.
    """
    return {**_git(Path.cwd()), "package": _git(Path(__file__).parent)}
