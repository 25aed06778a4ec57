"""Comparison of runs: figures by hand, verdicts in both directions, what cannot be compared."""

from __future__ import annotations

import json
import math
import random

import compare_runs
import pytest
from noise_floor import ROUNDING, judge_by_floor
from run_comparison import compare
from run_files import Run, load_run, obstacles
from student import two_sided_quantile, two_sided_share


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


def test_figures_are_the_hand_worked_ones(make_run):
    """Floor losses 10 - step, +-0.01 and +-0.02 in turn: mean 0, standard deviation 0.01 a step."""
    floor = [load_run(make_run(f"f{w}", wiggle=w / 100)) for w in (-1, 0, 1)]
    off = load_run(make_run("off", shift=0.03, steps=4))
    judged = judge_by_floor(off, floor)
    one_more = math.sqrt(1 + 1 / 3)
    assert judged.figures["loss step"] == pytest.approx(0.03 / (0.01 * one_more), rel=1e-3)
    # the last quarter is the last step; over all steps the wiggles cancel, but for rounding
    assert judged.figures["loss end"] == pytest.approx(0.03 / (0.01 * one_more), rel=1e-3)
    assert judged.figures["loss whole"] > 1e3
    assert judged.figures["grad_norm step"] == pytest.approx(0.0, abs=1e-3)
    assert judged.limit == pytest.approx(two_sided_quantile(0.05 / 8, 2))
    assert judged.drift
    assert "loss whole" in judged.text


@pytest.mark.parametrize(
    ("freedom", "share", "t"),  # from printed tables
    [(1, 0.05, 12.706), (2, 0.05, 4.303), (3, 0.01, 5.841), (4, 0.05, 2.776), (5, 0.01, 4.032)],
)
def test_quantiles_are_the_tabulated_ones(freedom, share, t):
    assert two_sided_quantile(share, freedom) == pytest.approx(t, abs=5e-4)
    assert two_sided_share(t, freedom) == pytest.approx(share, rel=2e-3)


def noisy(generator, name, *, steps=40, shift=0.0, slope=0.0):
    """A run whose noise grows and hangs together, as training's does: 1e-4, then 1e-2."""
    series = {}
    for key, scale in (("loss", 10.0), ("grad_norm", 3.0)):
        wander, values = 0.0, []
        for step in range(steps):
            wander = 0.9 * wander + generator.gauss(0, 1e-4 * (1 + step))
            values.append(scale + wander + (shift + slope * step) * 1e-4)
        series[key] = tuple(values)
    return Run(name, {}, tuple(range(1, steps + 1)), series)


@pytest.mark.parametrize("size", [3, 4, 6])
def test_one_more_of_their_kind_is_called_drift_at_most_at_the_stated_rate(size):
    generator = random.Random(size)
    trials, level = 400, 0.2
    drifts = sum(
        judge_by_floor(
            noisy(generator, "one more"), [noisy(generator, "sdpa") for _ in range(size)], level
        ).drift
        for _ in range(trials)
    )
    # three standard errors of 400 trials at one in five: 0.06
    assert 0 < drifts / trials <= level + 0.06


@pytest.mark.parametrize("fault", [{"shift": 1000.0}, {"slope": 60.0}])
def test_what_is_not_of_their_kind_is_called_drift(fault):
    generator = random.Random(7)
    for _ in range(40):
        floor = [noisy(generator, "sdpa") for _ in range(6)]
        assert judge_by_floor(noisy(generator, "faulty", **fault), floor).drift


def test_verdicts_of_the_command_in_both_directions(make_run, capsys):
    base, near = make_run("base"), make_run("near", wiggle=-0.015)
    floor = [str(make_run(n, wiggle=w)) for n, w in (("x", 0.01), ("y", -0.01), ("z", 0.02))]
    assert compare_runs.main([str(base), str(near), "--floor", *floor]) == 0
    said = capsys.readouterr().out
    assert "no drift beyond the floor: at most" in said
    assert "off the mean of 4 runs; one more of these stays within 6.9 in all but 5%" in said
    assert "widest of the floor: 3.000e-02, 3.000e-02" in said
    far = str(make_run("far", wiggle=0.5))
    assert compare_runs.main([str(base), str(near), far, "--floor", *floor]) == 1
    said = capsys.readouterr().out
    assert said.count("no drift beyond the floor") == 1
    assert "verdict: DRIFT beyond the floor: loss step" in said
    # at a level that allows nothing to drift, nothing does
    assert compare_runs.main([str(base), far, "--floor", *floor, "--level", "1e-9"]) == 0


def test_a_floor_too_small_or_broken_or_a_level_out_of_range_is_refused(make_run, capsys):
    base, other, x, y = (
        str(make_run(n, wiggle=w)) for n, w in (("b", 0), ("o", 0), ("x", 0.1), ("y", 0.2))
    )
    assert compare_runs.main([base, other, "--floor", x]) == 2
    assert "at least 3 runs (the first is one), got 2" in capsys.readouterr().err
    assert compare_runs.main([base, other, "--floor", x, x]) == 2  # the same run is one draw
    assert compare_runs.main([base, other, "--floor", x, y, "--level", "1"]) == 2
    assert "level must lie between 0 and 1, got 1.0" in capsys.readouterr().err
    broken = make_run("broken")
    content = json.loads((broken / "losses.json").read_text())
    content["steps"][2]["grad_norm"] = None
    (broken / "losses.json").write_text(json.dumps(content))
    assert compare_runs.main([base, other, "--floor", x, str(broken)]) == 2
    assert "its grad_norm is not finite" in capsys.readouterr().err


def test_rounding_over_a_floor_without_spread_is_no_drift_and_more_is(make_run):
    base, x, y = (str(make_run(n)) for n in "bxy")
    floor = ["--floor", x, y]
    assert compare_runs.main([base, str(make_run("same")), *floor]) == 0
    one = ROUNDING * 6  # of the last, smallest loss; the gradient norms stay equal
    assert compare_runs.main([base, str(make_run("near", shift=2 * one)), *floor]) == 0
    assert compare_runs.main([base, str(make_run("far", shift=30 * one)), *floor]) == 1


def test_without_a_floor_typed_limits_and_the_advice(make_run, capsys):
    base = make_run("base")
    assert compare_runs.main([str(base), str(make_run("near", wiggle=5e-4))]) == 0
    assert "no drift by typed limits" in capsys.readouterr().out
    assert compare_runs.main([str(base), str(make_run("far", shift=2e-3))]) == 1
    assert "--floor measures them" in capsys.readouterr().out
    bf16 = {"training": {"bf16": True}}
    pair = [str(make_run("c", **bf16)), str(make_run("d", shift=2e-3, **bf16))]
    assert compare_runs.main(pair) == 0


def test_a_loss_that_is_not_finite_is_drift(make_run, capsys):
    base, broken = make_run("base"), make_run("broken")
    content = json.loads((broken / "losses.json").read_text())
    content["steps"][2]["loss"] = None
    (broken / "losses.json").write_text(json.dumps(content))
    assert compare_runs.main([str(base), str(broken)]) == 1
    assert math.isnan(compare(load_run(base), load_run(broken)).series["loss"].max_abs)
    floor = ["--floor", str(make_run("x", wiggle=-1.0)), str(make_run("y", wiggle=1.0))]
    assert compare_runs.main([str(base), str(broken), *floor]) == 1
    assert "loss step inf" in capsys.readouterr().out


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
    assert [pair["runs"] for pair in content["floor"]] == [
        ["base (sdpa)", "x (sdpa:flash)"],
        ["base (sdpa)", "y (sdpa:math)"],
        ["x (sdpa:flash)", "y (sdpa:math)"],
    ]
    assert set(row["standard_deviations"]) == {
        f"{series} {figure}"
        for series in ("loss", "grad_norm")
        for figure in ("step", "whole", "end")
    }
    assert row["drift"] is False
    assert picture.read_bytes().startswith(b"\x89PNG")
