"""What this machine has: devices and packages, as refusals. Starts no CUDA context for a CPU."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util

import torch

from hf_attn_backends.backends.capabilities import Capability


def device_refusals(name: str, capability: Capability, device: torch.device) -> list[str]:
    """Reasons why the device itself rules a backend out."""
    if device.type not in capability.devices:
        return [
            f"{name} runs on {' or '.join(capability.devices)} devices only, "
            f"and the device is {device}"
        ]
    if device.type != "cuda":
        return []
    if not torch.cuda.is_available():
        return [
            f"{name} was asked for on {device}, and torch {torch.__version__} sees no CUDA device"
        ]
    have = torch.cuda.get_device_capability(device)
    least, most = capability.min_capability, capability.max_capability
    if (least and have < least) or (most and have > most):
        if least == most and least:
            bounds = f"exactly {_dotted(least)}"
        else:
            bounds = " to ".join(_dotted(bound) for bound in (least, most) if bound)
            bounds += "" if most else " or higher"
        return [f"{name} needs compute capability {bounds}, and {device} has {_dotted(have)}"]
    return []


def package_refusals(name: str, package: str | None, *, really_import: bool) -> list[str]:
    """Reasons why the package that a backend calls cannot be used.

    Args:
        name: The backend.
        package: The module's name, or None for torch alone.
        really_import: Import it, which finds a broken build; else only look for it, which costs
            nothing and loads nothing.
    """
    if package is None:
        return []
    if not really_import:
        if _found(package):
            return []
        return [f"{name} needs the package {package}, which is not installed in this environment"]
    try:
        importlib.import_module(package)
    except (ImportError, OSError, RuntimeError) as error:
        return [f"{name} needs the package {package}, which cannot be imported: {error}"]
    return []


def version_of(distribution: str) -> str | None:
    """The installed version of a distribution, or None; imports nothing."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _found(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # a parent that is missing, or None in sys.modules
        return False


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
