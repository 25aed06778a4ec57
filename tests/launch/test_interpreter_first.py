"""The interpreter is switched on before anything imports triton."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from interpreter_first import config_path, wants_interpreter


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ([], True),
        (["--interpreter", "false"], False),
        (["--interpreter=0"], False),
        (["--no_interpreter"], False),
        (["--interpreter"], True),
        (["--interpreter", "--max_steps", "1"], True),
    ],
)
def test_flags_win_over_the_file(tmp_path, flags, wanted):
    path = tmp_path / "c.yaml"
    path.write_text("interpreter: true\n")
    assert wants_interpreter(["--config", str(path), *flags]) is wanted


@pytest.mark.parametrize("text", ["interpreter: false\n", "a: 1\n", "[1, 2\n", "- 1\n", ""])
def test_no_file_or_another_file_wants_nothing(tmp_path, text):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    assert not wants_interpreter([f"--config={path}"])
    assert not wants_interpreter(["--config", str(tmp_path / "absent.yaml")])
    assert not wants_interpreter([])


def test_config_path_is_found_in_both_spellings():
    assert str(config_path(["--x", "--config", "a.yaml"])) == "a.yaml"
    assert str(config_path(["--config=b.yaml"])) == "b.yaml"
    assert config_path(["--config"]) is None


PROGRAM = """
import os, sys
sys.path.insert(0, {scripts!r})
if {early!r} and not os.environ.get("STARTED_AGAIN"):
    os.environ["STARTED_AGAIN"] = "1"
    sys.modules["triton"] = sys  # as if something had imported it
import interpreter_first
interpreter_first.prepare(sys.argv[1:])
print(os.environ.get("TRITON_INTERPRET"), "triton" in sys.modules, "torch" in sys.modules)
"""


@pytest.mark.parametrize("early", [False, True])
def test_a_process_is_prepared_and_starts_again_where_it_is_too_late(root, tmp_path, early):
    config = tmp_path / "c.yaml"
    config.write_text("interpreter: true\n")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(scripts=str(root / "scripts"), early=early))
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    said = subprocess.run(
        [sys.executable, str(program), "--config", str(config)],
        capture_output=True, text=True, env=environment, timeout=60,
    )  # fmt: skip
    assert said.stdout.split() == ["1", "False", "False"], said.stderr
