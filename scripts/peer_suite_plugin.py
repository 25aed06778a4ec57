"""pytest plugin of `peer_suite.py`: puts triton_fa2 where transformers' tests ask for their own.

Loaded by `-p peer_suite_plugin` into a run of transformers' tests; steered by variables, because a
plugin is imported before options are parsed and xdist's workers inherit the environment:

* `PEER_SUITE_ROLE`: `ours`, or `control` for the same tests with nothing of ours in them;
* `PEER_SUITE_LOG`: the file that gets one JSON line a test.

In the role `ours`, "sdpa" stands for triton_fa2 in both interfaces (attention and masks), which the
tests that compare eager with sdpa, and all that build a model without naming an implementation, run
on. Tests of "flash_attention_2" load "triton_fa2" by its own name; the control loads "sdpa" there,
so that they run without flash-attn. Tests of assisted decoding, which ask for eager, get triton_fa2
there too. The witness is read around each test.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import peer_suite_places as places
import pytest

ROLE_VARIABLE, LOG_VARIABLE = "PEER_SUITE_ROLE", "PEER_SUITE_LOG"

_launches: dict[str, int] = {}


def pytest_configure(config: pytest.Config) -> None:
    """Patch transformers before any test module is imported."""
    ours = os.environ[ROLE_VARIABLE] == "ours"
    if ours:
        importlib.import_module("hf_attn_backends").register()
    utilities = importlib.import_module("transformers.utils")
    utilities.is_datasets_available()  # its answer is kept: a stand-in is no datasets
    for name in places.STAND_INS:
        places.stand_in(name)
    testing = importlib.import_module("transformers.testing_utils")
    testing.__dict__["require_flash_attn"] = places.put_back
    places.load_instead_of_flash(places.OURS if ours else "sdpa")
    if ours:
        places.take_the_place_of_sdpa()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of tiny models, and open the models that know no sdpa to ours."""
    kept = [item for item in items if hasattr(getattr(item, "cls", None), "all_model_classes")]
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept
    for test_class in {item.cls for item in kept}:  # type: ignore[attr-defined]
        places.widen(test_class)
    if os.environ[ROLE_VARIABLE] == "ours":
        places.open_to_ours(importlib.import_module("transformers.modeling_utils").PreTrainedModel)
    _write({"collected": [item.nodeid for item in items]})


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Write down a file that could not be imported; nothing of it would be seen otherwise."""
    if report.failed:
        errors = [line[1:].strip() for line in str(report.longrepr).splitlines() if line[:1] == "E"]
        _result(report.nodeid, report, (errors or [str(report.longrepr)])[-1])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Remember what was launched before a test, and that it began."""
    _write({"began": item.nodeid})
    _launches[item.nodeid] = _launched()
    if os.environ[ROLE_VARIABLE] == "ours" and places.ITSELF.search(item.name):
        with places.in_the_place_of_eager(getattr(item, "cls", None)):
            return (yield)
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Write what became of a test: at its call, or earlier or later where that is what failed."""
    report = yield
    if report.when == "call" or report.failed or (report.when == "setup" and report.skipped):
        error, where = None, []
        if call.excinfo is not None:
            error = call.excinfo.value
            where = [
                f"{Path(entry.path).name}:{entry.lineno + 1} {entry.name}"
                for entry in call.excinfo.traceback[-4:]
            ]
        text = None if error is None else f"{type(error).__name__}: {error}"[:4000]
        _result(item.nodeid, report, text, where, refusals(error))
    return report


def _result(
    test: str,
    report: pytest.TestReport | pytest.CollectReport,
    error: str | None,
    where: Sequence[str] = (),
    refused: Sequence[str] = (),
) -> None:
    """Write the row of a test, or of a file that could not be collected."""
    _write(
        {
            "test": test,
            "outcome": report.outcome,
            "seconds": round(getattr(report, "duration", 0.0), 2),
            "launches": _launched() - _launches.get(test, _launched()),
            "error": error,
            "where": list(where),
            "refusals": list(refused),
        }
    )


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


def _launched() -> int:
    """Launches of our kernels in this process so far; 0 where the package was not imported."""
    witness = sys.modules.get("hf_attn_backends.witness")
    if witness is None:
        return 0
    return sum(n for launch, n in witness.snapshot().items() if launch.backend == places.OURS)


def _write(row: dict[str, Any]) -> None:
    """Append one line by one write, so that the workers' lines do not mix."""
    line = (json.dumps(row) + "\n").encode()
    descriptor = os.open(os.environ[LOG_VARIABLE], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(descriptor, line)
    finally:
        os.close(descriptor)
