"""Visibility: its three forms say the same."""

import pytest
import torch

from hf_attn_backends.errors import InvalidCallError
from hf_attn_backends.kernels.visibility import (
    CAUSAL,
    Visibility,
    intervals_from_dense,
    intervals_of,
)

CPU = torch.device("cpu")


def test_causal_is_aligned_to_the_last_key():
    assert intervals_of(CAUSAL, 2, 5, CPU).tolist() == [[[0, 4], [0, 5]]]


def test_causal_with_more_queries_than_keys_hides_the_first_rows():
    assert intervals_of(CAUSAL, 4, 2, CPU).tolist() == [[[0, 0], [0, 0], [0, 1], [0, 2]]]


def test_a_window_counts_the_row_itself():
    window = Visibility(causal=True, window=2)
    assert intervals_of(window, 4, 4, CPU).tolist() == [[[0, 1], [0, 2], [1, 3], [2, 4]]]


def test_dense_masks_are_read_back_as_intervals():
    mask = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)[None, None]
    assert intervals_from_dense(mask).tolist() == [[[1, 3], [0, 0], [0, 4]]]


def test_rows_with_holes_are_no_intervals():
    mask = torch.tensor([[1, 0, 1]], dtype=torch.bool)[None, None]
    assert intervals_from_dense(mask) is None


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"window": 3}, "window must come with causal"),
        ({"causal": True, "window": 0}, "window must be at least 1 key, got 0"),
        ({"causal": True, "dense": torch.ones(1, 1, 2, 2, dtype=torch.bool)}, "must be one of"),
    ],
)
def test_contradictions_are_refused(arguments, text):
    with pytest.raises(InvalidCallError, match=text):
        Visibility(**arguments)
