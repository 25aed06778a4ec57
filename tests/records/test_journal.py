"""The durable line file: concurrent writers, torn and edited lines, strict JSON."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_attn_backends import journal
from hf_attn_backends.errors import RecordError, RegistryCorruptError

WRITER = """
import sys
from pathlib import Path
from hf_attn_backends import journal
path, who, rows = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
for i in range(rows):
    journal.append(path, {"who": who, "i": i, "pad": "x" * 9000})
"""


def write(path: Path, count: int) -> None:
    for i in range(count):
        journal.append(path, {"i": i})


def test_rows_come_back_in_order_and_linked(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "j.jsonl"
    write(path, 3)
    scan = journal.scan(path)
    assert [row["i"] for row in scan.rows] == [0, 1, 2]
    assert scan.rows[0]["prev_sha256"] is None
    assert scan.rows[2]["prev_sha256"] == scan.rows[1]["sha256"]
    assert (scan.notes, scan.problems) == ((), ())
    assert path.read_bytes().count(b"\n") == 3


def test_missing_and_empty_files_have_no_rows(tmp_path: Path) -> None:
    assert journal.scan(tmp_path / "none").rows == ()
    (tmp_path / "empty").touch()
    write(tmp_path / "empty", 1)
    assert journal.scan(tmp_path / "empty").problems == ()


def test_eight_processes_lose_and_break_nothing(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    command = [sys.executable, "-c", WRITER, str(path)]
    writers = [subprocess.Popen([*command, str(n), "15"]) for n in range(8)]
    assert [writer.wait(120) for writer in writers] == [0] * 8
    scan = journal.scan(path)
    assert (scan.notes, scan.problems) == ((), ())
    for n in range(8):  # each writer's own rows, complete and in order
        assert [row["i"] for row in scan.rows if row["who"] == str(n)] == list(range(15))


def test_a_writer_that_the_lock_does_not_hold_back_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Locks fail on some network disks; `O_APPEND` then still keeps both rows whole."""
    path = tmp_path / "j.jsonl"
    write(path, 1)
    real = journal._next_line

    def meanwhile(*args: object):
        found = real(*args)
        with path.open("ab") as other:
            other.write(journal.seal({"who": "another", "prev_sha256": None})[1] + b"\n")
        return found

    monkeypatch.setattr(journal, "_next_line", meanwhile)
    journal.append(path, {"who": "this"})
    assert [row.get("who") for row in journal.scan(path).rows] == [None, "another", "this"]


def test_a_torn_last_line_is_skipped_and_said(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    write(path, 3)
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    scan = journal.scan(path)
    assert [row["i"] for row in scan.rows] == [0, 1]
    assert scan.problems == ()
    assert scan.notes[0].startswith("line 3: torn last line, skipped")


def test_writing_after_a_torn_line_keeps_it_visible_and_the_chain_whole(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    write(path, 2)
    path.write_bytes(path.read_bytes()[:-20])
    journal.append(path, {"i": 7})
    journal.append(path, {"i": 8})
    scan = journal.scan(path)
    assert [row["i"] for row in scan.rows] == [0, 7, 8]
    assert scan.problems == ()
    assert scan.notes == ("line 2: torn, skipped (declared by the row after it)",)
    torn = path.read_bytes().split(b"\n")[1]
    assert scan.rows[1]["torn_before"]["bytes"] == len(torn) > 0
    # The declaration covers those bytes only: other bytes in their place are an edit.
    path.write_bytes(path.read_bytes().replace(torn, torn[:-1] + b"?"))
    assert any("line 2" in problem for problem in journal.scan(path).problems)


def test_two_torn_writes_in_a_row(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    write(path, 1)
    path.write_bytes(path.read_bytes() + b'{"half":\n{"hal')
    journal.append(path, {"i": 5})
    scan = journal.scan(path)
    assert ([row["i"] for row in scan.rows], scan.problems) == ([0, 5], ())
    assert scan.notes == ("line 2-3: torn, skipped (declared by the row after it)",)


def test_a_file_whose_first_write_was_torn_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    path.write_bytes(b'{"run_id": "a", "ev')
    journal.append(path, {"i": 1})
    scan = journal.scan(path)
    assert ([row["i"] for row in scan.rows], scan.problems) == ([1], ())


def test_a_complete_last_row_without_its_newline_counts(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    write(path, 2)
    path.write_bytes(path.read_bytes()[:-1])
    assert len(journal.scan(path).rows) == 2
    journal.append(path, {"i": 2})
    scan = journal.scan(path)
    assert ([row["i"] for row in scan.rows], scan.notes, scan.problems) == ([0, 1, 2], (), ())


@pytest.mark.parametrize("which", [0, 1, 2])
def test_an_edited_row_shows_wherever_it_is(tmp_path: Path, which: int) -> None:
    path = tmp_path / "j.jsonl"
    write(path, 3)
    edited = path.read_bytes().replace(b'{"i":%d' % which, b'{"i":9')
    path.write_bytes(edited)
    problems = journal.scan(path).problems
    assert f"line {which + 1}: its bytes do not give its sha256: the row was edited" in problems
    journal.append(path, {"i": 3})  # a later row does not excuse it as torn
    scan = journal.scan(path)
    assert problems[0] in scan.problems
    assert scan.notes == ()


def test_an_edited_row_with_a_fresh_digest_breaks_the_next_link(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    write(path, 3)
    lines = path.read_bytes().splitlines()
    row = {**json.loads(lines[1]), "i": 9}
    del row["sha256"]
    lines[1] = journal.seal(row)[1]
    path.write_bytes(b"\n".join(lines) + b"\n")
    (problem,) = journal.scan(path).problems
    assert problem.startswith("line 3: prev_sha256 is")


def test_a_removed_row_and_swapped_rows_show(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    write(path, 4)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[2] + lines[3])
    assert len(journal.scan(path).problems) == 1
    path.write_bytes(lines[0] + lines[2] + lines[1] + lines[3])
    assert len(journal.scan(path).problems) == 3


def test_garbage_that_ends_with_a_newline_is_not_torn(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    write(path, 1)
    path.write_bytes(path.read_bytes() + b"{broken\n")
    assert journal.scan(path).problems[0].startswith("line 2: not strict JSON")
    journal.append(path, {"i": 2})
    assert journal.scan(path).problems[0].startswith("line 2: not strict JSON")


def test_a_file_of_something_else_is_not_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    path.write_text("a shopping list\n")
    with pytest.raises(RegistryCorruptError, match="no intact row"):
        journal.append(path, {"i": 1})
    assert path.read_text() == "a shopping list\n"


@pytest.mark.parametrize("text", ['{"a":NaN,', '{"a":Infinity,', '{"a":1,"a":2,'])
def test_what_is_not_strict_json_is_refused(text: str) -> None:
    row, why = journal.parse(text.encode() + b'"sha256":"' + b"0" * 64 + b'"}')
    assert row is None
    assert why.startswith("not strict JSON")


def test_values_that_json_has_not_are_replaced_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    body = {
        "loss": float("nan"),
        "big": float("-inf"),
        "where": Path("a"),
        "s": {2, 1},
        "é": "\u2028",
    }
    row = journal.append(path, body)
    assert row["loss"] == {"value": None, "reason": "was nan"}
    assert row["big"] == {"value": None, "reason": "was -inf"}
    assert (row["where"], row["s"], row["é"]) == ("a", [1, 2], "\u2028")
    assert journal.scan(path).rows == (row,)
    assert path.read_bytes().isascii()


def test_rows_longer_than_a_block_are_linked(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    journal.append(path, {"pad": "x" * (3 * journal._BLOCK)})
    journal.append(path, {"pad": "y" * journal._BLOCK})
    journal.append(path, {"i": 1})
    assert journal.scan(path).problems == ()


def test_a_short_write_is_an_error_and_leaves_a_readable_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "j.jsonl"
    write(path, 1)
    whole = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: whole(fd, data[:10]))
    with pytest.raises(RecordError, match=r"only 10 of \d+ bytes.*(\n.*)*HF_ATTN_HOME"):
        journal.append(path, {"i": 1})
    monkeypatch.undo()
    journal.append(path, {"i": 2})
    scan = journal.scan(path)
    assert ([row["i"] for row in scan.rows], scan.problems) == ([0, 2], ())


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RecordError, match="No space left on device"):
        journal.append(tmp_path / "j.jsonl", {"i": 1})


def test_the_row_and_the_new_folders_are_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []
    real = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), real(fd))
    )
    path = tmp_path / "a" / "b" / "j.jsonl"
    journal.append(path, {"i": 1})
    assert synced == [str(p) for p in (path, path.parent, tmp_path / "a", tmp_path)]
    synced.clear()
    journal.append(path, {"i": 2})
    assert synced == [str(path)]
