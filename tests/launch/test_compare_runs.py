"""Comparison of runs: figures by hand, verdicts in both directions, what cannot be compared."""

from __future__ import annotations

import json
import math

import compare_runs
import pytest
from run_comparison import ROUNDING, compare, floor_of, judge_by_floor
from run_files import load_run, obstacles


def test_differences_are_the_hand_worked_ones(make_run):
    first, second = load_run(make_run("a")), load_run(make_run("b", shift=0.5, wiggle=0.25))
    found = compare(first, second).series["loss"]
    # shifts by step 1..4: 0.25, 0.75, 0.25, 0.75
    assert found.max_abs == pytest.approx(0.75)
    assert found.mean_abs == found.mean == pytest.approx(0.5)
    assert found.scale == pytest.approx((9 + 8 + 7 + 6) / 4)
    assert (found.last_first, found.last_second) == (pytest.approx(6.0), pytest.approx(6.75))
    back = compare(second, first).series["loss"]
    assert back.mean == pytest.approx(-0.5)
    norm = compare(first, second).series["grad_norm"]
    assert norm.max_abs == pytest.approx(2.5)
    assert norm.mean == pytest.approx(0.0)


def test_no_drift_within_the_floor_and_drift_beyond_it(make_run, capsys):
    base, x, y = make_run("base"), make_run("x", kernel="flash"), make_run("y", wiggle=0.01)
    near, far = make_run("near", wiggle=-0.015), make_run("far", wiggle=0.021)
    floor = ["--floor", str(x), str(y)]
    assert compare_runs.main([str(base), str(near), *floor]) == 0
    assert (
        "no drift beyond the floor (at most 75% of 2x the floor + rounding)"
        in capsys.readouterr().out
    )
    assert compare_runs.main([str(base), str(far), *floor]) == 1
    said = capsys.readouterr().out
    assert "DRIFT beyond the floor: loss max |d| is 2.100e-02, 2.10x" in said
    assert compare_runs.main([str(base), str(near), str(far), *floor]) == 1
    assert compare_runs.main([str(base), str(far), *floor, "--factor", "3"]) == 0


def test_a_systematic_shift_of_the_floors_size_is_caught_by_its_mean(make_run):
    base, x, y = (load_run(make_run(n, wiggle=w)) for n, w in (("b", 0), ("x", 0), ("y", 0.01)))
    limits = floor_of([compare(x, y)])
    shifted = load_run(make_run("s", shift=0.021))
    judged = judge_by_floor(compare(base, shifted), limits, factor=2.0)
    assert judged.drift
    assert "|mean d|" in judged.text


def test_the_floor_is_the_largest_of_its_pairs(make_run):
    runs = {n: load_run(make_run(n, wiggle=w)) for n, w in (("x", 0), ("y", 0.01), ("z", 0.03))}
    pairs = [compare(runs["x"], runs["y"]), compare(runs["x"], runs["z"])]
    assert floor_of(pairs)["loss"].max_abs == pytest.approx(0.03)


def test_rounding_over_a_floor_of_zero_is_no_drift_and_more_is(make_run):
    base, x, y = (str(make_run(n)) for n in "bxy")
    floor = ["--floor", x, y]
    band = ROUNDING * 7.5  # the mean loss; gradient norms differ by ten times, of a mean of 2
    assert compare_runs.main([base, str(make_run("near", wiggle=0.02 * band)), *floor]) == 0
    assert compare_runs.main([base, str(make_run("far", shift=1.1 * band)), *floor]) == 1


def test_identical_runs_over_an_identical_floor_do_not_drift(make_run):
    paths = [str(make_run(n)) for n in "abxy"]
    assert compare_runs.main([paths[0], paths[1], "--floor", *paths[2:]]) == 0


def test_without_a_floor_typed_limits_and_the_advice(make_run, capsys):
    base = make_run("base")
    assert compare_runs.main([str(base), str(make_run("near", wiggle=5e-4))]) == 0
    assert "no drift by typed limits" in capsys.readouterr().out
    assert compare_runs.main([str(base), str(make_run("far", shift=2e-3))]) == 1
    assert "--floor X Y measures them" in capsys.readouterr().out
    bf16 = {"training": {"bf16": True}}
    pair = [str(make_run("c", **bf16)), str(make_run("d", shift=2e-3, **bf16))]
    assert compare_runs.main(pair) == 0


def test_a_loss_that_is_not_finite_is_drift(make_run):
    base, broken = make_run("base"), make_run("broken")
    content = json.loads((broken / "losses.json").read_text())
    content["steps"][2]["loss"] = None
    (broken / "losses.json").write_text(json.dumps(content))
    assert compare_runs.main([str(base), str(broken)]) == 1
    assert math.isnan(compare(load_run(base), load_run(broken)).series["loss"].max_abs)
    floor = ["--floor", str(make_run("x")), str(make_run("y", wiggle=1.0))]
    assert compare_runs.main([str(base), str(broken), *floor]) == 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"corpus": {"sha256": "other"}}, "corpus.sha256 differs: c and other"),
        ({"training": {"seed": 1}}, "training.seed differs: 0 and 1"),
        ({"device": {"name": "another"}}, "device.name differs"),
        ({"steps": 3}, "the logged steps differ: 4 and 3"),
    ],
)
def test_runs_that_are_no_comparison_of_attention_are_refused(make_run, capsys, change, says):
    paths = [str(make_run("a")), str(make_run("b", **change))]
    assert compare_runs.main(paths) == 2
    said = capsys.readouterr().err
    assert "cannot be compared" in said
    assert says in said
    assert not obstacles(load_run(make_run("c")), load_run(make_run("d", backend="triton_fa2")))


def test_missing_and_foreign_files_are_refused(make_run, tmp_path, capsys):
    good = str(make_run("a"))
    assert compare_runs.main([good, str(tmp_path / "absent")]) == 2
    for text in ("{", "[]", '{"schema_version": 9}'):
        (tmp_path / "losses.json").write_text(text)
        assert compare_runs.main([good, str(tmp_path)]) == 2
    assert "schema_version 1, got 9" in capsys.readouterr().err


def test_json_and_plot_are_written(make_run, tmp_path):
    base, other = make_run("base"), make_run("b", wiggle=0.01, backend="triton_fa2")
    x, y = make_run("x", kernel="flash"), make_run("y", wiggle=0.01, kernel="math")
    figures, picture = tmp_path / "f.json", tmp_path / "deep" / "f.png"
    words = [str(base), str(other), "--floor", str(x), str(y)]
    assert compare_runs.main([*words, "--json", str(figures), "--plot", str(picture)]) == 0
    content = json.loads(figures.read_text())
    (row,) = content["comparisons"]
    assert row["runs"] == ["base (sdpa)", "b (triton_fa2)"]
    assert row["loss"]["max_abs"] == pytest.approx(0.01)
    assert content["floor"][0]["runs"] == ["x (sdpa:flash)", "y (sdpa:math)"]
    assert picture.read_bytes().startswith(b"\x89PNG")
