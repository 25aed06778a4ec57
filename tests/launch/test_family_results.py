"""README's table of families: from files that say what the tests' table holds now."""

from __future__ import annotations

import json
import sys

import pytest
import readme_families


@pytest.fixture(scope="module")
def contents(root):
    sys.path.insert(0, str(root / "tests" / "hf" / "families"))
    found = {}
    for name in readme_families.FILES:
        path = readme_families.RESULTS / name
        if path.exists():
            found[name] = json.loads(path.read_text())
    assert found
    return found


def test_every_file_holds_every_family_of_the_table(contents):
    from family_table import FAMILIES, REFUSALS

    for name, content in contents.items():
        rows = {row["family"]: row for row in content["rows"]}
        assert list(rows) == [*FAMILIES, *REFUSALS], name
        for family in FAMILIES:
            assert rows[family]["status"] == "served", (name, family)
        for family in REFUSALS:
            assert rows[family]["status"] == "refused", (name, family)
            assert REFUSALS[family].reason in rows[family]["reason"]


def test_what_the_files_say_was_held_to_the_table_as_it_is_now(contents):
    import family_configs
    from family_table import FAMILIES
    from family_verdict import FACTORS

    for content in contents.values():
        size = family_configs.Size(**content["size"])
        assert size in (family_configs.CPU, family_configs.GPU)
        assert content["factors"] == FACTORS
        for row in content["rows"]:
            for case, found in row.get("cases", {}).items():
                expected = FAMILIES[row["family"]].classes(case, content["dtype"], size)
                assert found["classes"] == expected
                assert found["share"] <= 1
                assert not found["problems"]


def test_the_lines_of_a_file(contents):
    made = {
        "versions": {"transformers": "5.0", "torch": "2", "triton": "3"},
        "device": {"type": "cuda", "name": "NVIDIA X"},
        "dtype": "bfloat16", "date": "d", "command": "c", "kernel_source_sha256": "a" * 64,
        "size": next(iter(contents.values()))["size"],
        "rows": [
            {"family": "one", "title": "One", "model_type": "one_text", "status": "served",
             "cases": {
                 "whole": {"classes": {"bfloat16/d64/causal": 2}, "yardstick": "sdpa",
                           "error": 0.01, "yardstick_error": 0.02, "share": 0.5},
                 "padded": {"classes": {"bfloat16/d64/intervals+sinks": 2}, "yardstick": "sdpa",
                            "error": 0.03, "yardstick_error": 0.04, "share": 0.25},
             }},
            {"family": "two", "title": "Two", "model_type": "two", "status": "failed"},
            {"family": "three", "title": "Three", "model_type": "three", "status": "refused",
             "reason": "it does not"},
        ],
    }  # fmt: skip
    other = {**made, "rows": made["rows"][:1]}
    lines = readme_families.table([made, other])
    assert lines[0].startswith(
        "| family | `model_type` | attention calls | bf16, X, transformers 5"
    )
    assert lines[2] == (
        "| One | `one_text` | causal, intervals+sinks | 3.0e-02 (sdpa 4.0e-02), 50% "
        "| 3.0e-02 (sdpa 4.0e-02), 50% |"
    )
    assert lines[3] == "| Two | `two` |  | failed | not run |"
    assert lines[4] == "| Three | `three` |  | refused | not run |"
    assert "* Three: it does not." in lines
