"""The benchmark's figure."""

from __future__ import annotations

import json

import plot_bench


def _rows():
    for phase in ("forward", "backward"):
        for arm, tflops in (
            ("FLASH_ATTENTION", 300.0),
            ("triton_fa2:hopper", 600.0),
            ("MATH", None),
        ):
            yield {
                "shape": "4x512", "arm": arm, "phase": phase, "mode": "graph", "tflops": tflops,
                "heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16", "causal": True,
            }  # fmt: skip


def _file(tmp_path):
    content = {
        "rows": list(_rows()),
        "device": {"name": "a device"},
        "versions": {"torch": "2", "triton": "3"},
    }
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(content))
    return path


def test_a_png_is_written(tmp_path):
    picture = tmp_path / "deep" / "x.png"
    assert plot_bench.main([str(_file(tmp_path)), str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_mode_without_times_and_a_missing_file_are_refused(tmp_path, capsys):
    assert plot_bench.main([str(_file(tmp_path)), str(tmp_path / "x.png"), "--mode", "wall"]) == 1
    assert "no times of mode 'wall' in the file; it has graph" in capsys.readouterr().err
    assert plot_bench.main([str(tmp_path / "absent.json"), str(tmp_path / "x.png")]) == 1
