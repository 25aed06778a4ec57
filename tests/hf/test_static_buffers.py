"""Buffers that are written to in place, where a step must not see what an earlier one found.

Serving loops keep position ids, lengths and masks in buffers of fixed addresses: under
`torch.inference_mode` a tensor counts no versions, and a captured CUDA graph must hold the kernels
that read the buffers, not what the warm-up read.
"""

from __future__ import annotations

import pytest
import torch

from hf_attn_backends.hf import custom_masks, memo, packing


def _rows(*lengths):
    """Causal intervals `[1, M, 2]` of samples laid end to end."""
    ends = torch.arange(1, sum(lengths) + 1, dtype=torch.int32)
    starts = torch.repeat_interleave(
        torch.tensor(lengths).cumsum(0) - torch.tensor(lengths), torch.tensor(lengths)
    )
    return torch.stack([starts.to(torch.int32), ends], dim=-1)[None]


def _positions(*lengths):
    return torch.cat([torch.arange(n) for n in lengths])[None]


def _bounds(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def _of_lengths(bounds, total):
    return packing.rows_of_lengths(bounds, None, 1, total, total, True, None)


@pytest.fixture(params=["inference", "no_grad"])
def mode(request):
    """Both ways to run without gradients; only inference tensors have no version."""
    with torch.inference_mode() if request.param == "inference" else torch.no_grad():
        yield request.param


def test_lengths_in_a_buffer(mode):
    buffer = _bounds(3, 4)
    assert buffer.is_inference() == (mode == "inference")
    assert torch.equal(_of_lengths(buffer, 7), _rows(3, 4))
    buffer.copy_(_bounds(5, 2))
    assert torch.equal(_of_lengths(buffer, 7), _rows(5, 2))


def test_the_other_lengths_in_a_buffer(mode):
    """The queries' lengths stay, the keys' grow: decoding of packed samples."""
    queries, keys = _bounds(1, 1), _bounds(3, 4)
    steps = []
    for grown in ((3, 4), (4, 4)):
        keys.copy_(_bounds(*grown))
        steps.append(packing.rows_of_lengths(queries, keys, 1, 2, 8, True, None).tolist())
    assert steps == [[[[0, 3], [3, 7]]], [[[0, 4], [4, 8]]]]


def test_position_ids_in_a_buffer(mode):
    buffer = _positions(7)
    assert packing.rows_of_positions(buffer, 1, 7, 7, None) is None
    buffer.copy_(_positions(3, 4))
    assert torch.equal(packing.rows_of_positions(buffer, 1, 7, 7, None), _rows(3, 4))
    buffer.copy_(_positions(5, 2))
    assert torch.equal(packing.rows_of_positions(buffer, 1, 7, 7, None), _rows(5, 2))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_a_mask_in_a_buffer(mode, kind, rows):
    def written(end):
        seen = torch.arange(6)[None, None, None, :] < end + torch.arange(rows)[None, None, :, None]
        return seen if kind == "bool" else torch.where(seen, 0.0, -torch.inf)

    buffer = written(2).clone()
    for end in (2, 3, 4):
        buffer.copy_(written(end))
        read = custom_masks.visibility_of(buffer, rows, 6)
        if read.intervals is not None:
            assert read.intervals[0, :, 1].tolist() == [end + i for i in range(rows)]
        else:
            assert read.dense.sum(-1).flatten().tolist() == [end + i for i in range(rows)]


@pytest.fixture
def capture(monkeypatch):
    """Make it look as if a CUDA graph were being captured."""

    def begin():
        for module in (packing, custom_masks):
            monkeypatch.setattr(module, "is_tracing", lambda tensor=None: True)
        monkeypatch.setattr(memo.TensorMemo, "of", lambda self, tensor: {})

    return begin


@pytest.mark.gpu
def test_a_memo_gives_nothing_to_a_capture():
    kept, ids = memo.TensorMemo(), torch.arange(4, device="cuda")
    kept.of(ids)["x"] = 1
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert kept.of(ids) == {}
    assert kept.of(ids) == {"x": 1}


def test_a_capture_reads_position_ids_itself(capture):
    buffer = _positions(7)
    assert packing.rows_of_positions(buffer, 1, 7, 7, None) is None  # the warm-up: nothing packed
    capture()
    rows = packing.rows_of_positions(buffer, 1, 7, 7, None)
    assert torch.equal(rows, _rows(7))


def test_a_capture_reads_lengths_itself(capture):
    buffer = _bounds(3, 4)
    warm = _of_lengths(buffer, 7)
    assert _of_lengths(buffer, 7) is warm
    capture()
    first, second = _of_lengths(buffer, 7), _of_lengths(buffer, 7)
    assert first is not warm
    assert second is not first  # another capture may be under way
    assert torch.equal(first, warm)


def test_a_capture_reads_the_mask_itself(capture):
    buffer = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    assert custom_masks.visibility_of(buffer, 5, 5).intervals is not None
    capture()
    read = custom_masks.visibility_of(buffer, 5, 5)
    assert read.dense is not None
    assert read.dense.data_ptr() == buffer.data_ptr()


def test_nothing_is_read_twice_where_writing_can_be_seen():
    ids, lengths = _positions(3, 4), _bounds(3, 4)
    found = packing.rows_of_positions(ids, 1, 7, 7, None)
    assert packing.rows_of_positions(ids, 1, 7, 7, None) is found
    assert _of_lengths(lengths, 7) is _of_lengths(lengths, 7)
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    assert custom_masks.visibility_of(mask, 5, 5) is custom_masks.visibility_of(mask, 5, 5)
