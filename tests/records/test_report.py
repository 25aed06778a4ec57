"""The banner's text, tables, and `hf-attn runs`."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from hf_attn_backends import cli, registry, report

GOLDEN = """\
attention_backend=triton_fa2 (requested by argument; gate ok 3f9c0000…; cuda NVIDIA H200 sm90)
attention_requested=triton_fa2 attention_origin=argument
attention_reason=the gate vouches for it
attention_verified=ok: 32 modules, 32 run triton_fa2
attention_refused=flash_attention_2: flash_attn is not installed
attention_refused=flashmla: head_dim 128, not 576
gate=ok, artifact_sha256 3f9c0000000000000000, kernel_source_sha256 ab, device cuda-sm90
model=mistral, head_dim 128, n_heads 32, n_kv_heads 8, sliding_window none, dtype bfloat16
versions=torch 2.11.0, triton 3.6.0
flags=mode train, compile false, sdp_enabled flash,math
dist=world_size 2, launcher torchrun, agree true
counts=one forward launch a layer and micro-batch
run_id=run-1 attempt=1 record_id=rec-1
registry=/home/me/registry.jsonl"""


@pytest.fixture
def record(make_record):
    refused = {
        "flash_attention_2": "flash_attn is not installed",
        "flashmla": "head_dim 128, not 576",
    }
    return make_record(
        record_id="rec-1",
        attention_requested="triton_fa2",
        attention_backend="triton_fa2",
        attention_reason="the gate\nvouches for it",
        attention_candidates=[
            {"name": "sdpa", "available": True, "reason": "in torch"},
            *({"name": n, "available": False, "reason": r} for n, r in refused.items()),
        ],
        attention_verified={"layers": 32, "names": {"triton_fa2": 32}, "ok": True},
        gate={
            "status": "ok", "artifact_sha256": "3f9c" + "0" * 60, "kernel_source_sha256": "ab",
            "device": "cuda-sm90",
        },
        model={
            "model_type": "mistral", "head_dim": 128, "n_heads": 32, "n_kv_heads": 8,
            "sliding_window": None, "dtype": "bfloat16",
        },
        device={"type": "cuda", "name": "NVIDIA H200", "capability": "9.0"},
        versions={"torch": "2.11.0", "triton": "3.6.0"},
        flags={"mode": "train", "compile": False, "sdp_enabled": ["flash", "math"]},
        dist={"world_size": 2, "launcher": "torchrun", "agree": True, "digests": ["…"]},
    )  # fmt: skip


def test_the_banner_word_for_word(record) -> None:
    text = report.banner(
        record, Path("/home/me/registry.jsonl"), "one forward launch a layer and micro-batch"
    )
    assert text == GOLDEN


def test_the_banner_never_grows_over_fifteen_lines(record, make_record) -> None:
    reports = [{"name": f"b{i}", "available": False, "reason": "r" * 999} for i in range(20)]
    changed = {**record.as_row(), "attention_candidates": reports}
    long = make_record(**changed)
    lines = report.banner(long, Path("r"), "x").splitlines()
    assert len(lines) == report.BANNER_LINES == 15
    assert max(map(len, lines)) <= 200
    (rest,) = [line for line in lines if "hf-attn doctor" in line]
    assert rest.startswith("attention_refused=b2, b3, ")
    assert all(line.partition("=")[0].isidentifier() for line in lines)


def test_nothing_requested_is_said(make_record) -> None:
    text = report.banner(make_record(attention_requested=None), Path("r"), "x")
    assert text.startswith("attention_backend=sdpa (nothing requested; cpu None)")
    other = report.banner(make_record(attention_requested="SDPA"), Path("r"), "x")
    assert other.startswith("attention_backend=sdpa (requested SDPA by argument; ")


@pytest.mark.parametrize("verdict", ["matched", "not_observed", "mismatch"])
def test_only_a_mismatch_is_loud(make_record, verdict: str) -> None:
    executed = {"reason": "because"}
    text = report.verdict_text(make_record(attention_verdict=verdict, attention_executed=executed))
    assert f"attention_verdict={verdict} (because)" in text
    assert ("!!!!" in text) == (verdict == "mismatch")


def test_a_table_takes_no_markup_and_prints_plainly_to_a_file() -> None:
    stream = io.StringIO()
    report.show(report.table(("a", "b"), [("[red]x[/]", None)], title="t"), stream=stream)
    text = stream.getvalue()
    assert "[red]x[/]" in text
    assert "\x1b" not in text


@pytest.fixture
def recorded(make_record):
    counts = {"backend": "sdpa", "variant": "torch", "call_class": "c", "launches": 3}
    rows = [{**counts, "phase": "forward"}, {**counts, "phase": "backward"}]
    executed = {"reason": "because", "by_rank": [rows, rows]}
    registry.append(make_record(run_id="aaaa-1"))
    end = {"event": "end", "seq": 1, "attention_verdict": "matched"}
    registry.append(make_record(run_id="aaaa-1", attention_executed=executed, **end))
    registry.append(make_record(run_id="aabb-2"))
    return registry.registry_path()


def test_runs_lists_every_attempt(recorded: Path, capsys) -> None:
    assert cli.main(["runs"]) == 0
    out = capsys.readouterr().out
    assert str(recorded) in out.replace("\n", "")
    lines = [line.split() for line in out.splitlines()]
    assert [line[0] for line in lines if line[1:2] == ["1"]] == ["aaaa-1", "aabb-2"]
    assert any(line[-3:] == ["matched", "6", "finished"] for line in lines)
    assert any(line[-3:] == ["not_observed", "-", "running"] for line in lines)


def test_runs_json(recorded: Path, capsys) -> None:
    assert cli.main(["runs", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["status"] for each in found["attempts"]] == ["finished", "running"]
    assert found["attempts"][0]["forward_launches"] == 6
    assert cli.main(["runs", "--json", "aaaa"]) == 0
    assert [row["event"] for row in json.loads(capsys.readouterr().out)] == ["launch", "end"]


def test_one_run_is_shown_by_the_start_of_its_id(recorded: Path, capsys) -> None:
    assert cli.main(["runs", "aaaa"]) == 0
    out = capsys.readouterr().out
    assert "run aaaa-1, attempt 1" in out
    assert "in torch" in out
    assert cli.main(["runs", "aa"]) == 1
    assert "2 runs begin with it: aaaa-1, aabb-2" in capsys.readouterr().err
    assert cli.main(["runs", "zz"]) == 1


def test_runs_verify(recorded: Path, capsys) -> None:
    assert cli.main(["runs", "--verify"]) == 0
    assert "3 rows, sound" in capsys.readouterr().out
    recorded.write_bytes(recorded.read_bytes().replace(b'"attempt":1', b'"attempt":2', 1))
    assert cli.main(["runs", "--verify", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["ok"]
    assert found["problems"][0].startswith("line 1: its bytes do not give its sha256")
    assert cli.main(["runs"]) == 1
    assert "cannot be trusted" in capsys.readouterr().err


def test_runs_of_an_output_directory_and_of_nothing(
    recorded: Path, tmp_path: Path, make_record, capsys
) -> None:
    registry.append(make_record(run_id="copy"), paths=[tmp_path / registry.COPY_NAME])
    assert cli.main(["runs", "--registry", str(tmp_path)]) == 0
    assert "copy" in capsys.readouterr().out
    assert cli.main(["runs", "--registry", str(tmp_path / "none")]) == 1
    recorded.unlink()
    assert cli.main(["runs"]) == 0
    assert "no runs yet" in capsys.readouterr().out
