"""The pure parts of scripts/host_cost.py; what it measures needs a GPU."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "host_cost.py"


@pytest.fixture
def host_cost(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location("host_cost", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_cpu_is_the_one_that_the_system_names(host_cost):
    text = "processor\t: 0\nmodel\t\t: 143\nmodel name\t: A Fast One @ 2.0GHz\nflags\t: fpu\n"
    assert host_cost.cpu_model(text) == "A Fast One @ 2.0GHz"
    assert host_cost.cpu_model("model\t: 143\n").startswith("unknown: ")


def test_host_facts_are_numbers(host_cost):
    facts = host_cost.host_facts()
    assert facts["cpus"] >= 1
    assert len(facts["load_average"]) == 3
    assert all(load >= 0 for load in facts["load_average"])


def test_measure_makes_every_call_and_tells_a_slow_one_from_a_fast_one(host_cost):
    made = {"fast": 0, "slow": 0}
    waited = []

    def fast():
        made["fast"] += 1

    def slow():
        made["slow"] += 1
        time.sleep(0.002)

    found = host_cost.measure(
        {"fast": fast, "slow": slow}, lambda: waited.append(dict(made)), repeat=3, rounds=2
    )
    assert made == {"fast": 9, "slow": 9}  # a round that is not counted, and two
    assert found["slow"] >= 2000 > found["fast"]
    assert waited[1] == {"fast": 3, "slow": 0}  # it waits before each, so calls come in rows


def test_the_adapter_alone_is_without_the_stand_in_and_with_the_witness(host_cost):
    found = {
        "adapter over a stand-in, causal": 7.0,
        "adapter over a stand-in, dense mask": 9.0,
        "stand-in": 0.5,
        "witness": 0.75,
    }
    assert host_cost.derived(found) == {
        "adapter, coverage and witness, causal": 7.25,
        "adapter, coverage and witness, dense mask": 9.25,
    }


def test_without_a_gpu_it_says_so(host_cost, monkeypatch, capsys):
    monkeypatch.setattr(host_cost.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        host_cost.main([])
    assert "torch sees none" in capsys.readouterr().err
