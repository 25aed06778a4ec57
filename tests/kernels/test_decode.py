"""The decode kernels against the fp64 oracle: through the interpreter, or on the GPU."""

import math

import pytest
import torch

from hf_attn_backends.errors import InvalidCallError
from hf_attn_backends.kernels.visibility import CAUSAL, FULL, Visibility
from hf_attn_backends.reference import attention_reference


def draw(batch, heads, kv_heads, q_len, k_len, dim, dtype, device, seed=0):
    """Query, key and value as models give them: heads inside rows."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(batch, length, n, dim, generator=generator).to(device, dtype).transpose(1, 2)
        for n, length in ((heads, q_len), (kv_heads, k_len), (kv_heads, k_len))
    ]


def intervals_for(batch, q_len, k_len, device):
    """Scattered intervals; the first row of each sequence sees nothing."""
    generator = torch.Generator().manual_seed(3)
    start = torch.randint(0, k_len, (batch, q_len), generator=generator)
    end = torch.randint(0, k_len + 5, (batch, q_len), generator=generator)
    end[:, 0] = start[:, 0]
    return torch.stack([start, end], -1).int().to(device)


def check(got, query, key, value, visibility, scale, roundings=4.0):
    """Out and lse within twice eager's own error, never less than four roundings; zeros, -inf."""
    exact, rough = (
        attention_reference(query, key, value, visibility=visibility, scale=scale, dtype=dtype)
        for dtype in (torch.float64, query.dtype)
    )
    hidden = torch.isneginf(exact[1])
    assert torch.equal(torch.isneginf(got[1]), hidden)
    assert float(got[0][hidden].abs().sum()) == 0.0
    assert got[0].transpose(1, 2).is_contiguous()
    assert (got[0].dtype, got[1].dtype) == (query.dtype, torch.float32)
    eps = torch.finfo(query.dtype).eps, torch.finfo(torch.float32).eps
    for name, have, want, eager, unit in zip(("out", "lse"), got, exact, rough, eps, strict=True):
        assert have.shape == want.shape, name
        have, want, eager = (t.double() for t in (have, want, eager))
        if name == "lse":
            have, want, eager = (t.masked_fill(hidden, 0.0) for t in (have, want, eager))
        assert torch.isfinite(have).all(), name
        size = max(float(want.abs().max()), 1e-3)
        budget = 2 * float((eager - want).abs().max()) + roundings * unit * size
        error = float((have - want).abs().max())
        assert error <= budget, f"{name}: error {error:.2e}, budget {budget:.2e}"


@pytest.fixture
def decode():
    """The launch, with workspaces that are full of NaN before the kernels run."""
    from hf_attn_backends.gate.attend import poisoned
    from hf_attn_backends.kernels.triton.decode import launch_decode

    def run(*args, **kwargs):
        with poisoned():
            return launch_decode(*args, **kwargs)

    return run


KINDS = {
    "full": FULL,
    "causal": CAUSAL,
    "window": Visibility(causal=True, window=9),
    "window of one": Visibility(causal=True, window=1),
    "window of everything": Visibility(causal=True, window=200),
}


@pytest.mark.parametrize("splits", [None, 1, 3])
@pytest.mark.parametrize("kind", [*KINDS, "intervals"])
def test_kinds_and_splits(kind, splits, decode, kernel_device):
    """Groups of three heads by 5 rows: 15 rows of a tile; 3 splits, one of them empty."""
    tensors = draw(2, 6, 2, 5, 101, 32, torch.float32, kernel_device)
    visibility = KINDS.get(kind) or Visibility(intervals=intervals_for(2, 5, 101, kernel_device))
    got = decode(*tensors, visibility, 0.3, splits=splits)
    check(got, *tensors, visibility, 0.3)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "q_len", "k_len"),
    [(4, 1, 1, 129), (2, 2, 1, 1), (8, 2, 16, 70), (1, 1, 16, 16), (20, 1, 1, 65), (2, 1, 7, 3)],
)
def test_groups_and_lengths(heads, kv_heads, q_len, k_len, decode, kernel_device):
    """Fewer packed rows than a tile has, several tiles of them, more queries than keys."""
    tensors = draw(2, heads, kv_heads, q_len, k_len, 32, torch.float32, kernel_device)
    check(decode(*tensors, CAUSAL, 32**-0.5), *tensors, CAUSAL, 32**-0.5)


@pytest.mark.parametrize("dim", [16, 80, 96, 128, 192, 256])
def test_head_dims(dim, decode, kernel_device):
    tensors = draw(1, 4, 1, 2, 77, dim, torch.float32, kernel_device)
    check(decode(*tensors, CAUSAL, dim**-0.5), *tensors, CAUSAL, dim**-0.5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["causal", "window"])
def test_low_precision(dtype, kind, decode, kernel_device):
    tensors = draw(2, 8, 2, 2, 140, 64, dtype, kernel_device)
    check(decode(*tensors, KINDS[kind], 0.125), *tensors, KINDS[kind], 0.125)


@pytest.mark.parametrize("query_in_loop", [False, True])
@pytest.mark.parametrize("apart", [1, 2])
def test_warps_that_share_keys_or_not(apart, query_in_loop, decode, kernel_device):
    from hf_attn_backends.kernels.triton.decode_tiles import DecodeTile

    tile = DecodeTile(16, 32, apart, 2, 2, 1, query_in_loop)
    tensors = draw(1, 4, 2, 3, 100, 32, torch.float16, kernel_device)
    for splits in (1, 2):
        check(decode(*tensors, CAUSAL, 0.2, tile=tile, splits=splits), *tensors, CAUSAL, 0.2)


@pytest.mark.parametrize("kind", ["full", "causal", "window"])
def test_lengths_of_rows(kind, decode, kernel_device):
    """What lies beyond a sequence's length is never read; one has no key, one all of them."""
    query, key, value = draw(4, 4, 2, 3, 100, 32, torch.float32, kernel_device)
    counts = [0, 2, 57, 100]
    for b, count in enumerate(counts):
        key[b, :, count:], value[b, :, count:] = float("nan"), float("nan")
    lengths = torch.tensor(counts, dtype=torch.int32, device=kernel_device)
    for splits in (1, 2):
        out, lse = decode(query, key, value, KINDS[kind], 0.2, lengths=lengths, splits=splits)
        assert float(out[0].abs().sum()) == 0.0
        assert torch.isneginf(lse[0]).all()
        for b in (1, 2, 3):
            alone = [query[b, None], key[b, None, :, : counts[b]], value[b, None, :, : counts[b]]]
            check((out[b, None], lse[b, None]), *alone, KINDS[kind], 0.2)


@pytest.mark.parametrize("block_size", [16, 5, 64])
@pytest.mark.parametrize("kind", ["causal", "window", "intervals"])
def test_paged(kind, block_size, kernel_device):
    """Blocks in any order; entries of the table beyond a length point nowhere."""
    from hf_attn_backends.kernels.triton.decode import launch_paged_decode

    counts, dim, kv_heads = [1, 77, 100], 32, 2
    blocks = -(-100 // block_size)
    query, key, value = draw(3, 4, kv_heads, 2, 100, dim, torch.float16, kernel_device)
    where = torch.randperm(3 * blocks + 2)[: 3 * blocks].view(3, blocks)
    table = torch.full((3, blocks), 2**30, dtype=torch.int32)
    caches = [
        torch.full((3 * blocks + 2, block_size, kv_heads, dim), float("nan")).half()
        for _ in range(2)
    ]
    for b, count in enumerate(counts):
        for n in range(count):
            table[b, n // block_size] = where[b, n // block_size]
            for cache, plain in zip(caches, (key, value), strict=True):
                cache[where[b, n // block_size], n % block_size] = plain[b, :, n].cpu()
    table, caches = table.to(kernel_device), [c.to(kernel_device) for c in caches]
    lengths = torch.tensor(counts, dtype=torch.int32, device=kernel_device)
    everything = intervals_for(3, 2, 100, kernel_device)
    visibility = KINDS.get(kind) or Visibility(intervals=everything)
    out, lse = launch_paged_decode(query, *caches, table, lengths, visibility, 0.2)
    for b, count in enumerate(counts):
        seen = visibility
        if kind == "intervals":
            seen = Visibility(intervals=everything[b, None].clamp(max=count))
        alone = [query[b, None], key[b, None, :, :count], value[b, None, :, :count]]
        check((out[b, None], lse[b, None]), *alone, seen, 0.2)


def test_any_strides(decode, kernel_device):
    """A cropped cache, an expanded batch, a last dimension that is not contiguous."""
    query, key, value = draw(2, 4, 2, 2, 50, 32, torch.float32, kernel_device)
    room = torch.randn(2, 3, 64, 40, device=kernel_device)
    key = room[:, 1:3, 5:55, 3:35]
    value = value[:1].transpose(2, 3).contiguous().transpose(2, 3).expand(2, 2, 50, 32)
    query = query.transpose(2, 3).contiguous().transpose(2, 3)
    assert (query.stride(3), value.stride(3)) != (1, 1)
    check(decode(query, key, value, CAUSAL, 0.2), query, key, value, CAUSAL, 0.2)


def test_intervals_shared_by_the_batch(decode, kernel_device):
    tensors = draw(2, 2, 1, 2, 40, 16, torch.float32, kernel_device)
    one = torch.tensor([[[3, 30], [7, 7]]], dtype=torch.int32, device=kernel_device)
    got = decode(*tensors, Visibility(intervals=one), 0.25)
    check(got, *tensors, Visibility(intervals=one.expand(2, 2, 2)), 0.25)


def test_a_window_of_two_by_hand(decode, kernel_device):
    """Equal scores: the last rows average the values of two keys each; the lse is ln 2."""
    value = torch.arange(70.0, device=kernel_device).view(1, 1, 70, 1).expand(1, 1, 70, 16)
    query = torch.zeros(1, 1, 2, 16, device=kernel_device)
    out, lse = decode(query, value, value, Visibility(causal=True, window=2), 1.0)
    assert out[0, 0, :, 0].tolist() == pytest.approx([67.5, 68.5])
    assert lse[0, 0].tolist() == pytest.approx([math.log(2)] * 2, rel=1e-6)


def test_large_scores_and_scales_that_are_not_positive(decode, kernel_device):
    tensors = draw(1, 4, 2, 3, 100, 32, torch.float32, kernel_device)
    for scale in (40.0, -0.2, -40.0, 0.0):
        for splits in (1, 3):
            check(decode(*tensors, CAUSAL, scale, splits=splits), *tensors, CAUSAL, scale)


def test_runs_repeat_to_the_bit(decode, kernel_device):
    tensors = draw(2, 4, 1, 4, 129, 32, torch.float16, kernel_device)
    first, second = (decode(*tensors, CAUSAL, 0.2) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


@pytest.mark.parametrize(("batch", "q_len", "k_len"), [(0, 3, 5), (2, 0, 5), (2, 3, 0)])
def test_nothing_to_do(batch, q_len, k_len, decode, kernel_device):
    tensors = draw(batch, 4, 2, q_len, k_len, 16, torch.float32, kernel_device)
    out, lse = decode(*tensors, CAUSAL, 0.25)
    assert out.shape == (batch, 4, q_len, 16)
    assert float(out.abs().sum()) == 0.0
    assert torch.isneginf(lse).all()


def test_what_it_does_not_serve_is_refused_with_every_reason(decode):
    query, key, value = draw(1, 2, 1, 17, 20, 16, torch.float32, "cpu")
    hidden = Visibility(dense=torch.ones(1, 1, 17, 20, dtype=torch.bool))
    with pytest.raises(InvalidCallError, match=r"q_len must be at most 16, got q_len 17.*dense"):
        decode(query, key, value, hidden, 0.25)


def test_the_number_of_splits_depends_on_shapes_alone():
    """One wave where that is enough, none where the GPU is full, never more than tiles."""
    from hf_attn_backends.kernels.triton.decode_tiles import decode_tile, number_of_splits

    tile = decode_tile((9, 0), 128, 2, 4)
    long = number_of_splits(132, tile, 8, 131072)
    assert 0.9 * 132 <= 8 * long <= 132  # one program a multiprocessor keeps the memory busy
    assert number_of_splits(132, tile, 256, 4096) == 1
    assert number_of_splits(132, tile, 1, tile.block_n) == 1
    assert number_of_splits(132, tile, 1, 3 * tile.block_n) <= 3
    assert number_of_splits(132, tile, 1, 0) == 1


# (head_dim, key heads, packed rows): {(batch, keys): the best of a sweep on an H200}
BEST = {
    (128, 8, 4): {
        (1, 4096): 16, (1, 32768): 16, (1, 131072): 16, (8, 4096): 2, (8, 32768): 2, (32, 4096): 1,
        (64, 8192): 1, (2, 4096): 8, (3, 4096): 5, (4, 4096): 4, (12, 4096): 2, (24, 4096): 1,
        (1, 1024): 16, (1, 2048): 16, (2, 16384): 8, (16, 1024): 1,
    },
    (64, 16, 4): {(1, 32768): 16, (8, 4096): 2, (32, 4096): 1},
    (256, 4, 4): {(1, 4096): 32, (8, 4096): 8, (32, 4096): 2},
    (128, 8, 64): {(1, 4096): 16, (1, 32768): 16, (8, 4096): 2, (32, 4096): 1},
}  # fmt: skip


@pytest.mark.parametrize("which", BEST)
def test_the_numbers_of_splits_are_what_was_fastest(which):
    from hf_attn_backends.kernels.triton.decode_tiles import decode_tile, number_of_splits

    head_dim, kv_heads, packed = which
    tile = decode_tile((9, 0), head_dim, 2, packed)
    found = {
        shape: number_of_splits(132, tile, shape[0] * kv_heads, shape[1]) for shape in BEST[which]
    }
    assert found == BEST[which]


def test_a_growing_cache_asks_for_its_splits_once_a_tile():
    from hf_attn_backends.kernels.triton import decode_tiles

    tile = decode_tiles.decode_tile((9, 0), 128, 2, 4)
    decode_tiles._splits.cache_clear()
    for keys in range(4096, 4096 + 4 * tile.block_n):
        decode_tiles.number_of_splits(132, tile, 8, keys)
    assert decode_tiles._splits.cache_info().misses == 5
