"""Spellings of a backend, and the error for a name that is none."""

from __future__ import annotations

import pytest

from hf_attn_backends.backends.names import parse, unknown
from hf_attn_backends.errors import SelectionError


@pytest.mark.parametrize(
    ("asked", "plain", "paged", "hub"),
    [
        ("sdpa", "sdpa", False, False),
        ("SDPA", "sdpa", False, False),
        ("Triton-FA2", "triton_fa2", False, False),
        ("flash-attention-2", "flash_attention_2", False, False),
        ("paged|sdpa", "sdpa", True, False),
        ("flashmla", "flashmla", False, False),
        ("Flash_MLA", "flashmla", False, False),
        ("flash-mla", "flashmla", False, False),
        ("paged|FlashMLA", "flashmla", True, False),
        ("kernels-community/flash-mla", "flashmla", False, True),
        ("kernels-community/flash-mla@v1:flash_mla_fn", "flashmla", False, True),
        ("deepseek-ai/FlashMLA", "flashmla", False, True),
        ("paged|kernels-community/flash_mla@main", "flashmla", True, True),
        ("kernels-community/flash-attn2", "kernels-community/flash-attn2", False, True),
        ("my_own", "my_own", False, False),
        (" sdpa ", "sdpa", False, False),
    ],
)
def test_a_request_is_taken_apart(asked, plain, paged, hub):
    name = parse(asked)
    assert (name.asked, name.plain, name.paged, name.hub) == (asked, plain, paged, hub)


def test_an_unknown_name_lists_the_known_ones_and_the_nearest():
    error = unknown("tritn_fa2", "environment")
    assert isinstance(error, SelectionError)
    assert isinstance(error, RuntimeError)
    assert isinstance(error, ValueError)
    text = str(error)
    assert text.startswith("unknown backend 'tritn_fa2' (from the environment)")
    assert "did you mean 'triton_fa2'?" in text
    assert "flex_attention" in text
    assert "did you mean" not in str(unknown("qqqqqqqq", "argument"))
