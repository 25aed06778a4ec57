"""Records: mandatory keys, schema, status, redaction."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hf_attn_backends import journal, provenance, registry
from hf_attn_backends.attempts import attempts
from hf_attn_backends.errors import BannerIncompleteError, RecordError, RegistryCorruptError


def test_the_mandatory_keys_are_those_of_the_specification() -> None:
    assert "attention_backend" in registry.MANDATORY_BANNER_KEYS
    assert len(set(registry.MANDATORY_BANNER_KEYS)) == len(registry.MANDATORY_BANNER_KEYS) == 22


def test_a_record_comes_back_as_it_was(home: Path, make_record) -> None:
    record = make_record()
    registry.append(record)
    (read,), notes = registry.read()
    assert notes == []
    kept = {**read.as_row()}
    assert kept.pop("prev_sha256") is None
    assert len(kept.pop("sha256")) == 64
    assert kept == record.as_row()
    assert (home / "runs" / "registry.jsonl").is_file()
    assert registry.verify() == (1, [], [])


@pytest.mark.parametrize("key", registry.MANDATORY_BANNER_KEYS)
@pytest.mark.parametrize("empty", ["", "  ", [], {}, "missing"])
def test_an_empty_or_missing_key_refuses_the_launch(make_record, key: str, empty: object) -> None:
    row = make_record().as_row()
    row[key] = empty
    if empty == "missing":
        del row[key]
    with pytest.raises(BannerIncompleteError, match=key):
        registry.append(row)
    assert not registry.registry_path().exists()


def test_every_reason_is_said_and_null_only_where_it_has_a_meaning(make_record) -> None:
    registry.append(make_record(attention_requested=None, gate=None))
    bad = make_record(attention_reason=None, device={"type": "cuda", "name": ""}, model="")
    with pytest.raises(BannerIncompleteError) as caught:
        registry.append(bad)
    for reason in ("attention_reason is missing", "device.name is empty", "model is empty"):
        assert reason in str(caught.value)


def test_unknown_events_and_verdicts_are_refused(make_record) -> None:
    with pytest.raises(BannerIncompleteError, match="'probably'"):
        registry.append(make_record(attention_verdict="probably"))
    with pytest.raises(BannerIncompleteError, match="'done'"):
        registry.append(make_record(event="done"))


def test_a_broken_middle_line_raises_and_verify_says_which(make_record) -> None:
    for seq in range(3):
        registry.append(make_record(seq=seq))
    path = registry.registry_path()
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1][:50] + b"\n" + lines[2])
    with pytest.raises(RegistryCorruptError, match="line 2: not strict JSON"):
        registry.read()
    rows, problems, _ = registry.verify()
    assert rows == 2
    assert len(problems) == 2  # the line, and the link over it


def test_verify_finds_a_whole_row_that_says_too_little(make_record) -> None:
    """Sealed and linked, so that the chain is sound; another program wrote it."""
    row = make_record().as_row()
    journal.append(registry.registry_path(), row)
    assert registry.verify()[1] == []
    journal.append(registry.registry_path(), row | {"attention_backend": " ", "model": None})
    assert registry.verify() == (
        2, ["row 2: attention_backend is empty", "row 2: model is missing"], [],
    )  # fmt: skip
    del row["gate"]
    journal.append(registry.registry_path(), row)
    assert "missing 1 required keyword-only argument: 'gate'" in registry.verify()[1][-1]


def test_a_future_schema_is_refused_and_a_newer_key_is_kept(make_record) -> None:
    registry.append({**make_record().as_row(), "novelty": [1]})
    (record,), _ = registry.read()
    assert record.extra["novelty"] == [1]
    registry.append({**make_record().as_row(), "schema_version": 2})
    with pytest.raises(RecordError, match="schema_version 2, this reads up to 1"):
        registry.read()
    assert "schema_version 2" in registry.verify()[1][0]


def test_copies_have_chains_of_their_own(tmp_path: Path, make_record) -> None:
    registry.append(make_record(run_id="other"))
    paths = (registry.registry_path(), tmp_path / registry.COPY_NAME)
    for seq in range(2):
        registry.append(make_record(seq=seq), paths=paths)
    for path, count in zip(paths, (3, 2), strict=True):
        assert registry.verify(path) == (count, [], [])


def test_status_of_finished_running_dead_rebooted_and_foreign_runs(make_record) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    here = provenance.process_identity()
    ticks = provenance._start_ticks(child.pid)
    alive = {**here, "pid": child.pid, "started": ticks}
    rows = [
        make_record(run_id="finished"),
        make_record(run_id="finished", event="end", seq=1),
        make_record(run_id="running"),
        make_record(run_id="running too", process=alive),
        make_record(run_id="pid given away", process={**alive, "started": ticks - 1}),
        make_record(run_id="rebooted", process={**here, "boot_id": "another"}),
        make_record(run_id="foreign", process={**here, "host": "elsewhere"}),
        make_record(run_id="stopped", event="interrupted"),
    ]
    found = {each.first.run_id: each.status for each in attempts(rows)}
    child.kill()
    child.wait()
    assert found["finished"] == "finished"
    assert found["running"] == found["running too"] == "running"
    for dead in ("pid given away", "rebooted", "stopped"):
        assert found[dead] == "crashed"
    assert found["foreign"].startswith("unknown: it ran on elsewhere")
    gone = attempts([make_record(process=alive)])[0].status
    assert gone == "crashed"


def test_attempts_are_grouped_by_run_and_attempt(make_record) -> None:
    rows = [
        make_record(run_id="a"),
        make_record(run_id="b"),
        make_record(run_id="a", event="end", seq=1, attention_verdict="matched"),
        make_record(run_id="a", attempt=2, event="resume"),
    ]
    got = [(each.first.run_id, each.first.attempt, each.verdict) for each in attempts(rows)]
    assert got == [("a", 1, "matched"), ("b", 1, "not_observed"), ("a", 2, "not_observed")]


def test_a_killed_writer_leaves_a_readable_registry(tmp_path: Path, make_record) -> None:
    """SIGKILL in the middle of a stream of writes: every row but perhaps the last is intact."""
    row = json.dumps(make_record().as_row())
    script = (
        "import json, sys\nfrom hf_attn_backends import registry\n"
        f"row = json.loads({row!r})\nrow['code'] = {{'pad': 'x' * 200000}}\n"
        "for i in range(10**6):\n    registry.append({**row, 'seq': i})\n"
    )
    for _ in range(3):
        child = subprocess.Popen([sys.executable, "-c", script])
        before = registry.registry_path().stat().st_size if registry.registry_path().exists() else 0
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            if registry.registry_path().exists() and (
                registry.registry_path().stat().st_size > before + 10**6
            ):
                break
            time.sleep(0.005)
        child.kill()
        child.wait()
    records, _ = registry.read()
    assert len(records) >= 15
    assert registry.verify()[1] == []
    registry.append(make_record(seq=99))
    assert registry.read()[0][-1].seq == 99


def test_the_command_line_is_redacted_by_allow_list() -> None:
    argv = [
        "/home/me/train.py", "configs/run.yaml", "mysecret", "--max_steps", "5",
        "--hub_token", "abc", "--hub-token=abc", "--learning-rate=1e-4", "-pSECRET", "--bf16",
        "--lr", "-0.5", "--model", "org/name", "--corpus=https://u:pw@host/x", "true",
    ]  # fmt: skip
    hidden = provenance.REDACTED
    assert provenance.redacted_argv(argv) == [
        "train.py", "run.yaml", hidden, "--max_steps", "5",
        "--hub_token", hidden, f"--hub-token={hidden}", "--learning-rate=1e-4", f"-p{hidden}",
        "--bf16", "--lr", "-0.5", "--model", "org/name", f"--corpus={hidden}", "true",
    ]  # fmt: skip


def test_the_environment_is_an_allow_list() -> None:
    given = {"HF_TOKEN": "hf_abc", "WANDB_API_KEY": "k", "RANK": "1", "HF_ATTN_BACKEND": ""}
    assert provenance.safe_environment(given) == {"RANK": "1"}


def test_no_folder_can_be_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, make_record
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HF_ATTN_HOME", str(tmp_path / "file"))
    with pytest.raises(RecordError, match="export HF_ATTN_HOME"):
        registry.append(make_record())


def test_this_process_is_alive_by_its_identity() -> None:
    identity = provenance.process_identity()
    assert identity["pid"] == os.getpid()
    assert provenance.liveness(identity) == "alive"
    assert journal.plain(identity) == identity
