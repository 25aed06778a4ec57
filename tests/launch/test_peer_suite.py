"""The script that runs transformers' tests: verdicts, logs, groups, exit codes of made-up rows."""

from __future__ import annotations

import json

import peer_suite
import pytest
from peer_suite_verdicts import (
    VERDICTS,
    counts,
    grouped,
    judge,
    judge_all,
    kind_of,
    read_logs,
    unproven,
    without_us,
)

TEST = "tests/models/tiny/test_modeling_tiny.py::TinyTest::test_it"


def row(outcome, *, launches=0, error=None, refusals=()):
    return {
        "test": TEST, "outcome": outcome, "seconds": 1.0, "launches": launches,
        "error": error, "where": ["tiny.py:3 forward"], "refusals": list(refusals),
    }  # fmt: skip


PASSED, SKIPPED, FAILED = row("passed"), row("skipped"), row("failed", error="AssertionError: 1")
DIED = row("died", error="the process ended in this test")
TIMEOUT = "Failed: Timeout (>60.0s) from pytest-timeout."


@pytest.mark.parametrize(
    ("ours", "control", "verdict"),
    [
        (row("passed", launches=2), PASSED, "passed"),
        (row("passed", launches=2), FAILED, "passed"),
        (row("passed"), PASSED, "not exercised"),
        (row("skipped"), PASSED, "not exercised"),
        (row("skipped"), SKIPPED, "skipped"),
        (row("failed", launches=2, error="AssertionError: 2"), PASSED, "failed"),
        (row("failed", error="AssertionError: 2"), SKIPPED, "failed"),
        (row("failed", error="AssertionError: 2"), FAILED, "fails alone"),
        (row("failed", error="AssertionError: 2"), DIED, "fails alone"),
        (row("failed", error="AssertionError: 2"), None, "failed"),
        (row("failed", launches=2, error=TIMEOUT), PASSED, "stopped"),
        (row("failed", launches=2, error=TIMEOUT), FAILED, "fails alone"),
        (row("failed", error="CallRefusedError: no", refusals=["no"]), PASSED, "refused"),
        (DIED, PASSED, "stopped"),
        (DIED, DIED, "fails alone"),
        (None, PASSED, "not run"),
        (None, None, "not run"),
    ],
)
def test_verdict_follows_from_both_runs(ours, control, verdict):
    assert judge(TEST, ours, control).verdict == verdict


def test_a_failure_is_ours_only_where_the_control_has_the_test_and_passes_it():
    found = judge_all({"a/b/t.py::x": FAILED}, {"a/b/t.py::x": PASSED, "a/c/t.py::y": PASSED})
    assert [(one.family, one.verdict) for one in found] == [("b", "failed"), ("c", "not run")]
    assert counts(found)["b"] == {**dict.fromkeys(VERDICTS, 0), "failed": 1}
    assert found[0].where == ("tiny.py:3 forward",)


def test_a_later_log_replaces_an_earlier_one_and_a_failing_teardown_counts(tmp_path):
    def write(name, *rows):
        (tmp_path / name).write_text("".join(json.dumps(one) + "\n" for one in rows))

    collected = {"collected": [TEST, TEST + "_too", TEST + "_last"]}
    write("ours-0000.jsonl", collected, {"began": TEST}, FAILED, {"began": TEST + "_too"})
    found = read_logs(tmp_path, "ours")
    assert (found[TEST], found[TEST + "_last"]) == (FAILED, None)
    assert found[TEST + "_too"]["outcome"] == "died"
    write("ours-0001.jsonl", {"collected": [TEST]}, row("passed", launches=3))
    assert read_logs(tmp_path, "ours")[TEST]["launches"] == 3
    teardown = row("failed", error="OSError: full")
    write("ours-0002.jsonl", {"collected": [TEST]}, row("passed", launches=3), teardown)
    assert read_logs(tmp_path, "ours")[TEST] == teardown
    write("ours-0003.jsonl", {"collected": [TEST]}, FAILED, teardown)
    assert read_logs(tmp_path, "ours")[TEST] == FAILED
    assert read_logs(tmp_path, "control") == {}


def test_reasons_that_differ_in_numbers_and_classes_are_one_group():
    same = ["no float16/d16/causal on cpu: 3 of 4", "no bfloat16/d8/full+sinks on cpu: 1 of 9"]
    assert kind_of(same[0]) == kind_of(same[1]) == "no CLASS on cpu: # of #"
    assert kind_of("gate --dtype float16 --head-dim 16") == "gate --dtype float16 --head-dim #"
    found = judge_all(
        {f"a/b/t.py::{i}": row("failed", refusals=[text]) for i, text in enumerate([*same, "c"])},
        {},
    )
    assert [(reason, len(tests)) for reason, tests in grouped(found, "refused")] == [
        ("no CLASS on cpu: # of #", 2), ("c", 1),
    ]  # fmt: skip


def test_commands_that_extend_the_gate_are_read_out_of_refusals():
    command = "gate --device cpu --head-dim 16 --dtype float16 --visibility causal --feature a+b"
    rows = {
        "a": row("failed", refusals=[f"not covered; to have it measured: hf-attn {command}"]),
        "b": row("failed", error="GateError: x\n  to fix it: hf-attn gate --device cpu",
                 refusals=["x"]),
        "c": row("failed", refusals=["position_bias was given"]),
        "d": row("failed", error="AssertionError: hf-attn gate --device cpu"),
    }  # fmt: skip
    assert unproven(rows) == (["a", "b"], {command, "gate --device cpu"})


def test_the_control_runs_what_did_not_pass_and_everything_where_ours_did_not_run():
    ours = {"f::a": row("passed"), "f::b": FAILED, "f::c": SKIPPED, "f::d": DIED, "f::e": None}
    assert without_us(ours | {"g::a": FAILED}, ["f"]) == ["f::b", "f::c", "f::d"]
    assert without_us({}, ["f"]) == ["f"]


def test_a_folder_that_is_no_checkout_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        peer_suite.main(["--transformers", str(tmp_path), "--families", "mistral"])
    assert stopped.value.code == 2
    assert "has no tests/models/mistral/test_modeling_*.py" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ours", "code", "says"),
    [
        (row("passed", launches=1), 0, ""),
        (row("passed"), 1, "ran in no test that passed"),
        (row("failed", error="AssertionError: 2"), 1, "ran in no test that passed"),
    ],
)
def test_exit_code(ours, code, says, tmp_path, capsys):
    """0 only where a test passed on our kernel and none of ours failed."""
    for role, one in (("ours", ours), ("control", PASSED)):
        (tmp_path / f"{role}-0000.jsonl").write_text(json.dumps(one) + "\n")
    family = tmp_path / "tests" / "models" / "tiny"
    family.mkdir(parents=True)
    (family / "test_modeling_tiny.py").touch()
    arguments = ["--transformers", str(tmp_path), "--families", "tiny", "--logs", str(tmp_path)]
    assert peer_suite.main([*arguments, "--roles"]) == code
    assert says in capsys.readouterr().err
    failing = {**row("failed", error="AssertionError: 2"), "test": TEST + "_too"}
    (tmp_path / "ours-0001.jsonl").write_text(json.dumps(failing) + "\n")
    (tmp_path / "control-0001.jsonl").write_text(json.dumps({**PASSED, "test": TEST + "_too"}))
    assert peer_suite.main([*arguments, "--roles"]) == 1
