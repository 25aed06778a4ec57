"""Baseline files: what is read, what is refused, and the verdicts."""

from __future__ import annotations

import json
import math
import re

import pytest

from hf_attn_backends.bench import baselines, load_sdpa_baseline, verdict, verdicts
from hf_attn_backends.bench.arms import SDPA_KERNELS
from hf_attn_backends.bench.baselines import Baseline, read_baseline, write_baseline
from hf_attn_backends.bench.pin import pin
from hf_attn_backends.errors import BenchmarkError

WHY = "RuntimeError: No available kernel."


def made_up() -> Baseline:
    """A baseline of a device that does not exist; never written into the package."""
    times = {
        str(length): dict(zip(SDPA_KERNELS, (1.0, 0.5, math.nan, 20.0), strict=True))
        for length in baselines.LENGTHS
    }
    reasons = {str(length): {"EFFICIENT_ATTENTION": WHY} for length in baselines.LENGTHS}
    return Baseline(
        device="No Such GPU",
        torch="0",
        driver="0",
        date="2000-01-01T00:00:00Z",
        commit="0" * 40,
        command="hf-attn bench --pin",
        timing="none",
        median_ms=times,
        reasons=reasons,
    )


def test_write_then_read_keeps_values_and_nan(tmp_path):
    path = write_baseline(made_up(), tmp_path / "x.json")
    assert "NaN" not in path.read_text()
    back = read_baseline(path)
    assert back.median_ms["512"]["FLASH_ATTENTION"] == 1.0
    assert back.median_ms["2048"]["MATH"] == 20.0
    assert math.isnan(back.median_ms["1024"]["EFFICIENT_ATTENTION"])
    assert back.reasons["1024"]["EFFICIENT_ATTENTION"] == WHY
    assert (back.device, back.commit) == ("No Such GPU", "0" * 40)


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda row: row.update(schema_version=2), "schema_version must be 1, got 2"),
        (lambda row: row.update(driver=""), "driver must be a non-empty text"),
        (lambda row: row["median_ms"]["512"].update(MATH=0), "must be milliseconds above 0, got 0"),
        (lambda row: row["median_ms"]["512"].update(MATH=None), "MATH at 512 is null without"),
        (lambda row: row["median_ms"].pop("1024"), "median_ms must have the lengths"),
        (lambda row: row["workload"].update(batch=8), "workload must be"),
        (lambda row: row["median_ms"]["512"].pop("MATH"), "length 512 must have"),
    ],
)
def test_invalid_files_say_what_is_wrong(tmp_path, edit, says):
    path = write_baseline(made_up(), tmp_path / "x.json")
    row = json.loads(path.read_text())
    edit(row)
    path.write_text(json.dumps(row))
    with pytest.raises(BenchmarkError, match="invalid") as caught:
        read_baseline(path)
    assert says in str(caught.value)


@pytest.mark.parametrize("text", ['{"median_ms": NaN}', '{"schema_ver', "[]"])
def test_not_strict_json_or_not_an_object(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(BenchmarkError):
        read_baseline(path)


def test_zero_is_never_written(tmp_path):
    broken = made_up()
    broken.median_ms["512"]["MATH"] = 0.0
    with pytest.raises(BenchmarkError, match="above 0"):
        write_baseline(broken, tmp_path / "x.json")
    assert not (tmp_path / "x.json").exists()


def test_a_device_without_a_file_is_refused_with_the_command():
    with pytest.raises(BenchmarkError) as caught:
        load_sdpa_baseline("No Such GPU")
    assert "No Such GPU" in str(caught.value)
    assert "hf-attn bench --pin" in str(caught.value)


@pytest.mark.parametrize("commit", ["HEAD", "main", "not a repo", "abc"])
def test_a_commit_that_is_none_is_refused_before_anything_is_measured(commit):
    with pytest.raises(BenchmarkError, match="hex digits"):
        pin("cuda", commit=commit)


def test_every_file_of_the_package_is_valid_and_named_after_its_device():
    for path in baselines.FOLDER.glob("*.json"):
        found = read_baseline(path)
        assert baselines.baseline_path(found.device) == path
        assert re.fullmatch(r"[0-9a-f]{40}( with changes)?", found.commit)


def test_the_reference_device_is_pinned_without_efficient_attention():
    assert baselines.REFERENCE_DEVICE in baselines.pinned_devices()
    times = load_sdpa_baseline()
    assert list(times) == ["512", "1024", "2048"]
    for kernels in times.values():
        assert math.isnan(kernels["EFFICIENT_ATTENTION"])
        assert 0 < kernels["CUDNN_ATTENTION"] < kernels["FLASH_ATTENTION"] < kernels["MATH"]
    assert times["512"]["FLASH_ATTENTION"] < times["2048"]["FLASH_ATTENTION"]


@pytest.mark.parametrize(
    ("measured", "pinned", "text", "regressed"),
    [
        (1.9, 1.0, "ok", False),
        (2.5, 1.0, "slower x2.50", True),
        (0.25, 1.0, "faster x4.00", False),
        (math.nan, math.nan, "ok", False),
        (3.0, math.nan, "nan->value", False),
        (math.nan, 3.0, "value->nan", True),
    ],
)
def test_verdicts(measured, pinned, text, regressed):
    judged = verdict(measured, pinned)
    assert str(judged) == text
    assert judged.is_regression is regressed


def test_a_kernel_that_was_not_measured_counts_as_nan():
    judged = verdicts({"MATH": 1.0}, {"MATH": 1.0, "FLASH_ATTENTION": 1.0, "X": math.nan})
    assert {name: str(v) for name, v in judged.items()} == {
        "MATH": "ok",
        "FLASH_ATTENTION": "value->nan",
        "X": "ok",
    }
