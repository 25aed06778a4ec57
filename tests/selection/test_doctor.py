"""`hf-attn doctor`: the table, JSON, exit codes, a model's dimensions."""

from __future__ import annotations

import json

import pytest

from hf_attn_backends.cli import main
from hf_attn_backends.selection import ALL_BACKENDS


def doctor(capsys, *arguments):
    code = main(["doctor", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_table_shows_each_backend_every_reason_and_the_fix(capsys, gate_dir):
    code, out, _ = doctor(capsys, "--device", "cpu", "--gate-dir", gate_dir)
    assert code == 0
    assert all(name in out for name in ALL_BACKENDS)
    assert "flash_attention_2 runs on cuda" in out
    assert "needs the package flash_attn," in out
    assert "to fix it: hf-attn gate --device cpu" in out


@pytest.mark.parametrize(
    ("names", "code"),
    [(["sdpa"], 0), (["sdpa", "Eager"], 0), (["triton_fa2"], 1), (["sdpa", "flash-mla"], 1)],
)
def test_exit_code_1_if_a_named_one_would_be_refused(names, code, capsys, gate_dir):
    assert doctor(capsys, *names, "--device", "cpu", "--gate-dir", gate_dir)[0] == code


def test_a_written_gate_turns_the_verdict(capsys, gate_dir, write_gate):
    write_gate()
    assert doctor(capsys, "triton_fa2", "--device", "cpu", "--gate-dir", gate_dir)[0] == 0


def test_json_has_every_field(capsys, gate_dir):
    code, out, _ = doctor(capsys, "--json", "--device", "cpu", "--gate-dir", gate_dir)
    assert code == 0
    document = json.loads(out)
    assert document["device"] == "cpu"
    rows = {row["name"]: row for row in document["backends"]}
    assert set(ALL_BACKENDS) <= set(rows)
    assert rows["sdpa"]["available"] is True
    assert rows["triton_fa2"]["fix"].startswith("hf-attn gate")
    assert len(rows["flash_attention_2"]["refusals"]) == 2


def test_a_models_dimensions_count(capsys, tmp_path, gate_dir, write_gate):
    transformers = pytest.importorskip("transformers")
    write_gate("float32/d64/causal")
    config = transformers.MistralConfig(
        head_dim=112, num_attention_heads=4, num_key_value_heads=2, hidden_size=64
    )
    config.save_pretrained(tmp_path / "model")
    arguments = ("--device", "cpu", "--gate-dir", gate_dir, "--model", tmp_path / "model")
    code, out, _ = doctor(capsys, "triton_fa2", *arguments)
    assert code == 1
    assert "head_dim 112" in out
    assert "hf-attn gate --device cpu --head-dim 112" in out
    assert "4 query heads over 2" in out


def test_what_does_not_exist_is_an_error_on_stderr(capsys, tmp_path):
    code, out, err = doctor(capsys, "tritn_fa2")
    assert (code, out) == (1, "")
    assert "unknown backend 'tritn_fa2'" in err
    code, _, err = doctor(capsys, "--model", tmp_path / "nothing")
    assert code == 1
    assert f"there is no folder {tmp_path / 'nothing'}" in err
    (tmp_path / "config.json").write_text("{")
    code, _, err = doctor(capsys, "--model", tmp_path)
    assert code == 1
    assert "no configuration can be read" in err
    code, out, err = doctor(capsys, "--device", "nonsense")
    assert (code, out) == (1, "")
    assert "device must be one that torch knows, such as cpu or cuda:0, got 'nonsense'" in err


def test_auto_is_no_backend_and_never_refused(capsys, gate_dir):
    code, out, _ = doctor(capsys, "auto", "--device", "cpu", "--gate-dir", gate_dir)
    assert code == 0
    assert "every call is dispatched" in out
    code, out, _ = doctor(capsys, "auto", "--device", "cpu", "--json")
    assert json.loads(out)["backends"][0]["available"] is True


def test_the_matrix_is_markdown(capsys):
    code, out, _ = doctor(capsys, "--matrix")
    assert code == 0
    assert out.splitlines()[0].startswith("| backend | devices |")
