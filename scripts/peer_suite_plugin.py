"""pytest plugin of `peer_suite.py`: puts triton_fa2 where transformers' tests ask for their own.

Loaded by `-p peer_suite_plugin` into a run of transformers' tests; steered by variables, because a
plugin is imported before options are parsed and xdist's workers inherit the environment:

* `PEER_SUITE_ROLE`: `ours`, or `control` for the same tests with nothing of ours in them;
* `PEER_SUITE_LOG`: the file that gets one JSON line a test.

In the role `ours`, "sdpa" stands for triton_fa2 in both interfaces (attention and masks), which the
tests that compare eager with sdpa, and all that build a model without naming an implementation, run
on. Tests of "flash_attention_2" load "triton_fa2" by its own name; the control loads "sdpa" there,
so that they run without flash-attn. The witness is read around each test.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
from collections.abc import Callable, Generator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROLE_VARIABLE, LOG_VARIABLE = "PEER_SUITE_ROLE", "PEER_SUITE_LOG"
OURS = "triton_fa2"
STAND_INS = ("datasets",)  # imported by test modules of pipelines, which are not run

_launches: dict[str, int] = {}


def pytest_configure(config: pytest.Config) -> None:
    """Patch transformers before any test module is imported."""
    ours = os.environ[ROLE_VARIABLE] == "ours"
    if ours:
        importlib.import_module("hf_attn_backends").register()
    utilities = importlib.import_module("transformers.utils")
    utilities.is_datasets_available()  # its answer is kept: a stand-in is no datasets
    for name in STAND_INS:
        _stand_in(name)
    testing = importlib.import_module("transformers.testing_utils")
    testing.__dict__["require_flash_attn"] = put_back
    load_instead_of_flash(OURS if ours else "sdpa")
    if ours:
        take_the_place_of_sdpa()


def put_back(test: Callable) -> Callable:
    """In place of the decorator `require_flash_attn`: undo the skips that stand below it."""
    while getattr(test, "__unittest_skip__", False) and hasattr(test, "__wrapped__"):
        test = test.__wrapped__  # type: ignore[attr-defined]
    return test


def take_the_place_of_sdpa() -> None:
    """Let the name "sdpa" mean triton_fa2 in the interfaces of attention and of masks."""
    modeling = importlib.import_module("transformers.modeling_utils")
    masking = importlib.import_module("transformers.masking_utils")
    for interface in (modeling.AttentionInterface, masking.AttentionMaskInterface):
        interface.register("sdpa", interface._global_mapping[OURS])


def load_instead_of_flash(replacement: str) -> None:
    """Have every load that asks for "flash_attention_2" ask for `replacement`."""
    base = importlib.import_module("transformers.modeling_utils").PreTrainedModel

    def renamed(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: renamed(one) for key, one in value.items()}
        return replacement if value == "flash_attention_2" else value

    def wrapped(function: Callable) -> Callable:
        @functools.wraps(function)
        def load(*args: Any, **kwargs: Any) -> Any:
            if "attn_implementation" in kwargs:
                kwargs["attn_implementation"] = renamed(kwargs["attn_implementation"])
            return function(*(renamed(one) if isinstance(one, str) else one for one in args),
                            **kwargs)  # fmt: skip

        return load

    for name in ("from_pretrained", "_from_config"):
        setattr(base, name, classmethod(wrapped(base.__dict__[name].__func__)))
    base.set_attn_implementation = wrapped(base.set_attn_implementation)


def _stand_in(name: str) -> None:
    """Let `import name` work where the package is absent; whatever is called of it skips."""
    try:
        importlib.import_module(name)
    except ImportError:
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)

        def attribute(wanted: str) -> Callable:
            if wanted.startswith("__"):
                raise AttributeError(wanted)
            return lambda *args, **kwargs: pytest.skip(f"{name} is not installed")

        module.__getattr__ = attribute  # type: ignore[method-assign]
        sys.modules[name] = module


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of tiny models, and open the models that know no sdpa to ours."""
    kept = [item for item in items if hasattr(getattr(item, "cls", None), "all_model_classes")]
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept
    if os.environ[ROLE_VARIABLE] == "ours":
        _open(importlib.import_module("transformers.modeling_utils").PreTrainedModel)
    _write({"collected": [item.nodeid for item in items]})


def _open(cls: type) -> None:
    """Mark a class and all below it as able to run sdpa where they look up their attention.

    gpt-oss and others say no because SDPA lacks softcap or sinks, which triton_fa2 has.
    """
    if getattr(cls, "_supports_attention_backend", False):
        cls._supports_sdpa = True  # type: ignore[attr-defined]
    for below in cls.__subclasses__():
        _open(below)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Remember what was launched before a test, and that it began."""
    _write({"began": item.nodeid})
    _launches[item.nodeid] = _launched()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Write what became of a test: at its call, or earlier or later where that is what failed."""
    report = yield
    if report.when == "call" or report.failed or (report.when == "setup" and report.skipped):
        error = call.excinfo.value if call.excinfo is not None else None
        _write(
            {
                "test": item.nodeid,
                "when": report.when,
                "outcome": report.outcome,
                "seconds": round(report.duration, 2),
                "launches": _launched() - _launches.get(item.nodeid, 0),
                "error": None if error is None else f"{type(error).__name__}: {error}"[:4000],
                "where": None if call.excinfo is None else _where(call.excinfo),
                "refusals": refusals(error),
            }
        )
    return report


def refusals(error: BaseException | None) -> list[str]:
    """The reasons of the first error of this package in a chain of exceptions."""
    if "hf_attn_backends.errors" not in sys.modules:
        return []
    ours = sys.modules["hf_attn_backends.errors"].AttentionBackendError
    while error is not None:
        if isinstance(error, ours):
            return list(getattr(error, "reasons", ())) or [str(error)]
        error = error.__cause__ or error.__context__
    return []


def _where(found: pytest.ExceptionInfo) -> list[str]:
    """The innermost places of a failure, the deepest last."""
    return [
        f"{Path(entry.path).name}:{entry.lineno + 1} {entry.name}" for entry in found.traceback[-4:]
    ]


def _launched() -> int:
    """Launches of our kernels in this process so far; 0 where the package was not imported."""
    witness = sys.modules.get("hf_attn_backends.witness")
    if witness is None:
        return 0
    return sum(n for launch, n in witness.snapshot().items() if launch.backend == OURS)


def _write(row: dict[str, Any]) -> None:
    """Append one line by one write, so that the workers' lines do not mix."""
    line = (json.dumps(row) + "\n").encode()
    descriptor = os.open(os.environ[LOG_VARIABLE], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(descriptor, line)
    finally:
        os.close(descriptor)
