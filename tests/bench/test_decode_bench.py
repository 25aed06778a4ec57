"""`hf-attn bench --decode`: the pure parts on a CPU, one small shape on a GPU."""

from __future__ import annotations

import argparse
import json

import pytest
import torch

from hf_attn_backends.bench import command, decode, decode_arms, decode_command
from hf_attn_backends.errors import BenchmarkError


def test_every_call_finds_its_keys_out_of_the_cache():
    for batch, keys in decode.SHAPES:
        buffers, calls = decode.buffers_and_calls(batch, keys)
        assert calls >= buffers >= 2
        assert calls % buffers == 0
        touched = buffers * decode.kv_bytes(batch, keys)
        assert touched >= 250e6  # four times the L2 cache of an H200
        assert touched < 20e9


def test_bytes_are_those_of_keys_and_values():
    assert decode.kv_bytes(2, 1000) == 2 * (2 * 8 * 1000 * 128) * 2


def make(keys=50, batch=2, group=4):
    torch.manual_seed(0)
    query = torch.randn(batch, 2 * group, 1, 16)
    return query, torch.randn(batch, 2, keys, 16), torch.randn(batch, 2, keys, 16)


def test_right_results_are_within_the_budget_and_wrong_ones_are_not():
    query, key, value = make()
    exact, size = decode_arms.oracle(query, key, value)
    budget = decode_arms.budget_of(query, key, value, exact, size)
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    assert decode_arms.error_of(out, exact) <= budget
    shifted = torch.nn.functional.scaled_dot_product_attention(
        query, key[:, :, 1:], value[:, :, 1:], enable_gqa=True
    )
    assert decode_arms.error_of(shifted, exact) > 100 * budget
    out[0, 0, 0, 0] = float("nan")
    assert decode_arms.error_of(out, exact) == float("inf")


def test_an_arm_that_does_not_exist():
    with pytest.raises(BenchmarkError, match="arm must be one of triton_fa2, FLASH_ATTENTION"):
        decode_arms.check_name("volta")


def test_rows_have_a_number_or_a_reason():
    good = decode._row(8, 4096, "a", {"a": [30.0, 20.0, 40.0]}, {"a": 1e-4}, {})
    assert (good.us, good.low_us, good.high_us) == (30.0, 20.0, 40.0)
    assert good.tb_per_s == pytest.approx(decode.kv_bytes(8, 4096) / 30e-6 / 1e12)
    assert "30.00 us" in decode_command.line(good)
    bad = decode._row(8, 4096, "b", {}, {"b": float("inf")}, {"b": "wrong: error inf"})
    assert bad.us is None
    assert bad.error is None  # strict JSON has no infinity
    assert "NaN: wrong: error inf" in decode_command.line(bad)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    with pytest.raises(BenchmarkError, match="torch sees no CUDA device"):
        decode.measure()


@pytest.mark.gpu
def test_a_small_shape(tmp_path, capsys):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    path = tmp_path / "decode.json"
    words = ["--decode", "--shapes", "2x2048", "--names", "triton_fa2,FLASH_ATTENTION,volta"]
    with pytest.raises(BenchmarkError, match="volta"):
        command.run(parser.parse_args(words))
    words[-1] = "triton_fa2,FLASH_ATTENTION"
    assert command.run(parser.parse_args([*words, "--json", str(path)])) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["arm"] for row in rows] == ["triton_fa2", "FLASH_ATTENTION"]
    assert all(1 < row["us"] < 1000 and row["error"] < 1e-2 for row in rows)
