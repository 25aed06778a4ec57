"""The sm_90 kernels' barriers order every access of shared memory: their sources, simulated."""

from __future__ import annotations

import itertools
import re

import pytest
from device import Descriptor, Device
from engine import ProtocolError
from registers import Number, Table, Value

SEEDS = range(6)


def loaded(device, module, edits):
    """A module on a device; every edit must have found its place."""
    device.edits = edits or {}
    namespace = device.load(module)
    missed = set(device.edits) - device.edited
    if missed:
        raise ValueError(f"{module} and what it imports have no {missed}")
    return namespace


def plain_numbers(n_len):
    """Stand-ins for what the simulation's tensors cannot do: a tile's record keeps its numbers, a
    division divides, and intervals need one to five blocks of keys."""
    tiles = itertools.count()

    def edges(*_args):
        blocks = 1 + (next(tiles) * 7 + 3) % 5
        return Number(n_len), Number(0), Number(n_len), Number(n_len - 128 * blocks + 1)

    return {
        "_write_tile": lambda place, batch, head, row0, *rest: place.store(
            [batch, head, row0, *rest]
        ),
        "_entry": lambda record, place: Number(0) if isinstance(record, Value) else record[place],
        "divide": lambda number, divisor: Number(number // divisor),
        "interval_edges": edges,
        "rescale": lambda acc, alpha: acc,
        "row_bounds": lambda rows, *args: (rows, rows),
    }


def forward(seed, *, kind=1, heads=3, m_len=400, n_len=400, turns=True, programs=2, edits=None):
    """Run one block of the forward; raises on a race."""
    device = Device(seed, program=seed % programs, programs=programs)
    device.overrides = plain_numbers(n_len)
    kernel = loaded(device, "forward_kernels", edits)["attention_forward"]
    m_tiles = -(-m_len // 128)
    rows, keys = Descriptor([1, 1, 64, 128]), Descriptor([1, 1, 128, 128])
    numbers = {
        "batch_heads": heads, "heads": heads, "m_len": m_len, "n_len": n_len, "window": 100,
        "m_tiles": m_tiles, "section": heads, "sections": 1, "batch_stride": 0,
        "whole": heads * m_tiles // programs, "by_section": heads * m_tiles, "by_width": heads,
        "by_last": heads, "by_heads": heads, "by_group": 1,
    }  # fmt: skip
    kernel(
        q_desc=rows, k_desc=keys, v_desc=keys, o_desc=rows, lse_ptr=Value(), intervals_ptr=Value(),
        qk_scale=0.1, **{name: Number(number) for name, number in numbers.items()},
        KIND=kind, BN=128, D=128, TURNS=turns, LAZY=True,
    )  # fmt: skip
    return device.sim


def backward(seed, *, kind=1, head_dim=128, group=2, length=300, edits=None):
    """Run one block of the backward; raises on a race."""
    device = Device(seed)
    kernel = loaded(device, "backward_kernels", edits)["attention_backward"]
    rows_of_a_tile = 64 if head_dim == 128 else 128
    m_tiles = -(-length // rows_of_a_tile)
    rows = Descriptor([1, 1, rows_of_a_tile, head_dim])
    keys = Descriptor([1, 1, 128, head_dim])
    stats = Descriptor([4 if kind == 3 else 2, rows_of_a_tile], 4)
    hull, tiles = Table([0, m_tiles]), Table([0, 128] * m_tiles)
    numbers = [1, 1, group, length, length, m_tiles, 1, 70]
    kernel(
        rows, rows, keys, keys, stats, Descriptor([128, 32], 4), keys, keys, hull, tiles, 0.1, 0.1,
        *map(Number, numbers), KIND=kind,
    )  # fmt: skip
    return device.sim


def test_a_second_tile_in_a_slot_is_simulated():
    """Three tiles of a head: slots and stages are used again, by one program."""
    assert forward(0, kind=0, programs=1, heads=2).operations > 500


@pytest.mark.parametrize("kind", [0, 1, 2, 3])
@pytest.mark.parametrize("seed", SEEDS)
def test_forward_orders_every_access(seed, kind):
    assert forward(seed, kind=kind).operations > 150


@pytest.mark.parametrize(("m_len", "n_len", "heads"), [(1, 1, 1), (128, 900, 1), (700, 130, 2)])
@pytest.mark.parametrize("turns", [True, False])
def test_forward_of_short_and_uneven_lengths(m_len, n_len, heads, turns):
    for seed in SEEDS:
        forward(seed, kind=0, m_len=m_len, n_len=n_len, heads=heads, turns=turns, programs=1)


@pytest.mark.parametrize("kind", [0, 1, 2, 3])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_backward_orders_every_access(kind, head_dim):
    for seed in SEEDS:
        assert backward(seed, kind=kind, head_dim=head_dim).operations > 100


def caught(run, edits, **options):
    """What the simulation says about an edited source, over a few interleavings."""
    for seed in range(20):
        try:
            run(seed, edits=edits, **options)
        except ProtocolError as error:
            return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (r"mbarrier.wait\(k_full.index\(stage\), phase\)\n( +)if TU", r"pass\n\1if TU", "race"),
        (r"mbarrier.wait\(v_full.index\(stage\), phase\)\n( +)acc", r"pass\n\1acc", "race"),
        (r"bar_sync\(free \+ stage, \"288\"\)", "pass", "race"),
        (r"bar_sync\(_?QUERY_FREE \+ slot, \"288\"\)", "pass", "too often|race"),
        (r"bar_arrive\(QUERY_FREE \+ slot, \"288\"\)", "pass", "deadlock"),
        (r"s = warpgroup_mma_wait\(1, deps=\[s\]\)", "s = s", "race"),
        (r"q_s.index\(slot \* 2 \+ w\),", "q_s.index(w),", "race"),
        (r"VALUE_FREE, 1\)", "VALUE_FREE, 2)", "race|left with"),
        (r"q_full.index\(slot\), 2 \* q_desc", "q_full.index(slot), q_desc", "expects"),
        (r"bar_sync\(_TURN, \"256\"\)", "pass", "left with"),
        (r"fence_async_shared\(\)\n    tma_store", "tma_store", "no proxy fence.*store.*TMA store"),
    ],
)  # fmt: skip
def test_a_fault_of_the_forward_is_caught(old, new, says):
    assert re.search(says, caught(forward, {old: new}, kind=0, programs=1))


def test_records_of_two_tiles_are_not_enough():
    """A tile's record is read again when the next tile has begun."""
    assert "race" in caught(forward, {r"& 3\)": "& 1)"}, kind=0, programs=1, n_len=200)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (r"mbarrier.wait\(q_full.index\(stage\), phase\)", "pass", "race"),
        (r"mbarrier.wait\(do_full.index\(stage\), phase\)", "pass", "race"),
        (r"mbarrier.wait\(kv_full, 0\)", "pass", "race"),
        (r"mbarrier.wait\(q_free.index\(stage\), phase \^ 1\)", "pass", "race"),
        (r"bar_sync\(_EXCHANGE, \"256\"\)", "pass", "race"),
        (r"fence_async_shared\(\)\n +bar_sync\(_EX", "bar_sync(_EX", "no proxy fence"),
        (r"turn = it & 1", "turn = it * 0", "race"),
        (r"mbarrier.wait\(dq_full.index\(w\), it & 1\)", "pass", "race"),
        (r"mbarrier.wait\(dq_free.index\(w\), turn \^ 1\)", "pass", "race"),
        (r"tma_store_wait\(0\)\n +mbarrier.arrive\(dq_free", "mbarrier.arrive(dq_free", "race"),
        (r"fence_async_shared\(\)\n +mbarrier.arrive\(dq_full", "mbarrier.arrive(dq_full",
         "no proxy fence"),
        (r"dk = warpgroup_mma_wait\(0, deps=\[dk\]\)", "pass", "race"),
        (r"bar_sync\(_KEYS_READ, \"256\"\)", "pass", "race"),
        (r"bar_sync\(_GRADS_WRITTEN, \"256\"\)", "pass", "race"),
        (r"init\(q_free.index\(i\), 2\)", "init(q_free.index(i), 1)", "too often|deadlock|race"),
    ],
)  # fmt: skip
def test_a_fault_of_the_backward_is_caught(old, new, says):
    assert re.search(says, caught(backward, {old: new}, kind=0))


def test_an_edit_that_finds_nothing_is_an_error():
    with pytest.raises(ValueError, match="have no"):
        forward(0, edits={"no such text": ""})
